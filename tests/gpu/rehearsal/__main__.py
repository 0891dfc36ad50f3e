"""The command: `python -m tests.gpu.rehearsal`, which `make gpu-rehearsal` calls. Needs no GPU, and refuses one."""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.gpu.environment import ROOT, prepare, variables
from tests.gpu.first import last_words
from tests.gpu.parts import run
from tests.gpu.rehearsal.build import VERSION, CannotBuild, build, folders
from tests.gpu.rehearsal.report import MARK, findings, table, told, troubles
from tests.gpu.rehearsal.settings import SETTINGS, Setting

HERE = Path(__file__).parent
MOST_SECONDS = 300.0
"""Of one setting: the first time, Triton compiles its kernels."""
PROBE = "import sys, torch; sys.exit(3 if torch.cuda.is_available() else 0)"
LAST_LINES = 30
"""Printed of what failed."""
WHAT = """No GPU: nothing was computed and no time of a device was measured. The milliseconds are the host's own,
its launches included, as they are on this machine's processor."""


def unfit() -> str:
    """Why this Python, or this machine, has nothing to rehearse; empty where it has."""
    other = "name another Python with GPU_PYTHON=/path/to/python3"
    torch = folders("torch")
    if not torch:
        return f"{sys.executable} has no torch: install its build for CUDA {VERSION}, or {other}"
    version = runpy.run_path(str(torch[0] / "version.py")).get("cuda")  # importing it all takes seconds
    if version is None or version.split(".")[0] != VERSION:
        built = f"for CUDA {version}" if version else "for processors alone"
        return f"the torch of {sys.executable} is built {built}: install its build for CUDA {VERSION}, or {other}"
    done = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    if done.returncode == 3:
        return "there is a GPU here: `make gpu-check` runs on it, and needs no rehearsal"
    if done.returncode:
        return f"{sys.executable} cannot import torch: {last_words(done.stderr.splitlines())}"
    return ""


def environment(into: Path, preloaded: Sequence[Path], base: Mapping[str, str], lazy: bool) -> dict[str, str]:
    """Of the rehearsing processes."""
    library = str(preloaded[0].parent)
    paths = [str(HERE / "answers"), str(ROOT), base.get("PYTHONPATH", "")]
    found = {
        **base,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LD_PRELOAD": ":".join(map(str, preloaded)),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [library, base.get("LD_LIBRARY_PATH", "")])),
        "TRITON_LIBCUDA_PATH": library,
        "TRITON_CACHE_DIR": str(into / "kernels"),
        "FAKEGPU_LOG": str(into / "findings.txt"),
        "FAKEGPU_COUNT": "1",
        "FAKEGPU_LAZY": "1" if lazy else "0",
        "OMP_NUM_THREADS": "1",
    }
    found.pop("CUDA_VISIBLE_DEVICES", None)
    return found


def rehearse(setting: Setting, into: Path, variables: Mapping[str, str]) -> bool:
    """Run one and print what it told; whether all was well."""
    log = into / "findings.txt"
    log.unlink(missing_ok=True)
    print(f"\n== {setting.name}: {setting.model} {setting.changes or ''}", flush=True)
    module = "serving" if setting.served else "offline"
    command = [sys.executable, "-m", f"tests.gpu.rehearsal.{module}", setting.name]
    outcome = run(command, MOST_SECONDS, dict(variables))
    found = told(outcome.lines)
    print("\n".join(table(found)), flush=True)
    faults, notes = findings(log)
    failed = troubles(found) + faults
    if outcome.status is None:
        failed.append(f"stopped after {MOST_SECONDS:.0f} s")
    elif outcome.status or not any(row.get("ended") for row in found):
        failed.append(f"exit status {outcome.status}")
    for text in notes:
        print(f"  {text}", flush=True)
    for text in failed:
        print(f"  FAILED {text}", flush=True)
    if failed:
        said = [line for line in outcome.lines if not line.startswith(MARK)]
        print("\n".join(["  its last lines:", *said[-LAST_LINES:]]), flush=True)
    return not failed


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(prog="python -m tests.gpu.rehearsal", description=__doc__)
    flags.add_argument("--only", default="", help=f"of {', '.join(each.name for each in SETTINGS)}, comma-separated")
    flags.add_argument("--wheels", type=Path, help="folder of wheels for what this Python lacks")
    flags.add_argument(
        "--into", type=Path, default=ROOT / "build" / "gpu-rehearsal", help="what is built and installed"
    )
    flags.add_argument("--here", action="store_true", help="install nothing: this Python has the project")
    flags.add_argument(
        "--lazy", action="store_true", help="work runs once somebody waits for it: tells of copies that come too late"
    )
    return flags


def main(asked: argparse.Namespace) -> int:
    """0 where all was well, 1 where something failed, 2 where nothing can be rehearsed here."""
    names = [each.name for each in SETTINGS]
    wanted = [name for name in asked.only.split(",") if name] or names
    if unknown := sorted(set(wanted) - set(names)):
        print(f"--only {','.join(unknown)}: there is no such setting; there are {', '.join(names)}")
        return 2
    try:
        if why := unfit():
            raise CannotBuild(why)
        print("building the fake libraries ...", flush=True)
        preloaded = build(asked.into / "lib")
    except CannotBuild as error:
        print(f"gpu-rehearsal: {error}", flush=True)
        return 2
    target = None if asked.here else asked.into / "packages"
    if target is not None:
        prepare(target, asked.wheels)
    shared = environment(asked.into, preloaded, variables(target), asked.lazy)
    done = subprocess.run([sys.executable, "-c", "from engine import LLM"], env=shared, capture_output=True, text=True)
    if done.returncode:
        print(
            f"gpu-rehearsal: the engine cannot be imported: {last_words(done.stderr.splitlines())}; what this Python "
            "lacks comes with `make gpu-wheels WHEELS=folder`, then WHEELS=folder here too"
        )
        return 2
    chosen = [each for each in SETTINGS if each.name in wanted]
    lacks = subprocess.run(
        [sys.executable, "-c", "import fastapi, uvicorn, uvloop, httptools"], env=shared, stderr=subprocess.DEVNULL
    )
    left = [each.name for each in chosen if each.served and lacks.returncode]
    failed = [each.name for each in chosen if each.name not in left and not rehearse(each, asked.into, shared)]
    print(f"\n{WHAT}")
    if left:
        print(f"left out: {', '.join(left)}: this Python lacks fastapi, uvicorn, uvloop or httptools")
    print(f"failed: {', '.join(failed)}" if failed else "no fault was found", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(parser().parse_args()))
