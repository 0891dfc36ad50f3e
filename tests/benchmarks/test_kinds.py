"""Each kind for real, small, as `python -m tests.benchmarks` runs it."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import psutil
import pytest

from engine.cli.main import canonical
from tests.benchmarks.__main__ import PROGRAM, main, parser
from tests.docs.markdown import blocks, spans

DOCS = Path(__file__).resolve().parents[2] / "docs"
SMALL = ("--max-model-len", "256", "--max-num-seqs", "8", "--kv-cache-memory", "16MiB")
MARK = f"--served-model-name=of-{os.getpid()}"
"""On the command line of the server that a measurement starts."""


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("ENGINE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ENGINE_GRAMMAR_WARM_UP", "false")


@pytest.fixture
def bench(monkeypatch, capsys):
    """The lines, and the figures of the last one."""

    def run(*arguments: str) -> tuple[list[str], dict]:
        monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments, "--json"])
        ended = main()
        out, err = capsys.readouterr()
        assert ended == 0, err + out
        lines = out.splitlines()
        figures = json.loads(lines[-1])
        assert figures["command"] == f"{PROGRAM} {shlex.join(sys.argv[1:])}"
        return lines, figures

    return run


def ordered(figures: dict, name: str, *quantiles: int) -> None:
    values = [figures[f"{name}_p{q}"] for q in quantiles]
    assert values == sorted(values) and values[0] >= 0, (name, values)


def test_scheduler_with_drafts_and_kv_tables(bench):
    """An own figure for what is asked, and every step has drafts: half of them come back as tokens."""
    _, figures = bench("scheduler", "--running", "12", "--waiting", "5", "--steps", "40", "--drafts", "3",
                       "--kv-tables", "3")  # fmt: skip
    assert (figures["drafts"], figures["kv_tables"]) == (3, 3)
    # 40 steps of 2.5 tokens, 100 in blocks of 16; sliding windows give back as many pages as they take.
    assert 12 * 6 <= figures["evicted_pages"] <= 12 * 8


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (12, 30)])
def test_scheduler(bench, running, waiting):
    _, figures = bench("scheduler", "--running", str(running), "--waiting", str(waiting), "--steps", "40")
    assert (figures["running"], figures["waiting"], figures["steps"]) == (running, waiting, 40)
    assert figures["step_ms"] == figures["step_ms_p50"]
    for name in ("step_ms", "schedule_ms", "update_ms", "encode_ms", "cpu_ms", "core_step_ms", "engine_step_ms"):
        ordered(figures, name, 0, 50, 90, 99)
    # 40 tokens in blocks of 16, all of them taken from the evictor.
    assert running * 2 <= figures["evicted_pages"] <= running * 3


def test_scheduler_prints_all_in_one_table(bench):
    lines, figures = bench("scheduler", "--all", "--steps", "4", "--input-len", "20")
    for case in ("one", "full", "queue", "drafts"):
        for name in ("step_ms", "cpu_ms", "core_step_ms", "engine_step_ms"):
            ordered(figures, f"{case}_{name}", 0, 50, 99)
    for name in ("page_us", "hash_32k_ms"):
        ordered(figures, name, 0, 50)
    assert figures["evictor"] == "lru" and any("256 + 10000, drafts" in line for line in lines)


def test_overhead(bench):
    """Almost all of a step is the model's, and the parts make the whole."""
    _, figures = bench("overhead", "tiny", "--running", "3", "--steps", "8", *SMALL)
    assert (figures["bench"], figures["running"], figures["steps"]) == ("overhead", 3, 8)
    for name in ("step_ms", "executor_ms", "outside_ms"):
        ordered(figures, name, 0, 50, 90)
    assert figures["executor_ms_p0"] + figures["outside_ms_p0"] <= figures["step_ms_p0"] * 1.0001
    assert 0 < figures["outside_share"] < 1 and 0 < figures["executor_python_share"] < 1


def test_overhead_of_pages_that_are_filled(bench):
    """Of each prompt no more than what fills no block is computed."""
    flags = (
        "overhead",
        "tiny",
        "--running",
        "3",
        "--steps",
        "4",
        "--input-len",
        "65",
        "--max-num-batched-tokens",
        "32",
    )
    steps = {filled: bench(*flags, *filled)[1]["steps_to_begin"] for filled in ((), ("--filled",))}
    assert steps[()] > 3 * 64 // 32 > steps["--filled",] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--drafts", "3", "--kv-tables", "3", "--evictor", "prefix"),
        (),
        ("--evictor", "prefix"),
    ],
)
def test_soak(bench, flags):
    _, figures = bench("soak", "--requests", "300", "--running", "12", *flags)
    assert figures["ended_length"] + figures["ended_abort"] == 300 and figures["ended_abort"] > 0
    # Between 1 and 24 tokens each, sometimes up to 128; those that are aborted get fewer.
    assert 300 * 8 < figures["output_tokens"] < 300 * 24
    assert figures["num_preemptions"] > 0 and figures["evicted_pages"] > 0 and figures["prefix_hit_rate"] > 0.05


@pytest.mark.parametrize("route", ["chat", pytest.param("completions", marks=pytest.mark.slow)])
def test_api_counts_an_event_a_token(bench, route: str):
    _, figures = bench(
        "api", "tiny", "--connections", "6", "--output-len", "30", "--repeats", "1", "--requests", "5",
        "--rate", "600", "--route", route, MARK,
    )  # fmt: skip
    assert (figures["bench"], figures["route"], figures["connections"]) == ("api", route, 6)
    assert figures["paced_events_per_token"] == 1 and 0 < figures["paced_tokens_per_s"] < 700
    assert 0 < figures["free_events_per_token"] <= 1 and figures["free_tokens_per_s"] > figures["paced_tokens_per_s"]
    for name in ("ttft_ms", "core_ttft_ms"):
        ordered(figures, name, 50, 90, 99)
    left = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not any("serve" in command and MARK in command for command in left)


@pytest.mark.slow
def test_start(bench):
    """The command and the server are real; the memory that processes share is counted once in Pss."""
    _, figures = bench("start", "tiny", "--repeats", "2", "--output-len", "4", MARK)
    ordered(figures, "first_text_s", 0, 50, 100)
    assert 0 < figures["first_text_s_p0"] < figures["end_s_p100"] and figures["processes"] >= 2
    assert 50 < figures["pss_mib"] <= figures["rss_mib"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["scheduler", "--evictor", "lru2"], "lru"),
        (["scheduler", "--waiting", "-1"], "below 0"),
        (["scheduler", "--all", "--drafts", "3"], "leave out --drafts"),
        (["soak", "--requests", "3"], "below 10"),
        (["overhead", "--running", "9", *SMALL], "raise --max-num-seqs"),
        (["overhead", "--steps", "4000", *SMALL], "lower --input-len or --steps"),
        (["nonsense"], "nonsense"),
    ],
)
def test_mistakes_are_told(capsys, arguments, message):
    try:
        code = main(arguments)
    except SystemExit as left:  # argparse's
        code = left.code
    assert code == 2 and message in capsys.readouterr().err


def test_command_lines_in_the_texts_are_understood(capsys):
    pages = [path for path in DOCS.rglob("*.md") if PROGRAM in path.read_text()]
    texts = [text for path in pages for text in [*(block.text for block in blocks(path)), *spans(path)]]
    lines = [line.strip().removeprefix("$ ") for text in texts for line in text.splitlines()]
    found = [line for line in lines if line.startswith(f"{PROGRAM} ")]
    assert len(found) > 10
    for line in found:
        parser().parse_args(canonical(shlex.split(line, comments=True)[3:]))
