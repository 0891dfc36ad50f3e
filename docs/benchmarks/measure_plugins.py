"""How long `engine plugins` takes: `python docs/benchmarks/measure_plugins.py [--plugins 30] [--runs 15]`.

Writes so many distributions, each with a driver and a hook plugin, as metadata on a path of their own, and runs the
program with them, in turns with an interpreter that does nothing. Prints one line of JSON: medians and ranges in
milliseconds, of wall time and of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

POINTS = ("attention", "evictor", "ops", "drafter", "grammar", "scheduling_policy")
NOTHING = ("-c", "pass")
LISTING = ("-m", "engine", "plugins")


def write(folder: Path, number: int) -> None:
    """A distribution as an installer would leave it, with what a real METADATA file holds; no module of it exists."""
    info = folder / f"engine_stranger_{number}-1.{number}.dist-info"
    info.mkdir()
    needs = "".join(f"Requires-Dist: {name}\n" for name in ("engine", "numpy>=1.26", "pydantic>=2"))
    head = f"Metadata-Version: 2.1\nName: engine-stranger-{number}\nVersion: 1.{number}\nSummary: a plugin\n{needs}"
    (info / "METADATA").write_text(head + "\n" + "What the README says of it.\n" * 200)
    point = POINTS[number % len(POINTS)]
    groups = f"[engine.{point}.v0]\nstranger{number} = engine_stranger_{number}.card:Card\n"
    (info / "entry_points.txt").write_text(
        groups + f"[engine.hooks.core.v0]\nstranger{number} = engine_stranger_{number}.hooks:Hooks\n"
    )


def timed(arguments: tuple[str, ...], environment: dict[str, str]) -> tuple[float, float]:
    """(wall, processor) milliseconds of one run."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall * 1e3, (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) * 1e3


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plugins", type=int, default=30)
    parser.add_argument("--runs", type=int, default=15)
    options = parser.parse_args()
    figures: dict[str, dict[str, list[float]]] = {"nothing": {}, "plugins": {}}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.plugins):
            write(Path(folder), number)
        path = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        environment = os.environ | {"PYTHONPATH": path}
        timed(LISTING, environment)  # what is compiled on the first run stays so
        for _ in range(options.runs):
            for name, arguments in (("nothing", NOTHING), ("plugins", LISTING)):
                for kind, value in zip(("wall_ms", "cpu_ms"), timed(arguments, environment), strict=True):
                    figures[name].setdefault(kind, []).append(value)
    print(json.dumps({name: {k: _summary(v) for k, v in kinds.items()} for name, kinds in figures.items()}))


def _summary(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 1),
        "least": round(min(values), 1),
        "most": round(max(values), 1),
    }


if __name__ == "__main__":
    main()
