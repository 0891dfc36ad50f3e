"""The driver: fake peers that speak the protocol, that lie, that fail; the comparison; the page; ours end to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors import safe_open

from engine_bench.probe import Machine
from tests.benchmarks.conftest import TINY
from tests.benchmarks.peers import registry
from tests.benchmarks.peers.__main__ import main, parser
from tests.benchmarks.peers.bars import BARS, BEST, verdicts
from tests.benchmarks.peers.checkpoint import DRAFT_LAYERS, FADING, write_checkpoint
from tests.benchmarks.peers.compare import Bench, Engine, compare
from tests.benchmarks.peers.environment import InstallError, interpreter
from tests.benchmarks.peers.llama_cpp import speculate
from tests.benchmarks.peers.ours import Ours
from tests.benchmarks.peers.page import page
from tests.benchmarks.peers.peer import Peer
from tests.benchmarks.peers.process import PeerProcess, WorkerError, compiled_folder, worker_environment
from tests.benchmarks.peers.protocol import GGUF, Settings
from tests.benchmarks.peers.results import Comparison, LeftOut, Results, Start, Task
from tests.benchmarks.peers.roofline import machine_share
from tests.benchmarks.peers.workloads import WORKLOADS, Request, warm_up

Fake = Callable[..., Peer]
PYTHON = Path(sys.executable)
MACHINE = Machine(read_gb_s=50.0, gflop_s=800.0, threads=4, dtype="bfloat16")
CALLS = [[Request([5, 6], 3), Request([10], 1)], [Request([20], 2)]]


def settings(folder: Path, checkpoint: str = "none") -> Settings:
    """For a worker of the tests."""
    return Settings(checkpoint, str(folder / "converted"), "bf16", 1, 2048, 64, 1 << 24)


def process(peer: Peer, folder: Path) -> PeerProcess:
    """A worker of the tests."""
    return PeerProcess(peer, PYTHON, folder, settings(folder))


def bench(folder: Path, lines: list[str], **changes: int) -> Bench:
    """One that probes nothing."""
    values = {"pairs": 3, "starts": 2, "threads": 1} | changes
    return Bench(clock="wall", cache=folder, probe=lambda: MACHINE, say=lines.append, level="", **values)


def empty(**changes: object) -> Results:
    """Results before anything is measured."""
    return msgspec.structs.replace(
        Results(commands=["run"], date="2026-11-21", threads=4, features=["avx2"], pairs=5), **changes
    )


def test_a_worker_prepares_loads_runs_and_ends(fake: Fake, tmp_path: Path) -> None:
    with process(fake(), tmp_path) as worker:
        worker.prepare()
        assert (tmp_path / "converted").is_dir()
        worker.load()
        assert list(worker.versions) == ["numpy"]
        answer = worker.run(CALLS, 64)
        assert answer.outputs == [[[7, 8, 9], [11]], [[21, 22]]]
        assert len(answer.seconds) == 2
        assert min(answer.seconds) >= 0.001
        assert 1 << 20 < worker.peak_memory() < 1 << 30
        pid = worker._process.pid
    with pytest.raises(ProcessLookupError):
        os.killpg(pid, 0)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("short", r"asked for \[3, 1\] tokens, got \[2, 1\]"),
        ("strange", "outside the vocabulary of 64"),
        ("slow clock", r"says that the calls took 0\.00\d s"),
        ("load", "RuntimeError: there is no such model"),
        ("die", "ended while it was asked to 'load': out of everything"),
    ],
)
def test_a_worker_that_fails_or_does_less_than_asked_is_found_out(
    fake: Fake, tmp_path: Path, fault: str, said: str
) -> None:
    with process(fake(fault=fault), tmp_path) as worker, pytest.raises(WorkerError, match=said):
        worker.load()
        worker.run(CALLS, 64)


def test_a_paused_worker_uses_no_time_and_goes_on_when_resumed(fake: Fake, tmp_path: Path) -> None:
    with process(fake(), tmp_path) as worker:
        worker.load()
        worker.pause()
        state = Path(f"/proc/{worker._process.pid}/stat")
        deadline = time.monotonic() + 10
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline
        worker.resume()
        assert worker.run(CALLS, 64).outputs[1] == [[21, 22]]
        worker.pause()
    assert worker._process.poll() is not None, "closing resumes it first"


def test_a_paused_worker_ends_with_a_driver_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from tests.benchmarks.test_peers_driver import *\n"
        "from tests.benchmarks.peers.peer import Peer\n"
        "worker = process(Peer('fake', 'tests.benchmarks.fake_peer', (), None, ''), Path(sys.argv[1]))\n"
        "worker.load(); worker.pause(); print(worker._process.pid, flush=True); sys.stdin.read()\n"
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout is not None
    pid = int(driver.stdout.readline())
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    deadline = time.monotonic() + 20
    while Path(f"/proc/{pid}").exists() and "State:\tZ" not in Path(f"/proc/{pid}/status").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_workers_get_their_own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere/else")
    peer = registry.PEERS["vllm"]
    narrow = worker_environment(peer, tmp_path, Settings("c", "d", "bf16", 4, 2048, 64, 2**30, "avx2"))
    assert narrow["ONEDNN_MAX_CPU_ISA"] == "AVX2" and narrow["ATEN_CPU_CAPABILITY"] == "avx2"
    found = worker_environment(peer, tmp_path, Settings("c", "d", "bf16", 4, 2048, 64, 3 * 2**30 + 1))
    assert found["PYTHONPATH"] == str(Path(__file__).parents[2])
    assert found["OMP_NUM_THREADS"] == "4"
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == "0-3"
    assert found["VLLM_CPU_KVCACHE_SPACE"] == "4"
    assert found["VLLM_CACHE_ROOT"].startswith(str(compiled_folder(peer, tmp_path)))


def test_pairs_alternate_and_every_pair_has_its_own_prompts(fake: Fake, tmp_path: Path) -> None:
    lines: list[str] = []
    ours, theirs = Engine(fake("ours"), PYTHON), Engine(fake("theirs"), PYTHON)
    stale = compiled_folder(theirs.peer, tmp_path)
    stale.mkdir(parents=True)
    results = empty()
    tasks = [Task("W1", "bf16"), Task("W3", "bf16")]
    compare(bench(tmp_path, lines), results, ours, theirs, TINY, Path("none"), "bf16", tasks)
    assert not results.left_out
    assert not stale.exists(), "the first start is a cold one"
    first, second = results.comparisons
    assert (first.task.name, first.peer, second.task.name) == ("W1", "theirs", "W3")
    assert len(first.ours) == len(first.theirs) == 3
    assert len(first.machine) == 4
    assert first.same_first_tokens == 1.0
    assert first.ratios == [a / b for a, b in zip(first.ours, first.theirs, strict=True)]
    assert [(start.engine, start.peer, len(start.seconds)) for start in results.starts] == [
        ("ours", "theirs", 2),
        ("theirs", "theirs", 2),
    ]
    assert all(start.peak_memory > 1 << 20 and min(start.seconds) > 0 for start in results.starts)
    begun = [line.split(",")[0] for line in lines if "first token after" in line]
    assert begun == ["ours", "theirs", "ours", "theirs"]


@pytest.mark.parametrize("fault", ["load", "short"])
def test_a_peer_that_fails_is_left_out_with_the_reason(fake: Fake, tmp_path: Path, fault: str) -> None:
    results = empty()
    engines = Engine(fake("ours"), PYTHON), Engine(fake("theirs", fault), PYTHON)
    compare(bench(tmp_path, []), results, *engines, TINY, Path("none"), "bf16", [Task("W1", "bf16")])
    assert not results.comparisons
    (left,) = results.left_out
    assert left.what.startswith("theirs, tiny, bf16")
    assert {"load": "no such model", "short": "asked for"}[fault] in left.reason


@pytest.mark.slow
def test_an_environment_is_made_once_and_anew_when_its_steps_change(fake: Fake, tmp_path: Path) -> None:
    peer = fake("pip", steps=(("list",),))
    python = interpreter(peer, tmp_path, 1)
    assert subprocess.run([python, "-c", "import pip"], check=True).returncode == 0
    mark = python.parents[1] / "mark"
    mark.touch()
    assert interpreter(peer, tmp_path, 1) == python
    assert mark.exists()
    interpreter(fake("pip", steps=(("list", "--verbose"),)), tmp_path, 1)
    assert not mark.exists()


def test_an_environment_is_made_anew_when_what_its_level_compiles_with_changes(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is built from source; wheels are the same at every level."""
    run: list[str] = []

    def only_said(what: str, command: list[str], *rest: object) -> None:
        run.append(what)
        if what == "python -m venv":
            (Path(command[-1]) / "bin").mkdir(parents=True)
            (Path(command[-1]) / "bin" / "python").touch()

    monkeypatch.setattr("tests.benchmarks.peers.environment._run", only_said)
    built, wheels = fake("built", steps=(("install", "--no-binary", "x"),)), fake("wheels", steps=(("install", "x"),))

    def made(peer: Peer) -> bool:
        run.clear()
        interpreter(peer, tmp_path, 1, "avx2")
        return bool(run)

    assert made(built) and made(wheels)
    assert not made(built) and not made(wheels)
    monkeypatch.setattr("tests.benchmarks.peers.environment.LEVELS", {"avx2": {"CMAKE_ARGS": "-DOTHER"}})
    assert made(built) and not made(wheels)


