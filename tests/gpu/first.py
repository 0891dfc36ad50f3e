"""The check of a GPU, as its first contact: stages in the order of what they tell, each with a limit.

python -m tests.gpu.first --wheels DIR        (or `python -m tests.gpu`, which `make gpu-check` calls)

Every line is passed on as it comes, and the table is rewritten after each stage, so that a run that is cut off has told
all that it knew. Needs nothing but Python and what NEEDED names; nothing is installed.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.gpu.environment import ROOT, prepare, variables
from tests.gpu.page import Part, page
from tests.gpu.parts import GRACE, PYTEST_GRACE, Budget, Outcome, outlived, run
from tests.gpu.rows import Ceilings, Row, told

NO_GPU = "no GPU: torch.cuda.is_available() is False, so nothing can be measured here"
TESTS = (
    *("tests/gpu", "plugins/cuda/tests", "plugins/flashattn/tests", "plugins/flashinfer/tests"),
    *("plugins/deepgemm/tests", "plugins/humming/tests"),
)
ALONE = ("plugins/cuda/tests/test_platform_gpu.py", "tests/gpu/test_engine.py")
"""Those that measure the GPU's memory and its time: nothing else uses it meanwhile. First the platform, on which all
stand."""
MOST_WORKERS = 10
"""Processes that the other tests are divided among, as far as there are processors: nearly all of their time goes to
compiling kernels."""
PROBE = "import sys, torch; sys.exit(3) if not torch.cuda.is_available() else torch.ones(1, device='cuda').sum().item()"
NEEDED = ("torch", "triton", "transformers", "pytest", "hypothesis")
"""What the machine's own Python must have: `requirements-gpu.txt` brings the rest."""
ONE_THREAD = {f"{library}_NUM_THREADS": "1" for library in ("OMP", "MKL", "OPENBLAS")}
RESERVED = 6.0
"""Seconds kept for ending what hangs and for the table."""
CONTEXTS_SECONDS = 2.0
"""How long what a killed process had on the GPU takes to go."""
OF_KERNELS = {
    "bench_small_rows": "products of few rows",
    "bench_fa3": "FlashAttention 3",
    "bench_moe": "experts",
    "bench_draw": "draws",
    "bench_mixed": "mixed steps",
}
"""Benchmarks of a few kernels each, and what they are about."""
MARK = "GPU_CHECK_STAGE"
"""In the environment of all that a stage starts, however far from it."""
SMALL = ("--model", "dummy:0.6B", "--title", "0.6B")
LARGE = ("--model", "dummy:llama-8B", "--title", "8B")
EIGHTHS = ("--model", "dummy:llama-8B", "--title", "8B fp8", "--set", "quantization=fp8", "--set", "kv_cache_dtype=fp8")


class Stage(NamedTuple):
    """One.

    Args:
        name: to ask for it with, and for people.
        commands: arguments of this Python. Of several, which run side by side, the figures count for nothing: they are
            there for what fails, and to leave compiled kernels for the stages behind.
        most: seconds.
        environment: added to the processes'.
        tests: pytest's, which is interrupted at its limit, and given time to say what failed.
        shares: takes the machine's ceilings as arguments.
    """

    name: str
    commands: Sequence[Sequence[str]]
    most: float
    environment: Mapping[str, str] = {}
    tests: bool = False
    shares: bool = False


def bench(module: str, *arguments: str) -> list[str]:
    """A module of this folder."""
    return ["-m", f"tests.gpu.{module}", *arguments]


def pytest(*arguments: str, thorough: bool = False) -> list[str]:
    """The tests marked gpu. Failures are told when they happen."""
    marked = "gpu" if thorough else "gpu and not slow"
    found = ["-m", "pytest", "-m", marked, "-v", "--tb=short", "-p", "tests.gpu.live"]
    return [*found, "--continue-on-collection-errors", "-p", "no:cacheprovider", *arguments]


