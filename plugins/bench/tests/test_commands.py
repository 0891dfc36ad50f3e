"""Each measurement for real, small, as a user runs it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from engine.cli.main import main

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


def test_latency(bench):
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
        (["nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_told(program, arguments, message):
    code, _, err = program(*arguments)
    assert code == 2 and message in err