@pytest.mark.slow
def test_what_cannot_be_installed_says_why(fake: Fake, tmp_path: Path) -> None:
    missing = fake("missing", steps=(("install", "--no-index", "there-is-no-such-distribution"),))
    with pytest.raises(InstallError) as raised:
        interpreter(missing, tmp_path, 1)
    assert str(raised.value).startswith("pip install --no-index there-is-no-such-distribution failed: ")
    assert str(raised.value).endswith("ERROR: No matching distribution found for there-is-no-such-distribution")
    assert "Could not find a version" in raised.value.log.read_text()


def test_a_peer_that_cannot_be_installed_is_no_error_of_the_whole(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(peer: Peer, cache: Path, jobs: int, level: str) -> Path:
        if peer.name == "missing":
            raise InstallError("there is no wheel", cache / "log")
        return PYTHON

    peers = {"missing": fake("missing", steps=(("install", "missing"),)), "there": fake("there")}
    monkeypatch.setattr("tests.benchmarks.peers.__main__.PEERS", peers)
    monkeypatch.setattr("tests.benchmarks.peers.__main__.OURS", fake("engine"))
    monkeypatch.setattr("tests.benchmarks.peers.__main__.MODELS", {"tiny": TINY})
    monkeypatch.setattr("tests.benchmarks.peers.page.MODELS", {"tiny": TINY})
    monkeypatch.setattr("tests.benchmarks.peers.__main__.interpreter", install)
    monkeypatch.setattr("tests.benchmarks.peers.__main__.probe", lambda dtype: MACHINE)
    flags = ["--cache", str(tmp_path), "--model", "tiny", "--work", "W1,W1-int8", "--pairs", "1", "--starts", "1"]
    assert main([*flags, "--page", str(tmp_path / "a.md")]) == 0
    (kept,) = (tmp_path / "results").iterdir()
    results = Results.load(kept)
    assert [(left.what, left.reason) for left in results.left_out] == [
        ("missing", "there is no wheel"),
        ("there, int8", "it has no such weights on processors"),
    ]
    assert [(c.model, c.task.name, c.peer) for c in results.comparisons] == [("tiny", "W1", "there")]
    text = (tmp_path / "a.md").read_text()
    assert "- missing: there is no wheel" in text
    assert "## tiny (0 million parameters)" in text
    assert "\npython -m tests.benchmarks.peers --peer all --model tiny --work W1,W1-int8 --pairs 1 --starts 1\n" in text
    assert str(tmp_path) not in text, "nobody else has this folder"


def test_a_peer_that_cannot_be_kept_to_a_level_is_left_out_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny_checkpoint: Path
) -> None:
    """Before it is installed: vLLM's environment takes gigabytes."""
    installed = []
    monkeypatch.setattr("tests.benchmarks.peers.__main__.checkpoint", lambda *args, **kwargs: tiny_checkpoint)
    monkeypatch.setattr(
        "tests.benchmarks.peers.__main__.interpreter", lambda peer, *rest: installed.append(peer.name) or PYTHON
    )
    assert main(["--peer", "vllm", "--model", "10M", "--level", "avx2", "--cache", str(tmp_path)]) == 0
    (kept,) = (tmp_path / "results").iterdir()
    (left,) = Results.load(kept).left_out
    assert left.what == "vllm, kept to avx2" and "its own compiled kernels" in left.reason
    assert installed == ["engine"]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--peer", "lama"), ("--model", "7B"), ("--work", "W9"), ("--work", "W1-int3"), ("--pairs", "0")],
)
def test_what_there_is_not_is_refused(flag: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=flag):
        main([flag, value, "--cache", str(tmp_path)])