def stages(workers: int, paths: Sequence[str] = TESTS, thorough: bool = False) -> list[Stage]:
    """All of them, the most important first. `workers`: processes of the tests that are divided, 1 for none."""
    alone = [path for path in ALONE if any(Path(path).is_relative_to(each) for each in paths)]
    spread = ["-n", str(workers), "--dist", "loadgroup"] if workers > 1 else []
    others = pytest(*spread, *(f"--ignore={path}" for path in alone), *paths, thorough=thorough)
    few = ["--set", "kv_cache_memory=8589934592"]
    warming = [
        *([others] if paths else []),
        bench("bench_engine", *SMALL, "--work", "decode1,prefill", *few),
        bench("bench_engine", *LARGE, "--work", "decode1,prefill", *few),
        *(bench(module) for module in OF_KERNELS if there(module)),
    ]
    found = [
        Stage("tests and benchmarks side by side", warming, 120, ONE_THREAD, tests=True),
        Stage("ceilings", [bench("ceilings")], 30),
        Stage(
            "Qwen3 0.6B", [bench("bench_engine", *SMALL, "--work", "decode1,decode256,prefill,nano")], 60, shares=True
        ),
        Stage("Llama 8B", [bench("bench_engine", *LARGE, "--work", "decode1,decode256,prefill")], 70, shares=True),
        *(
            [Stage("tests that need the GPU alone", [pytest(*alone, thorough=thorough)], 90, tests=True)]
            if alone
            else []
        ),
        Stage("switches", [bench("bench_switches")], 90),
        Stage("matrix products alone", [bench("bench_linear")], 30),
        Stage("products by shape", [bench("bench_linear", "--choices", "--rows", "1,4,8,24,64,256")], 75),
    ]
    in_fp8 = bench("bench_engine", *EIGHTHS, "--work", "decode1,decode256,prefill")
    found.append(Stage("fp8: Llama 8B", [in_fp8], 80, shares=True))
    found += [Stage(name, [bench(module)], 45) for module, name in OF_KERNELS.items() if there(module)]
    found.append(Stage("attention side by side", [bench("bench_attention")], 100))
    return found


def there(module: str) -> bool:
    """Whether this folder has it."""
    return (Path(__file__).parent / f"{module}.py").is_file()


class Check:
    """A run of stages.

    Args:
        budget: of all of them.
        environment: of their processes.
        out: the table, rewritten after each; None for none.
    """

    def __init__(self, budget: Budget, environment: dict[str, str], out: Path | None = None) -> None:
        self.budget = budget
        self.environment = environment
        self.out = out
        self.rows: list[Row] = []
        self.ceilings: Ceilings | None = None
        self.parts: list[Part] = []

    def stage(self, stage: Stage) -> None:
        """Run one. What it tells goes into the table however it ends."""
        grace = PYTEST_GRACE if stage.tests else GRACE
        limit = self.budget.limit(stage.most, RESERVED + grace)
        if limit < 5:
            self.parts.append(Part(stage.name, 0, "left out: no time was left", failed=True))
            return
        print(f"\n== {stage.name}, at most {limit:.0f} s", flush=True)
        more: list[str] = []
        if stage.shares and self.ceilings is not None:
            more = ["--gb-s", str(self.ceilings.gb_s), "--tflop-s", str(self.ceilings.tflop_s)]
            more += ["--fp8-tflop-s", str(self.ceilings.fp8_tflop_s)] if self.ceilings.fp8_tflop_s else []
        commands = [[sys.executable, *command, *more] for command in stage.commands]
        stop = signal.SIGINT if stage.tests else signal.SIGTERM
        outcomes: dict[int, Outcome] = {}
        mark = f"{os.getpid()}-{len(self.parts)}"

        def one(index: int) -> None:
            environment = {**self.environment, **stage.environment, MARK: mark}
            if len(commands) > 1:
                environment.pop("OUT", None)  # what is measured side by side is no figure
            outcomes[index] = run(commands[index], limit, environment, sys.stdout, stop, grace)

        threads = [threading.Thread(target=one, args=(index,)) for index in range(len(commands))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for index, command in enumerate(commands):
            self._ended(stage, command, outcomes.get(index, Outcome()), alone=len(commands) == 1)
        if left := outlived(f"{MARK}={mark}"):
            self.parts.append(Part(f"{stage.name}: the end", 0, f"{len(left)} processes outlived it, and were killed"))
            time.sleep(CONTEXTS_SECONDS)
        if left or any(outcome.status != 0 for outcome in outcomes.values()):
            self._probe()
        self.write()

    def _ended(self, stage: Stage, command: Sequence[str], outcome: Outcome, alone: bool) -> None:
        rows, ceilings = told(outcome.lines)
        self.rows += rows if alone else [row for row in rows if row.result.startswith("failed")]
        self.ceilings = ceilings or self.ceilings
        trouble = ""
        if outcome.status is None:
            trouble = f"stopped after {outcome.seconds:.0f} s"
        elif outcome.status:
            trouble = f"exit status {outcome.status}: {last_words(outcome.lines)}"
        failed = bool(trouble) or any(row.result.startswith("failed") for row in rows)
        name = stage.name if alone else f"{stage.name}: {command[2].removeprefix('tests.gpu.')}"
        said = summary(outcome.lines) if "pytest" in command else ""
        self.parts.append(Part(name, outcome.seconds, trouble, said, failed))

    def _probe(self) -> None:
        """Whether the GPU still answers: a kernel that hangs outlives its process, and each stage behind would hang."""
        if run([sys.executable, "-c", PROBE], self.budget.limit(30), self.environment, sys.stdout).status != 0:
            self.parts.append(Part("probe", 0, "the GPU does not answer: what follows says nothing", failed=True))

    def write(self) -> str:
        """The table as it is now."""
        text = page(self.rows, self.ceilings, self.parts, datetime.date.today().isoformat(), commit())
        if self.out is not None:
            self.out.parent.mkdir(parents=True, exist_ok=True)
            self.out.write_text(text)
        return text


def last_words(lines: Sequence[str]) -> str:
    """The last line that says something."""
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), "it said nothing")


