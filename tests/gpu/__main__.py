"""The command: `python -m tests.gpu --wheels DIR`, which `make gpu-check` calls. Needs nothing but Python itself."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gpu.environment import ROOT, commands, prepare, variables
from tests.gpu.page import Part, page
from tests.gpu.parts import Budget, Outcome, run
from tests.gpu.rows import Ceilings, Row, told

NO_GPU = "no GPU: torch.cuda.is_available() is False, so nothing can be measured here"
TESTS = ("tests/gpu", "plugins/cuda/tests", "plugins/flashattn/tests", "plugins/flashinfer/tests")
ALONE = ("tests/gpu", "plugins/cuda/tests/test_platform_gpu.py")
"""Those that measure the GPU's memory and its time: nothing else uses it meanwhile."""
MOST_WORKERS = 8
"""Processes that the other tests are divided among, as far as there are processors: nearly all of their time goes to
compiling kernels, some hundred of them, which one process does for longer than the whole check may take."""
PROBE = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)"
NEEDED = ("torch", "triton", "transformers", "pytest", "hypothesis", "setuptools", "wheel")
"""What the machine's own Python must have: `requirements-gpu.txt` brings the rest."""
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
RESERVED = 6.0
"""Seconds kept for ending what hangs and for the table."""


class Check:
    """A run of all parts.

    Args:
        budget: of all of them.
        environment: of their processes.
    """

    def __init__(self, budget: Budget, environment: dict[str, str]) -> None:
        self.budget = budget
        self.environment = environment
        self.rows: list[Row] = []
        self.ceilings: Ceilings | None = None
        self.parts: list[Part] = []

    def part(
        self,
        name: str,
        command: Sequence[str],
        most: float,
        later: float = 0.0,
        more: Mapping[str, str] | None = None,
        stop: int = signal.SIGTERM,
    ) -> Outcome:
        """Run one; `later` seconds are kept for those after it, `more` is added to its environment, the signal `stop`
        ends it at its limit. What it tells goes into the table however it ends."""
        limit = self.budget.limit(most, RESERVED + later)
        if limit < 5:
            self.parts.append(Part(name, 0, "left out: no time was left", failed=True))
            return Outcome()
        print(f"\n== {name}, at most {limit:.0f} s", flush=True)
        outcome = run(command, limit, {**self.environment, **(more or {})}, sys.stdout, stop)
        rows, ceilings = told(outcome.lines)
        self.rows += rows
        self.ceilings = ceilings or self.ceilings
        trouble = ""
        if outcome.status is None:
            trouble = f"stopped after {outcome.seconds:.0f} s"
        elif outcome.status:
            trouble = f"exit status {outcome.status}: {last_words(outcome.lines)}"
        failed = bool(trouble) or any(row.result.startswith("failed") for row in rows)
        self.parts.append(Part(name, outcome.seconds, trouble, summary(outcome.lines), failed))
        return outcome

    def measure(self, name: str, module: str, arguments: Sequence[str], most: float, later: float = 0.0) -> None:
        """A part that is a module of this folder."""
        self.part(name, [sys.executable, "-m", f"tests.gpu.{module}", *arguments], most, later)


def last_words(lines: Sequence[str]) -> str:
    """The last line that says something."""
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")


def summary(lines: Sequence[str]) -> str:
    """What pytest counted, and the names of what failed; empty for other programs."""
    counted = next((line.strip("= ") for line in reversed(lines) if " in " in line and _counts(line)), "")
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    return "; ".join([*([counted] if counted else []), *failed])


def _counts(line: str) -> bool:
    return any(f" {word}" in line for word in ("passed", "failed", "skipped", "error", "errors", "deselected"))


def install(target: Path, wheels: Path | None, budget: Budget) -> Part:
    """Make the environment."""
    began = time.monotonic()
    prepare(target)
    for command in commands(target, wheels):
        done = run(command, budget.limit(120), variables(target), sys.stdout)  # what came first builds the rest
        if done.status != 0:
            why = "stopped at its limit" if done.status is None else last_words(done.lines)
            return Part("environment", time.monotonic() - began, f"not installed: {why}", failed=True)
    return Part("environment", time.monotonic() - began)


def unfit(budget: Budget) -> str:
    """What is missing of the Python that this runs on; empty where nothing is."""
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return (
            f"gpu-check needs a Python that has {', '.join(NEEDED)}; {sys.executable} lacks {', '.join(lacking)}: "
            "install them, or name another with GPU_PYTHON=python3.12"
        )
    probe = run([sys.executable, "-c", PROBE], budget.limit(60), variables(None), sys.stdout)
    return NO_GPU if probe.status == 3 else ""