def test_processor_time_is_asked_of_one_thread(fake: Fake, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="add --threads 1"):
        main(["--clock", "cpu", "--threads", "2", "--cache", str(tmp_path)])
    with process(fake("a"), tmp_path) as worker:
        worker.load()
        began = time.perf_counter()
        answer = worker.run(CALLS, 100, "cpu")
        assert sum(answer.seconds) < time.perf_counter() - began


def test_the_default_work_is_known() -> None:
    names = [Task.parse(text).name for text in parser().parse_args([]).work.split(",")]
    assert names == ["W1", "W2", "W3", "W4", "W1-int8", "W1-int4", "W1-draft"]
    # the first is no work, the second is asked for with the mixture of experts, the others by the form of their files
    by_name = {"start", "W5", *(f"{work}-{form}" for work in ("W1", "W4", "W5") for form in GGUF)}
    assert {bar.task for bar in BARS} - by_name <= set(names)
    assert {bar.peer for bar in BARS} <= {BEST, *registry.PEERS}


def test_every_peer_is_a_script_of_its_own() -> None:
    for name, peer in (registry.PEERS | {registry.OURS.name: registry.OURS}).items():
        assert peer.name == name
        assert Path(__file__).parents[2].joinpath(*peer.module.split(".")).with_suffix(".py").exists()


