"""Builds native programs of the tests, with the tools of this Python's own environment."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PLUGIN = Path(__file__).parents[1]


def tools() -> dict[str, str]:
    """The environment with this Python's own programs and packages."""
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return os.environ | {"PATH": programs, "PYTHONPATH": os.pathsep.join(sys.path[1:])}


def need_build_tools() -> None:
    """Skips the test where they are missing."""
    if shutil.which("cmake", path=tools()["PATH"]) is None or shutil.which("ninja", path=tools()["PATH"]) is None:
        pytest.skip("cmake and ninja build the native code, and are not installed")


def build(source: Path, folder: Path, *settings: str) -> None:
    """With cmake and ninja, on two cores."""
    run(
        ["cmake", "-S", str(source), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", "-G", "Ninja", *settings], tools()
    )
    run(["cmake", "--build", str(folder), "-j", "2"], tools())


def build_self_test(folder: Path, *settings: str) -> Path:
    """The program of tests/native."""
    build(PLUGIN / "tests" / "native", folder, *settings)
    return folder / "self_test"


def run(command: Sequence[str], environment: dict[str, str]) -> str:
    """Its output. Fails, with the end of what it said, where it fails."""
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}\n{said[-12000:]}"
    return done.stdout