def summary(lines: Sequence[str]) -> str:
    """What pytest counted, and the names of what failed; empty for other programs. Where it was cut off before it
    counted, what it said of each test as it went."""
    counted = next((line.strip("= ") for line in reversed(lines) if " in " in line and _counts(line)), "")
    failed = [line.split(" - ")[0] for line in lines if line.startswith(("FAILED ", "ERROR "))]
    if not counted:
        failed = [line.removeprefix("LIVE ") for line in lines if line.startswith("LIVE FAILED ")]
        passed = sum(" PASSED " in f"{line} " for line in lines)
        counted = f"{len(failed)} failed, {passed} passed before it was stopped" if passed or failed else ""
    return "; ".join([*([counted] if counted else []), *dict.fromkeys(failed)])


def _counts(line: str) -> bool:
    return any(f" {word}" in line for word in ("passed", "failed", "skipped", "error", "errors", "deselected"))


def unfit(budget: Budget) -> str:
    """What is missing of the Python that this runs on; empty where nothing is."""
    if lacking := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        return (
            f"gpu-check needs a Python that has {', '.join(NEEDED)}; {sys.executable} lacks {', '.join(lacking)}: "
            "install them, or name another with GPU_PYTHON=python3.12"
        )
    probe = run([sys.executable, "-c", PROBE], budget.limit(60), variables(None), sys.stdout)
    if probe.status == 3:
        return NO_GPU
    return "" if probe.status == 0 else f"torch: {last_words(probe.lines)}"


MACHINE = (
    "nvidia-smi; nvcc --version | tail -2; lscpu | grep -E 'Model name|^CPU\\(s\\)'; free -g | head -2; which make g++"
)


def check(asked: argparse.Namespace) -> int:
    """Run it all, print the table, and give the exit status: 0 where all was run and no test failed, 1 where something
    failed, 2 where there is no GPU. Bars that are missed do not fail it: the table says so."""
    budget, target = Budget(asked.seconds), None if asked.here else asked.into
    run(["sh", "-c", MACHINE], 20, variables(None), sys.stdout)
    if lacking := unfit(budget):
        print(lacking, flush=True)
        return 2
    began = time.monotonic()
    if target is not None:
        prepare(target, asked.wheels)
    found = Check(budget, variables(target), asked.out)
    found.parts.append(Part("environment", time.monotonic() - began))
    paths = [path for path in asked.tests.split(",") if path and (ROOT / path).exists()]
    spread = run([sys.executable, "-c", "import xdist"], budget.limit(20), found.environment).status == 0
    workers = min(MOST_WORKERS, (os.cpu_count() or 1) * 2 // 3) if spread else 1
    for stage in chosen(stages(workers, paths, asked.thorough), asked.only):
        found.stage(stage)
    print(f"\n{found.write()}", flush=True)
    print(f"written to {asked.out}", flush=True)
    return int(any(part.failed for part in found.parts))


def chosen(found: Sequence[Stage], only: str) -> list[Stage]:
    """Those whose names begin with one of the words, in the words' order; all without words.

    Raises SystemExit where a word begins none.
    """
    words = [word for word in only.split(",") if word]
    out = []
    for word in words:
        matching = [stage for stage in found if stage.name.startswith(word)]
        if not matching:
            sys.exit(f"--only {word}: there is no such stage; there are {', '.join(stage.name for stage in found)}")
        out += matching
    return out or list(found)


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
    flags.add_argument("--seconds", type=float, default=570, help="for everything, the table included (default: 570)")
    flags.add_argument("--only", default="", help="stages by the beginnings of their names, comma-separated")
    flags.add_argument("--tests", default=",".join(TESTS), help="folders, comma-separated; none for no tests")
    flags.add_argument("--thorough", action="store_true", help="the tests marked slow too: thousands of kernels")
    out = Path(os.environ.get("OUT") or ROOT / "build") / "gpu-check.md"
    flags.add_argument("--out", type=Path, default=out, help="the table, as Markdown")
    return flags


def main() -> None:
    """The command."""
    asked = parser().parse_args()
    if asked.wheels is not None and not asked.wheels.is_dir():
        sys.exit(f"--wheels {asked.wheels}: there is no such folder; `make gpu-wheels WHEELS={asked.wheels}` fills one")
    sys.exit(check(asked))


if __name__ == "__main__":
    main()