def check(asked: argparse.Namespace) -> int:
    """Run it all, print the table, and give the exit status: 0 where all was run and no test failed, 1 where something
    failed, 2 where there is no GPU. Bars that are missed do not fail it: the table says so."""
    budget, target = Budget(asked.minutes * 60), None
    if (lacking := unfit(budget)) and not asked.here:
        print(lacking, flush=True)
        return 2
    parts = []
    if not asked.here:
        target = asked.into
        parts.append(install(target, asked.wheels, budget))
    found = Check(budget, variables(target))
    found.parts += parts
    gpu = False
    if not any(part.failed for part in parts):
        probe = run([sys.executable, "-c", PROBE], budget.limit(60), found.environment, sys.stdout)
        gpu = probe.status == 0
        if gpu:
            found.measure("ceilings", "ceilings", [], 45)
        tests = [path for path in asked.tests.split(",") if (ROOT / path).exists()]
        spread = run([sys.executable, "-c", "import xdist"], budget.limit(20), found.environment).status == 0
        workers = min(MOST_WORKERS, (os.cpu_count() or 1) // 2) if spread else 1
        later = 210 if gpu else 0
        for name, arguments in parts_of_tests(tests, workers):
            alone = "-n" not in arguments
            most, rest = (200, 0) if workers < 2 else (90, 90) if alone else (130, 0)
            # Interrupted, pytest still tells what failed so far.
            found.part(name, arguments, most, later + rest, None if alone else ONE_THREAD, signal.SIGINT)
        if gpu:
            measure_all(found)
        elif probe.status == 3:
            print(f"\n{NO_GPU}", flush=True)
            found.parts.append(Part("benchmarks", 0, NO_GPU, failed=True))
        else:
            found.parts.append(Part("benchmarks", 0, f"torch: {last_words(probe.lines)}", failed=True))
    text = page(found.rows, found.ceilings, found.parts, datetime.date.today().isoformat(), commit())
    print(f"\n{text}", flush=True)
    if asked.out is not None:
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(text)
        print(f"written to {asked.out}", flush=True)
    if not gpu:
        return 2
    return int(any(part.failed for part in found.parts))


def parts_of_tests(paths: Sequence[str], workers: int) -> list[tuple[str, list[str]]]:
    """The tests as (part, command): those that need the GPU for themselves, then the others in several processes; all
    in one with fewer than two. pytest-xdist divides them."""
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "--tb=short"]
    pytest += ["--continue-on-collection-errors", "-p", "no:cacheprovider"]
    if workers < 2:
        return [("tests marked gpu", [*pytest, *paths])]
    alone = [path for path in ALONE if any(Path(path).is_relative_to(each) for each in paths)]
    others = [path for path in paths if path not in alone]
    ignored = [f"--ignore={path}" for path in alone]
    spread = [*pytest, "-n", str(workers), "--dist", "loadgroup", *ignored, *others]
    found = [("tests marked gpu that need it alone", [*pytest, *alone])] if alone else []
    return found + ([(f"tests marked gpu, in {workers} processes", spread)] if others else [])


def measure_all(found: Check) -> None:
    """The benchmarks, the most important first."""
    ceilings: list[str] = []
    if found.ceilings is not None:
        ceilings = ["--gb-s", str(found.ceilings.gb_s), "--tflop-s", str(found.ceilings.tflop_s)]
    small, large = ["--model", "dummy:0.6B", "--title", "0.6B"], ["--model", "dummy:llama-8B", "--title", "8B"]
    found.measure(
        "Llama 8B", "bench_engine", [*large, "--work", "decode1,decode256,prefill", *ceilings], 110, later=110
    )
    found.measure("Qwen3 0.6B", "bench_engine", [*small, "--work", "decode1,nano,decode256", *ceilings], 80, later=55)
    found.measure("matrix products alone", "bench_linear", [], 30, later=30)
    found.measure("attention side by side", "bench_attention", [], 100, later=20)
    found.measure("linear layers of few rows", "bench_gemv", [], 40)


def commit() -> str:
    """Of the tree, with a mark where files are changed."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown commit"
    return done.stdout.strip() or "unknown commit"


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    flags.add_argument("--wheels", type=Path, help="folder of wheels for what the machine's Python lacks")
    flags.add_argument("--into", type=Path, default=ROOT / "build" / "gpu", help="the environment; made anew")
    flags.add_argument("--here", action="store_true", help="make none: this Python has the project installed")
    flags.add_argument("--minutes", type=float, default=8.0, help="for everything, the table included (default: 8)")
    flags.add_argument("--tests", default=",".join(TESTS), help="folders, comma-separated")
    flags.add_argument("--out", type=Path, default=ROOT / "build" / "gpu-check.md", help="the table, as Markdown")
    return flags


if __name__ == "__main__":
    asked = parser().parse_args()
    if asked.wheels is not None and not asked.wheels.is_dir():
        sys.exit(f"--wheels {asked.wheels}: there is no such folder; `make gpu-wheels WHEELS={asked.wheels}` fills one")
    sys.exit(check(asked))