def comparison(task: str, peer: str, ours: list[float], theirs: list[float], model: str = "0.6B") -> Comparison:
    """As if measured."""
    machine = [MACHINE] * (len(ours) + 1)
    return Comparison(
        model=model,
        task=Task.parse(task),
        peer=peer,
        ours=ours,
        theirs=theirs,
        machine=machine,
        same_first_tokens=0.75,
    )


def measured() -> Results:
    """Results of two peers."""
    return empty(
        comparisons=[
            comparison("W1", "llama.cpp", [40.0, 42.0, 20.0], [40.0, 40.0, 40.0]),
            comparison("W1", "vllm", [40.0, 42.0, 20.0], [10.0, 10.0, 10.0]),
            comparison("W3", "vllm", [4.0], [6.0]),
        ],
        starts=[
            Start(model="0.6B", weights="bf16", engine="engine", peer="vllm", seconds=[4.0, 3.0], peak_memory=1 << 30),
            Start(model="0.6B", weights="bf16", engine="vllm", peer="vllm", seconds=[60.0, 30.0], peak_memory=1 << 31),
        ],
        left_out=[LeftOut("openvino", "no wheel")],
    )


def test_bars_are_held_against_the_best_peer_or_the_one_named() -> None:
    found = {(v.bar.model, v.bar.task): (v.against, v.ratio, v.met) for v in verdicts(measured())}
    assert found["0.6B", "W1"] == ("llama.cpp", 1.0, True)
    assert found["0.6B", "W3"] == ("vllm", 1.5, True)
    assert found["0.6B", "start"] == ("vllm", 15.0, True)
    assert found["0.6B", "W2"] == ("", None, None)


