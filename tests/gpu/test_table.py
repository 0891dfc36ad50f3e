"""What of `make gpu-check` needs no GPU: its arithmetic, its budget, its table."""

from __future__ import annotations

import io
import re
import signal
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version

from engine.config.settings import EngineConfig
from engine.frontend.launch import launch
from engine.types.start import Choice
from tests.gpu import bench_switches, first
from tests.gpu import page as page_module
from tests.gpu.bench_engine import in_fp8
from tests.gpu.bench_linear import MODELS, choose, measure
from tests.gpu.bench_moe import Layer, Shape
from tests.gpu.bench_moe import measure as measure_experts
from tests.gpu.device_time import table as kernels
from tests.gpu.device_time import union
from tests.gpu.environment import ROOT, packages, prepare, variables
from tests.gpu.first import ALONE, TESTS, Check, Stage, chosen, last_words, parser, stages, summary
from tests.gpu.page import Part, cells, page
from tests.gpu.parts import Budget, outlived, run
from tests.gpu.roofline import PLAIN, Bits, Limits, decode_operations, least_seconds
from tests.gpu.rows import MARK, Ceilings, Row, tell, told
from tests.gpu.sheets import sheet_of, why_void
from tests.gpu.workload import nano_vllm

LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256,
}  # fmt: skip
GOOD = Ceilings("NVIDIA H100 80GB HBM3", "torch 2.11", 3000.0, 720.0)


def test_the_workload_is_nano_vllms() -> None:
    """Its own page tells of 133,966 output tokens."""
    requests = nano_vllm()
    assert len(requests) == 256 and sum(request.output_len for request in requests) == 133_966
    assert all(100 <= len(request.prompt) <= 1024 for request in requests)


def test_roofline() -> None:
    """One row reads every multiplied weight once; many rows' products are bound by computing, attention by reading."""
    alone = decode_operations(LLAMA, 1, 1)
    weights = 2 * (8.03e9 - 128256 * 4096)  # all but the input embedding
    assert sum(operation.num_bytes for operation in alone) == pytest.approx(weights, rel=2e-3)
    assert sum(operation.flops for operation in alone) == pytest.approx(weights, rel=2e-3)
    many = {operation.name: operation for operation in decode_operations(LLAMA, 256, 1024)}
    cache = 256 * 1024 * 2 * 8 * 128 * 2 * 32
    assert many["attention"].num_bytes == pytest.approx(cache, rel=0.01)
    limits = Limits(3000, 720, 1440)
    assert many["attention"].seconds(limits) == pytest.approx(cache / 3e12, rel=0.01)
    wide = decode_operations(LLAMA, 4096, 1)[3]
    assert wide.seconds(limits) == wide.flops / 720e12 > wide.num_bytes / 3e12
    least = least_seconds(many.values(), limits)
    assert least == pytest.approx(sum(operation.seconds(limits) for operation in many.values()))
    assert 0.015 < least < 0.02  # 15 GB of weights and 34 GB of cache at 3 TB/s


def test_the_roofline_of_fp8() -> None:
    """Half the bytes of what is kept so, but for scales and results, and twice the operations a second: a little more
    than half the time."""
    limits = Limits(4350, 750, 1500)
    plain, all_fp8 = decode_operations(LLAMA, 256, 1024), decode_operations(LLAMA, 256, 1024, Bits(True, True, True))
    for before, after in zip(plain, all_fp8, strict=True):
        assert (before.name, before.flops) == (after.name, after.flops)
        assert before.num_bytes / 2 < after.num_bytes < before.num_bytes / 1.6
        assert after.fp8 == (after.name != "attention") and not before.fp8
    down, small = (next(one for one in of if one.name == "down") for of in (plain, all_fp8))
    assert before.num_bytes == 2 * (4096 * 128256 + 256 * (4096 + 128256))
    assert small.num_bytes == 32 * (14336 * 4096 + 256 * 14336 + 2 * 256 * 4096 + 4 * (4096 + 256))
    assert small.seconds(limits) == max(small.num_bytes / 4.35e12, down.flops / 1.5e15)
    times = {fp8: least_seconds(decode_operations(LLAMA, 256, 1024, fp8), limits) for fp8 in (
        PLAIN, Bits(linear=True), Bits(cache=True), Bits(True, True, True))}  # fmt: skip
    bf16, weights, cache, everything = times.values()
    assert everything < cache < weights < bf16 and 0.5 < everything / bf16 < 0.55


