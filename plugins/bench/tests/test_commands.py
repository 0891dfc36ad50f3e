"""Each measurement for real, small, as a user runs it."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from engine.cli.main import main
from engine_bench import latency, speculation

SMALL = ("--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-memory", "16MiB")

MARK = f"--served-model-name=of-{os.getpid()}"
"""On the command line of the server that a measurement starts."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ENGINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ENGINE_GRAMMAR_WARM_UP", "false")


@pytest.fixture
def program(monkeypatch, capsys):
    """`engine bench` in this process, which has imported what it needs: exit code, standard output, standard error."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["engine", "bench", *arguments])
        try:
            code = main()
        except SystemExit as left:  # argparse's
            code = int(left.code or 0)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def bench(program):
    """The lines, and the figures of the last one."""

    def run(*arguments: str, code: int = 0) -> tuple[list[str], dict]:
        ended, out, err = program(*arguments, "--json")
        assert ended == code, err + out
        lines = out.splitlines()
        figures = json.loads(lines[-1])
        assert figures and all(isinstance(value, (int, float, str, bool)) for value in figures.values())
        return lines, figures

    return run


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ENGINE_")}
    return kept | {"OMP_NUM_THREADS": "1", "ENGINE_GRAMMAR_WARM_UP": "false"}


def ordered(figures: dict, name: str, *quantiles: int) -> None:
    values = [figures[f"{name}_p{q}"] for q in quantiles]
    assert values == sorted(values) and values[0] >= 0, (name, values)


def test_latency(bench, monkeypatch):
    """The machine is probed once, which takes seconds."""
    monkeypatch.setattr(latency, "probe", functools.cache(latency.probe))
    _, figures = bench("latency", "tiny", "--input-len", "40", "--output-len", "6", "--repeats", "2", *SMALL)
    assert (figures["bench"], figures["model"], figures["output_tokens"]) == ("latency", "tiny", 12)
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        ordered(figures, name, 10, 50, 90)
    assert figures["ttft_ms_p50"] + 5 * figures["itl_ms_p10"] <= figures["e2e_ms_p90"] * 1.0001
    assert figures["decode_gb_s"] > 0 and figures["machine_gb_s_before"] > 0 and figures["machine_gflop_s_after"] > 0
    share = figures["decode_gb_s"] / max(figures["machine_gb_s_before"], figures["machine_gb_s_after"])
    assert figures["decode_share_of_gb_s"] == pytest.approx(share, rel=1e-3)


@pytest.mark.slow
def test_throughput(bench):
    _, figures = bench(
        "throughput", "--num-requests", "5", "--input-len", "8:20", "--output-len", "3:9", "--seed", "4", *SMALL
    )
    assert figures["num_requests"] == 5 and 40 <= figures["input_tokens"] <= 100
    assert 15 <= figures["output_tokens"] <= 45 and figures["steps"] >= figures["output_tokens"] / 5
    rate = (figures["input_tokens"] + figures["output_tokens"]) / figures["seconds"]
    assert figures["total_tokens_per_s"] == pytest.approx(rate, rel=1e-3)
    assert figures["requests_per_s"] == pytest.approx(5 / figures["seconds"], rel=1e-3)


def test_serve_starts_a_server_loads_it_and_stops_it(bench):
    lines, figures = bench(
        "serve", "--num-requests", "12", "--rate", "40", "--burstiness", "0.5", "--input-len", "4:12",
        "--output-len", "2:8", "--slo-ttft", "100000", "--slo-itl", "100000", *SMALL, MARK,
    )  # fmt: skip
    assert (figures["completed"], figures["errors"], figures["good_requests"]) == (12, 0, 12)
    assert figures["output_tokens"] == figures["output_tokens_asked"] and 48 <= figures["input_tokens"] <= 144
    assert figures["goodput_per_s"] == figures["requests_per_s"]
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        ordered(figures, name, 50, 90, 99)
    assert any("█" in line for line in lines)
    left = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not any("serve" in command and MARK in command for command in left)


@pytest.mark.slow
def test_conversations_that_are_drawn(bench):
    """Each turn finds what was said before it; those with one system prompt share it."""
    lines, figures = bench(
        "serve", "--turns", "3", "--num-requests", "5", "--rate", "inf", "--max-concurrency", "2",
        "--think-time", "0.01", "--input-len", "8:16", "--output-len", "4:8", "--system-prompts", "1",
        "--system-words", "24",
        "--slo-ttft", "60000", *SMALL, "--max-model-len", "1024",
    )  # fmt: skip
    assert (figures["load"], figures["conversations"], figures["turns"]) == ("conversations", 5, 15)
    assert (figures["completed"], figures["errors"], figures["not_sent"], figures["good_requests"]) == (15, 0, 0, 15)
    assert 60 <= figures["output_tokens"] <= 120
    for name in ("", "turn_1_", "turn_3_"):
        ordered(figures, f"{name}ttft_ms", 50, 90, 99)
        ordered(figures, f"{name}e2e_ms", 50, 90, 99)
    assert [figures[f"turn_{n}_completed"] for n in (1, 2, 3)] == [5, 5, 5]
    sizes = [figures[f"turn_{n}_input_tokens"] for n in (1, 2, 3)]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2]
    assert 0.3 < figures["turn_2_cached_share"] < 1 and figures["turn_3_cached_share"] < 1
    assert figures["prefix_hit_share"] == pytest.approx(figures["cached_share"], abs=0.02)
    assert any(line.split()[:2] == ["3", "5"] for line in lines), "a line for each turn"


def test_conversations_of_a_file(bench, tmp_path):
    """Both forms; a conversation that grows too long ends there, and is counted."""
    entries = [
        {"conversations": [{"from": "gpt", "value": "left out"}, {"from": "human", "value": "Hello"},
                           {"from": "gpt", "value": "recorded"}, {"from": "human", "value": "Go on"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                      {"role": "assistant", "content": "recorded"}, {"role": "user", "content": "And?"}],
         "think_times": [0.02]},
        {"messages": [{"role": "user", "content": "word " * 2000}, {"role": "assistant", "content": "x"},
                      {"role": "user", "content": "never sent"}]},
        {"messages": [{"role": "assistant", "content": "nobody asks"}]},
    ]  # fmt: skip
    file = tmp_path / "talks.jsonl"
    file.write_text("\n".join(json.dumps(entry) for entry in entries))
    _, figures = bench(
        "serve", "--conversations", str(file), "--rate", "inf", "--think-time", "0", "--output-len", "4", *SMALL
    )
    assert (figures["conversations"], figures["turns"], figures["completed"]) == (3, 6, 4)
    assert (figures["errors_http_400"], figures["not_sent"]) == (1, 1)
    assert figures["output_tokens"] == 16


@pytest.mark.slow
def test_a_server_that_dies_is_counted(tmp_path):
    """Errors, not an exception: the run ends, and what was lost is told."""
    output = tmp_path / "server"
    with output.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, "-m", "engine", "serve", "tiny", "--port", "0", *SMALL],
            stdout=file, stderr=file, env=environment(),
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 90
        while "http://" not in (text := output.read_text()):
            assert server.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)
        url = "http://" + text.partition("http://")[2].split("/")[0].split()[0]
        load = subprocess.Popen(
            [sys.executable, "-m", "engine", "bench", "serve", "--url", url, "--num-requests", "60", "--rate", "15",
             "--input-len", "4", "--output-len", "100", "--json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(),
        )  # fmt: skip
        process = psutil.Process(server.pid)
        while not any(c.status == "ESTABLISHED" for c in process.net_connections()):
            assert load.poll() is None, load.communicate()
            time.sleep(0.02)
        time.sleep(1.0)
        server.send_signal(signal.SIGKILL)
        out, err = load.communicate(timeout=120)
    finally:
        server.kill()
        server.wait()
    figures = json.loads(out.splitlines()[-1])
    assert load.returncode == (0 if figures["completed"] else 1), err
    assert figures["errors"] > 0 and figures["errors_refused"] > 0
    assert figures["completed"] + figures["errors"] == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["latency", "--output-len", "1"], "ask for at least 2"),
        (["latency", "--input-len", "4000"], "max_model_len is"),
        (["throughput", "--input-len", "9:3"], "that is no length"),
        (["throughput", "--temperature", "nan"], "out of range"),
        (["serve", "--rate", "0"], "out of range"),
        (["serve", "--url", "http://127.0.0.1:9"], "no answer (refused)"),
        (["serve", "--url", "http://127.0.0.1:9", "--dtype", "float32"], "has its own settings"),
        (["serve", "--model-name", "x"], "without --url"),
        (["serve", "--think-time", "1"], "no conversations are replayed"),
        (["serve", "--conversations", "/no/such/file"], "/no/such/file"),
        (["serve", "--conversations", "x", "--turns", "3"], "leave out --turns"),
        (["serve", "--turns", "0"], "--turns 0"),
        (["serve", "--turns", "2", "--think-time", "-1"], "out of range"),
        (["serve", "--model", "/no/such/model"], "/no/such/model"),
        (["serve", "--plot", "/no/such/folder/x.png"], "folder"),
        (["latency", "--data-parallel-size", "2"], "leave data_parallel_size out"),
        (["latency", "--repaets", "2"], "--repeats"),
        (["speculation", "--drafter", "ngram"], "name it by --draft"),
        (["speculation", "--draft", "ngram,min_match"], "NAME,option=value"),
        (["speculation", "--draft", "=3,min_match=2"], "NAME,option=value"),
        (["speculation", "--draft", "suffix,num_tokens=9"], "num_tokens would not count"),
        (["speculation", "--num-tokens", "0"], "write numbers from 1 to 64"),
        (["speculation", "--num-tokens", "2.5"], "write whole numbers from 1 to 64"),
        (["speculation", "--right", "often"], "write numbers from 0 to 1"),
        (["nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_told(program, arguments, message):
    code, _, err = program(*arguments)
    assert code == 2 and message in err


def test_speculation(bench, monkeypatch):
    """One drafter, and one that knows every answer: then all drafts are accepted, and steps give 1 + k tokens."""
    monkeypatch.setattr(speculation, "PROMPTS", {"facts": (("What is seven times eight?",), ("Say hello.", "Again."))})
    lines, figures = bench(
        "speculation", "tiny", "--dtype", "float64", "--num-tokens", "3", "--right", "1", "--draft",
        "suffix,min_match=2", "--output-len", "12", *SMALL,
    )  # fmt: skip
    assert figures["bench"] == "speculation" and figures["tokens"] > 10 and figures["none_tokens_per_s"] > 0
    assert figures["known_100_k3_accepted_share"] == 1 and figures["known_100_up_to_3_accepted_share"] == 1
    assert 2 < figures["known_100_k3_accepted_length"] <= 4, "shorter at an answer's end"
    for name in ("suffix_k3", "suffix_up_to_3", "known_100_k3"):
        assert 0 <= figures[f"{name}_accepted_share"] <= 1 <= figures[f"{name}_accepted_length"]
        assert figures[f"{name}_speedup"] == pytest.approx(
            figures[f"{name}_tokens_per_s"] / figures["none_tokens_per_s"], rel=1e-3
        )
        assert figures[f"{name}_facts_speedup"] > 0 and figures[f"{name}_step"] > 0
    assert any(line.split()[:3] == ["suffix", "up", "to"] for line in lines)


def test_speculation_of_a_tree_has_as_many_drafts_as_the_tree(bench, monkeypatch):
    """Its paths have commas, and may be more than the numbers that are asked for."""
    pytest.importorskip("engine_drafters")
    monkeypatch.setattr(speculation, "PROMPTS", {"facts": (("What is seven times eight?",),)})
    _, figures = bench(
        "speculation", "tiny", "--num-tokens", "2", "--right", "none", "--draft",
        "medusa,tree=[[0],[0,0],[1]]", "--output-len", "8", *SMALL,
    )  # fmt: skip
    assert figures["medusa_k3_accepted_length"] >= 1 and figures["medusa_up_to_3_accepted_length"] >= 1
    assert not any("_k2_" in name for name in figures)


def test_a_comma_in_a_value_is_no_end_of_it():
    found = speculation.parse_drafters(["medusa,tree=[[0],[1, 0]],model=a=b", "ngram"])
    assert found == [("medusa", {"tree": "[[0],[1, 0]]", "model": "a=b"}), ("ngram", {})]


def test_speculation_needs_answers_of_two_tokens(program, monkeypatch):
    monkeypatch.setattr(speculation, "PROMPTS", {"facts": (("What is seven times eight?",),)})
    code, _, err = program("speculation", "tiny", "--output-len", "1", *SMALL)
    assert code == 2 and "every answer ended with its first token" in err and "a larger --output-len" in err


def test_speculation_leaves_out_what_cannot_be_used(bench, monkeypatch):
    monkeypatch.setattr(speculation, "PROMPTS", {"facts": (("What is seven times eight?",),)})
    monkeypatch.setattr(speculation, "_installed", lambda: ["nobody"])
    lines, figures = bench("speculation", "tiny", "--num-tokens", "2", "--output-len", "3", *SMALL)
    assert figures["none_tokens_per_s"] > 0 and not any("_k2_" in name for name in figures)
    assert any(line.startswith("nobody is left out: ") for line in lines)
    assert any(line.startswith("known is left out: ") for line in lines)


def test_kv(bench):
    """Each tier gives all that it was to keep in every turn, or the run would warn of it."""
    pytest.importorskip("engine_connectors")
    pytest.importorskip("engine_blend")
    lines, figures = bench(
        "kv", "tiny", "--prompt-len", "64", "--turns", "2", "--tiers", "device,blended,host,file,tcp,tcp-push",
        "--max-model-len", "256", "--max-num-seqs", "2",
    )  # fmt: skip
    assert (figures["bench"], figures["prompt_len"], figures["turns"]) == ("kv", 64, 2)
    assert not any("was computed" in line for line in lines)
    for name in ("computed", "device", "blended", "host", "file", "tcp", "tcp_push"):
        assert figures[f"{name}_ttft_ms"] > 0 and figures[f"{name}_of_computed"] > 0
        assert (f"{name}_gb_s" in figures) == (name not in ("computed", "device", "blended"))
    assert figures["moved_bytes"] > 0 and figures["machine_copy_gb_s_before"] > 0


@pytest.mark.parametrize(
    "flags, said",
    [
        (("--tiers", "device,tape"), "there is no such tier"),
        (("--prompt-len", "100"), "give a multiple of 16"),
        (("--prompt-len", "16", "--tiers", "blended"), "give a larger --prompt-len"),
        (("--question-len", "17"), "give at most 16"),
        (("--kv-connector", "file"), "name them by --tiers"),
        (("--prompt-len", "64", "--tiers", "redis", "--redis-url", "redis://127.0.0.1:1"), "no server answers"),
    ],
)
def test_kv_refuses(program, flags, said):
    code, _, err = program("kv", "tiny", *SMALL, *flags)
    assert code != 0 and said in err