def test_the_page_shows_figures_ratios_bars_starts_and_what_is_missing() -> None:
    text = page(measured())
    assert "| W1 | `llama.cpp` | 40 tokens/s (77%) | 40 tokens/s (77%) | 1.00 | 0.50 to 1.05 | 75% |" in text
    assert "| 0.6B | W3 | 1.3 × the best peer | 1.50 × vllm | met |" in text
    assert "| 0.6B | W2 | 1.4 × the best peer | not measured |  |" in text
    assert "| 0.6B | bf16 | `vllm` | 60.00 | 30.00 | 2,048 |" in text
    assert "- openvino: no wheel" in text
    assert "2026-11-21, 4 cores (avx2), 5 pairs. Probes: 50 to 50 GB/s read, 800 to 800 GFLOP/s" in text
    assert "Nothing has been measured" in page(empty())


def test_the_share_of_the_machine() -> None:
    one = comparison("W1", "x", [25.0], [50.0])
    from tests.benchmarks.peers.dimensions import MODELS

    assert machine_share(one, MODELS["0.6B"], one.ours) == pytest.approx(25 * 0.968e9 / 50e9, rel=0.01)
    assert machine_share(comparison("W2", "x", [1.0], [1.0]), MODELS["0.6B"], [1.0]) is None


def test_results_survive_a_file_and_a_later_run_replaces_what_it_measured_again(tmp_path: Path) -> None:
    first = measured()
    first.save(tmp_path / "a" / "first.json")
    assert Results.load(tmp_path / "a" / "first.json") == first
    later = empty(comparisons=[comparison("W3", "vllm", [3.0], [6.0])], commands=["again"], date="2026-11-22")
    later.save(tmp_path / "later.json")
    target = tmp_path / "page.md"
    files = [str(tmp_path / "a" / "first.json"), str(tmp_path / "later.json")]
    assert main(["--from", *files, "--page", str(target)]) == 0
    text = target.read_text()
    assert "2.00 × vllm" in text
    assert "1.50 × vllm" not in text
    assert text.count("| W1 |") >= 2
    assert "2026-11-22" in text
    for what, changes in {
        "features: avx512f, not avx2": {"features": ["avx512f"]},
        "cores: 2, not 4": {"threads": 2},
    }.items():
        empty(**changes).save(tmp_path / "later.json")
        with pytest.raises(SystemExit, match=f"later.json: it was measured with other .*{what}; write a page of each"):
            main(["--from", *files, "--page", str(target)])


class Repeats:
    """What llama.cpp's speculation asks of a model: one that goes on as `whole` does, whatever it is told, but for
    what `others` has at some places."""

    def __init__(self, whole: list[int], others: dict[int, int]) -> None:
        self.length = 0
        self.computed: list[int] = []
        self._says = [others.get(place, token) for place, token in enumerate(whole)]

    def cut(self, length: int) -> None:
        self.computed = self.computed[:length]
        self.length = len(self.computed)

    def compute(self, tokens: Sequence[int], count: int) -> list[int]:
        self.computed += tokens
        self.length = len(self.computed)
        return self._says[self.length - count + 1 : self.length + 1]