def test_what_of_an_engine_is_in_fp8() -> None:
    named = [Choice(point="quantization", kind=kind, driver=driver, distribution="", version="", value="")
             for kind, driver in (("linear", "fp8"), ("head", "int8"))]  # fmt: skip
    for choices, dtype, expected in (
        (named, "float8_e4m3fn", Bits(linear=True, cache=True)),
        ([], None, PLAIN),
        (named[1:], "bfloat16", PLAIN),
    ):
        start: Any = SimpleNamespace(choices=choices, kv_cache_dtype=dtype)
        assert in_fp8(start) == expected


@pytest.mark.parametrize(("title", "model"), [("8B", "dummy:llama-8B"), ("0.6B", "dummy:0.6B")])
def test_products_alone_are_those_of_the_roofline(title: str, model: str) -> None:
    """The same shapes, as often as the model that the engine is measured with has them, and their bytes."""
    config = launch(EngineConfig(model=model, platform="host")).model.config
    asked: list[tuple[int, int, int]] = []

    def seconds(inputs: int, outputs: int, rows: int) -> float:
        asked.append((inputs, outputs, rows))
        return 1e-3

    row = measure(title, MODELS[title], 256, seconds)
    steps = (1 + 4 * config["num_hidden_layers"]) * 1e-3
    products = [operation for operation in decode_operations(config, 256, 1) if operation.name != "attention"]
    assert row.gb_s == pytest.approx(sum(operation.num_bytes for operation in products) / steps / 1e9)
    assert row.tflop_s == pytest.approx(sum(operation.flops for operation in products) / steps / 1e12)
    assert [rows for *_, rows in asked] == [256] * 5 and row.result.startswith(f"{steps * 1e3:.2f} ms; GB/s: qkv ")


def test_what_choosing_a_product_by_shape_would_bring() -> None:
    """Each shape's fastest, as often as a step has it; where none is faster than what is taken, nothing."""

    def ways(inputs: int, outputs: int, rows: int) -> dict[str, float]:
        narrow = inputs > outputs
        return {"as it is": 4e-6, "cuBLASLt": 2e-6 if narrow else 5e-6, f"{rows + 1} rows": 4e-6}

    sizes = MODELS["0.6B"]
    narrow = sum(times for _, inputs, outputs, times in sizes.shapes() if inputs > outputs)
    every = sum(times for *_, times in sizes.shapes())
    row = choose("0.6B", sizes, 7, ways)
    assert row.figures["usual_ms"] == pytest.approx(4e-3 * every)
    assert row.figures["best_ms"] == pytest.approx(4e-3 * every - 2e-3 * narrow) and 0 < narrow < every
    assert "down cuBLASLt 2.0 of 4.0 us" in row.result and "qkv as it is 4.0 of 4.0 us" in row.result


def test_a_switch_that_fails_is_told_and_the_others_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def measured(command: list[str], check: bool) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=int("platform.dependents=auto" in command))

    monkeypatch.setattr(subprocess, "run", measured)
    monkeypatch.setattr(sys, "argv", ["bench_switches"])
    with pytest.raises(SystemExit) as ended:
        bench_switches.main()
    assert ended.value.code and len(asked) == len(bench_switches.SWITCHES)


def test_time_that_overlaps_counts_once() -> None:
    assert union([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == 4
    assert union([]) == 0


def test_sheets_and_void_measurements() -> None:
    sheet = sheet_of("NVIDIA H100 80GB HBM3")
    assert sheet is not None and sheet.gb_s == 3350 and sheet.fp8_tflop_s == 1979
    nvl, hopper = sheet_of("NVIDIA H100 NVL"), sheet_of("NVIDIA GH200 480GB")
    assert nvl is not None and nvl.gb_s == 3938 and hopper is not None and hopper.gb_s == 4000
    assert sheet_of("NVIDIA H20") != sheet_of("NVIDIA H200") is not None
    assert why_void(GOOD.device, 3000, 720) == []
    (slow,) = why_void(GOOD.device, 2000, 720)
    assert "2,000 GB/s, under 85%" in slow
    assert "not known" in why_void("Abacus", 1, 1)[0]


def test_rows_travel(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row("a", "1 ms", gb_s=2.5, share="gb_s", bar=0.5, figures={"x": 1.0})
    tell(row)
    tell(GOOD)
    lines = capsys.readouterr().out.splitlines()
    assert told(["noise", *lines, MARK + '{"kind": "Row", "wha']) == ([row], GOOD)


def test_the_table_says_what_is_met_and_what_is_void() -> None:
    rows = [
        Row("decode", "6 ms", gb_s=2700, tflop_s=3, share="gb_s", bar=0.85),
        Row("prefill", "300 ms", gb_s=50, tflop_s=360, share="tflop_s", bar=0.6),
        Row("host", "9 of 10 ms", share="idle", figures={"idle": 0.1}, bar=0.03, at_most=True),
        Row("tokens", "many", share="rate", figures={"rate": 20_000.0}, bar=17_400, unit="tokens/s"),
        Row("start", "4 s"),
    ]
    text = page(rows, GOOD, [Part("tests", 3.2, "exit status 1", "2 passed | 1 failed", True)], "2026-11-21", "abc")
    assert "| decode | 6 ms | 2,700 (90%) | 3 (0%) | at least 85.0% | yes (90.0%) |" in text
    assert "| prefill | 300 ms | 50 (2%) | 360 (50%) | at least 60.0% | no (50.0%) |" in text
    assert "| host | 9 of 10 ms |  |  | at most 3.0% | no (10.0%) |" in text
    assert "| tokens | many |  |  | at least 17,400 tokens/s | yes (20,000 tokens/s) |" in text
    assert "| start | 4 s |  |  |  |  |" in text and "720 TFLOP/s of a bf16 matrix product (data sheet: " in text
    eighths = Row("8 bits", "1 ms", tflop_s=700, fp8=True, share="tflop_s", bar=0.4)
    told_both = page([eighths], replace(GOOD, fp8_tflop_s=1400.0), [], "", "")
    assert (
        "720 TFLOP/s of a bf16 matrix product, 1,400 of one in fp8 (data sheet: 3,350 GB/s, 989, in fp8 1,979"
        in told_both
    )
    assert "| 8 bits | 1 ms |  | 700 (50%) | at least 40.0% | yes (50.0%) |" in told_both
    assert cells(eighths, GOOD)[3:] == ("700", "at least 40.0%", "void"), "it was not measured"
    assert "| tests | 3 | 2 passed / 1 failed; exit status 1 |" in text and "Void" not in text
    void = page(rows, Ceilings(GOOD.device, "", 1000, 720), [], "2026-11-21", "abc")
    assert "**Void**: reading reached 1,000 GB/s" in void
    assert "| decode | 6 ms | 2,700 | 3 | at least 85.0% | void |" in void
    assert cells(rows[0], None)[-1] == "void" and page_module.value(rows[4], GOOD) is None
    assert "nothing was measured" not in text and "no GPU" in page([], None, [], "", "")


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Who is told of a part's lines. The part's time is over soon after the first, however long it took to start."""
    spoke = threading.Event()
    plain = subprocess.Popen.wait

    class Listener(io.StringIO):
        def write(self, text: str) -> int:
            spoke.set()
            return super().write(text)

    def wait(process: subprocess.Popen[str], timeout: float | None = None) -> int:
        if not spoke.is_set():
            assert spoke.wait(60), "it says nothing"
            timeout = 0.1
        return plain(process, timeout)

    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    return Listener()


def test_a_part_that_hangs_is_stopped_and_what_it_told_is_kept(listener: io.StringIO) -> None:
    program = "import time, subprocess; subprocess.Popen(['sleep', '60']); print('told', flush=True); time.sleep(60)"
    outcome = run([sys.executable, "-c", program], 60, variables(None), listener)
    assert outcome.status is None and outcome.lines == ["told"] and listener.getvalue() == "told\n"
    assert outcome.seconds < 50
    assert run([sys.executable, "-c", "raise SystemExit(3)"], 20, variables(None)).status == 3


def test_the_budget_is_shared() -> None:
    budget = Budget(100)
    assert budget.limit(30) == 30 and 85 < budget.limit(200, reserved=10) <= 90 and Budget(-1).limit(9) == 0
    check = Check(Budget(3), variables(None))
    check.stage(Stage("late", [["-c", "pass"]], 50))
    assert check.parts == [Part("late", 0, "left out: no time was left", failed=True)]


def test_a_parts_end_is_told(tmp_path: Path) -> None:
    check = Check(Budget(60), variables(None), tmp_path / "out" / "table.md")
    program = f'print(\'{MARK}\' + \'{{"kind": "Row", "what": "w", "result": "r"}}\'); raise SystemExit(\'no luck\')'
    check.stage(Stage("one", [["-c", program]], 30))
    assert check.rows == [Row("w", "r")]
    assert check.parts[0].trouble == "exit status 1: no luck" and check.parts[0].failed
    assert "no luck" in (tmp_path / "out" / "table.md").read_text()
    assert any("does not answer" in part.trouble for part in check.parts), "there is no GPU here to answer"
    assert last_words(["a", " "]) == "a" and last_words([]) == "it said nothing"
    pytest_said = ["....", "FAILED a.py::b - AssertionError: c", "1 failed, 3 passed, 2 skipped in 4.10s"]
    assert summary(pytest_said) == "1 failed, 3 passed, 2 skipped in 4.10s; FAILED a.py::b"


def test_a_stage_of_shares_is_told_what_the_machine_can_do() -> None:
    """In fp8 where that was measured."""
    row = '@row {"kind": "Row", "what": "w", "result": "%s"}'
    told_as = f"import sys; print({row!r} % ' '.join(sys.argv[1:]))"
    check = Check(Budget(60), variables(None))
    for check.ceilings in (GOOD, replace(GOOD, fp8_tflop_s=1400.0)):
        check.stage(Stage("shares", [["-c", told_as]], 30, shares=True))
    both = "--gb-s 3000.0 --tflop-s 720.0"
    assert [row.result for row in check.rows] == [both, f"{both} --fp8-tflop-s 1400.0"]
    assert [stage.name for stage in chosen(stages(1), "fp8") if stage.shares] == ["fp8: Llama 8B"]


def test_figures_that_were_taken_side_by_side_do_not_count(tmp_path: Path) -> None:
    """What failed among them does; and they do not write where figures are written."""
    row = f'print(\'{MARK}\' + \'{{"kind": "Row", "what": "w", "result": "RESULT"}}\')'
    tell_one = row.replace("RESULT", "1 ms")
    failing = 'import os; assert "OUT" not in os.environ; ' + row.replace("RESULT", "failed: x")
    check = Check(Budget(60), {**variables(None), "OUT": str(tmp_path)})
    check.stage(Stage("both", [["-c", tell_one], ["-c", failing]], 30))
    assert [row.result for row in check.rows] == ["failed: x"]
    assert [part.failed for part in check.parts] == [False, True]


def test_a_process_that_outlives_its_stage_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it left the session: it may compute, and take the GPU from whoever is next, which is then looked at."""
    monkeypatch.setattr(first, "PROBE", "raise SystemExit(1)")
    monkeypatch.setattr(first, "CONTEXTS_SECONDS", 0.0)
    quiet = "stdout=s.DEVNULL, stderr=s.DEVNULL"  # who holds the stage's own is waited for
    leaves = f"import subprocess as s; s.Popen(['sleep', '60'], start_new_session=True, {quiet})"
    check = Check(Budget(60), variables(None))
    check.stage(Stage("leaving", [["-c", leaves]], 30))
    assert "1 processes outlived it" in check.parts[1].trouble
    assert "does not answer" in check.parts[2].trouble
    assert not outlived("no such=entry")


def test_tests_that_measure_the_gpu_have_it_alone() -> None:
    """Every folder is in the first stage but for what measures, which is not divided."""
    assert all((ROOT / path).exists() for path in (*TESTS, *ALONE))
    together, *others = stages(4)
    spread = next(command for command in together.commands if "pytest" in command)
    (alone,) = (stage.commands[0] for stage in others if stage.tests)
    assert list(alone[-len(ALONE) :]) == list(ALONE) and "-n" not in alone
    assert spread[spread.index("-n") + 1] == "4" and list(spread[-len(TESTS) :]) == list(TESTS)
    assert all(f"--ignore={path}" in spread for path in ALONE)
    assert "gpu and not slow" in spread and "gpu" in stages(1, thorough=True)[0].commands[0]
    assert "-n" not in stages(1)[0].commands[0]


def test_stages_are_chosen_by_the_beginnings_of_their_names() -> None:
    found = stages(1)
    assert [stage.name for stage in chosen(found, "Llama,ceil")] == ["Llama 8B", "ceilings"]
    assert chosen(found, "") == found
    with pytest.raises(SystemExit, match="no such stage; there are tests"):
        chosen(found, "lama")


def test_the_environment_has_every_package(tmp_path: Path) -> None:
    """As installers would have it: another process finds the drivers."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "a-1-py3-none-any.whl", "w") as archive:
        archive.writestr("a_module.py", "x = 1")
    prepare(tmp_path / "to", wheels)
    names = {path.name for path in (tmp_path / "to").glob("*.dist-info")}
    assert len(names) == len(packages()) > 15
    needs = re.compile(r"^Requires-Dist: (engine-\w+)", re.MULTILINE)
    texts = [path.read_text() for path in (tmp_path / "to").glob("*.dist-info/METADATA")]
    needed = {need.replace("-", "_") for text in texts for need in needs.findall(text)}
    assert "engine_cpu" in needed
    assert needed <= {name.partition("-")[0] for name in names}, "what a package builds on is there"
    program = (
        "import a_module; from importlib.metadata import entry_points as e, version as v; print(v('engine-cuda'), "
        "sorted(p.load().__name__ for p in e(group='engine.ops.v0') if p.name.startswith('triton')))"
    )
    told = run([sys.executable, "-c", program], 60, variables(tmp_path / "to"))
    assert told.status == 0 and told.lines[-1] == "0.1.0 ['TritonGemv', 'TritonOps']", told.lines
    assert parser().parse_args(["--here", "--seconds", "60"]).seconds == 60


def test_the_table_of_what_ran_on_the_device() -> None:
    text = kernels("one row", [("a|b", 0.0, 2.0), ("c", 2.0, 12.0), ("a|b", 12.0, 16.0)], 2, 8e-6)
    assert text.splitlines()[0] == "### one row: 8 us a step in which the device works"
    assert text.splitlines()[4:6] == ["| 5.0 | 0.5 | 10.00 | c |", "| 3.0 | 1.0 | 3.00 | a/b |"]


def test_what_is_interrupted_may_say_how_far_it_came(listener: io.StringIO) -> None:
    """As pytest does, which ends without a word at other signals."""
    program = (
        "import time\n"
        "try:\n"
        "    print('....', flush=True)\n"
        "    time.sleep(60)\n"
        "except KeyboardInterrupt: print('FAILED a.py::b - c'); print('1 failed, 2 passed in 1.00s')"
    )
    outcome = run([sys.executable, "-c", program], 60, variables(None), listener, stop=signal.SIGINT)
    assert outcome.status is None and summary(outcome.lines) == "1 failed, 2 passed in 1.00s; FAILED a.py::b"


@pytest.mark.slow
def test_the_reader_reads_every_word() -> None:
    """In Triton's interpreter: the programs' sums add up to the sum of what they say that they read."""
    triton, numpy = pytest.importorskip("triton"), pytest.importorskip("numpy")
    if Version(triton.__version__) < Version("3.7") and Version(numpy.__version__) >= Version("2.4"):
        pytest.skip("the interpreter of Triton 3.6 takes no numpy from 2.4 on")
    program = (
        "import torch; from tests.gpu import read_kernel as r;"
        "words = torch.arange(8 * r.BLOCK * r.UNROLL + 5).int() % 7;"
        "launch, size = r.reader(words); assert size == 8 * r.BLOCK * r.UNROLL * 4; "
        "assert int(launch().sum()) == int(words[: size // 4].sum()), launch()"
    )
    outcome = run(
        [sys.executable, "-c", program], 60, {**variables(None), "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    )
    assert outcome.status == 0, outcome.lines


@pytest.mark.slow
def test_few_rows_side_by_side() -> None:
    """In Triton's interpreter, on small matrices: every way computes the same, and a row tells each."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.gpu.bench_small_rows", "--device", "cpu", "--models", "0.6B"]
    outcome = run(
        [*command, "--divide", "64", "--cold-bytes", "1", "--seconds", "12"], 100,
        {**variables(None), "TRITON_INTERPRET": "1"},
    )  # fmt: skip
    assert outcome.status == 0, outcome.lines
    rows, _ = told(outcome.lines)
    *measured, left = rows
    assert len(measured) >= 2 and "no time was left" in left.result
    assert all(row.result.startswith("cuBLAS 0.0, gemv 0.0") for row in measured), measured
    assert all("fused, dependent 0.0" in row.result for row in measured)


def test_few_rows_name_what_went_wrong() -> None:
    """A way that computes something else, or nothing, is told and not timed; the others are."""
    pytest.importorskip("triton")
    program = (
        "import sys, torch; sys.argv = ['', '--device', 'cpu', '--models', '0.6B', '--divide', '64', '--seconds', '0'];"
        "from tests.gpu import bench_small_rows as bench;"
        "bench.few_rows = lambda x, packed, **_: x.new_empty(x.shape[0], packed.weight.shape[0]);"
        "bench.ROWS, bench.MAIN_ROWS = (1,), (1,);"
        "asked = type('', (), dict(device='cpu', cold_bytes=1))();"
        "bench.layer_row('0.6B', 'head', bench.Fused(32, 16), 1, asked)"
    )
    outcome = run(
        [sys.executable, "-c", program], 60, {**variables(None), "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    )
    assert outcome.status == 0, outcome.lines
    rows, _ = told(outcome.lines)
    assert "gemv: ArithmeticError: wrong by inf" in rows[0].result and "; cuBLAS 0.0, composed 0.0" in rows[0].result


@pytest.mark.slow
def test_experts_side_by_side() -> None:
    """In Triton's interpreter, on small experts: all three compute what float64 does, and a row tells each."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.gpu.bench_moe", "--device", "cpu", "--divide", "32", "--tokens", "1,6"]
    outcome = run(command, 120, {**variables(None), "TRITON_INTERPRET": "1"})
    assert outcome.status == 0, outcome.lines
    rows, _ = told(outcome.lines)
    names = ("loop", "torch._grouped_mm", "triton")
    assert len(rows) == 2 * 2 and all(f"{name} 0.0 us" in row.result for name in names for row in rows)
    assert not any("failed" in row.result for row in rows)


@pytest.mark.slow
def test_draws_side_by_side() -> None:
    """In Triton's interpreter, of small vocabularies: both ways draw the same."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "tests.gpu.bench_draw", "--device", "cpu", "--divide", "2048", "--rows", "3,1"]
    outcome = run(command, 60, {**variables(None), "TRITON_INTERPRET": "1"})
    assert outcome.status == 0, outcome.lines
    rows, _ = told(outcome.lines)
    assert len(rows) == 2 * 2 * 2
    assert all(row.result == "from a copy 0.0, as they are 0.0" for row in rows)


def test_experts_that_are_wrong_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever leaves a row unwritten, or is far from float64, fails alone."""
    pytest.importorskip("triton")
    layer = Layer(Shape(4, 2, 16, 8), "cpu")
    right = layer.computes()["loop"]

    def unwritten(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out[1:] = right(x, ids, weights)[1:]
        return out

    wrong = {"half": lambda *given: right(*given) * 0.5, "unwritten": unwritten, "loop": right}
    monkeypatch.setattr(layer, "computes", lambda: wrong)
    row = measure_experts(layer, "small", 5)
    assert row.result.startswith("failed: half: AssertionError")
    assert "unwritten: AssertionError: 1 of 5 rows" in row.result and "loop 0.0 us" in row.result