@pytest.mark.parametrize("wrong", [set(), {9}, {8, 9, 15, 16, 17}, set(range(40))])
def test_llama_cpp_speculates_as_greedy_decoding_goes(wrong: set[int]) -> None:
    """Whatever of the drafts is right, and twice over: the text is the target's, which has computed all but its last
    token, and no other."""
    whole = [number * 7 % 11 for number in range(40)]
    target, draft = Repeats(whole, {}), Repeats(whole, dict.fromkeys(wrong, 99))
    for output_len in (1, 2, 20):
        for _ in range(2):
            assert speculate(target, draft, whole[:6], output_len) == whole[6 : 6 + output_len]
            assert target.computed == whole[: 6 + output_len - 1]
            assert draft.computed == whole[: draft.length]


def test_ours_drafts_with_the_checkpoints_own_draft_model(tmp_path: Path) -> None:
    """The draft model is the target's beginning, and both say the same where what follows there adds nothing."""
    folder = write_checkpoint(replace(TINY, num_layers=DRAFT_LAYERS + 1), tmp_path / "model", draft=True)
    own = Settings(str(folder), str(tmp_path), "draft", 1, 2048, 4, TINY.kv_bytes(8192))
    files = (one / "model.safetensors" for one in (folder, own.draft_folder))
    whole, part = (safe_open(file, "pt") for file in files)
    with whole, part:
        for name in part.keys():  # noqa: SIM118
            assert torch.equal(whole.get_tensor(name), part.get_tensor(name))
        fading = whole.get_tensor(f"model.layers.{DRAFT_LAYERS}.mlp.down_proj.weight")
        assert fading.float().std() == pytest.approx(0.02 * FADING, rel=0.1)
    worker = Ours()
    worker.load(own)
    plain = Ours()
    plain.load(replace(own, weights="bf16"))
    prompts = [[5, 6, 7, 8], [9, 4, 3]]
    assert worker.generate(prompts, [12, 9]) == plain.generate(prompts, [12, 9])
    stats = worker._llm.llm_engine.stats()
    assert 0 < stats.num_accepted_drafts <= stats.num_drafts and not plain._llm.llm_engine.stats().num_drafts


def test_kv8_is_the_same_model_with_a_cache_of_8_bits(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """It is converted as bf16 is; ours is told of the cache, OpenVINO has it anyway."""
    assert Task.parse("W2-kv8") == Task("W2", "kv8") and Task("W2", "kv8").name == "W2-kv8"
    engine, one = Engine(registry.PEERS["openvino"], PYTHON), bench(tmp_path, [])
    plain, int8, kv8 = (one.settings(engine, TINY, tiny_checkpoint, form) for form in ("bf16", "int8", "kv8"))
    assert kv8.converted == plain.converted != int8.converted
    worker = Ours()
    worker.load(replace(plain, weights="kv8", kv_bytes=TINY.kv_bytes(8192)))
    plan = worker._llm.llm_engine.plan
    assert (plan.start.worker.kv_cache_dtype, plan.start.worker.dtype) == ("int8", "bfloat16")


def test_ours_runs_every_workload_on_a_tiny_model(tiny_checkpoint: Path, tmp_path: Path) -> None:
    own = Settings(str(tiny_checkpoint), str(tmp_path), "bf16", 1, 2048, 64, TINY.kv_bytes(8192))
    with PeerProcess(registry.OURS, PYTHON, tmp_path, own) as worker:
        worker.prepare()
        worker.load()
        assert "engine" in worker.versions
        alone = worker.run(warm_up(TINY)[:1], TINY.vocab_size)
        again = worker.run(warm_up(TINY)[:1], TINY.vocab_size)
        assert alone.outputs == again.outputs
        for name in ("W1", "W3"):
            work = WORKLOADS[name]
            calls = [call[:4] for call in work.draw(TINY, 0)]
            assert work.figure(calls, worker.run(calls, TINY.vocab_size).seconds) > 0
