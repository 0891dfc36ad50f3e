"""An environment over the machine's own Python packages, without a network: wheels from a folder, and the project."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (
    "core",
    "plugins/reference",
    "plugins/server",
    "plugins/parsers",
    "plugins/parallel",
    "plugins/bench",
    "sdk/kit",
    "sdk/testing",
    "plugins/tiny",
    "plugins/evictors",
    "plugins/cuda",
    "plugins/flashattn",
    "plugins/flashinfer",
)
"""What is installed of the project. Native code for processors (plugins/cpu) is not built: it is not checked."""


def prepare(target: Path) -> None:
    """An empty folder for the packages, and none of what earlier builds left in the sources."""
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for package in PACKAGES:
        shutil.rmtree(ROOT / package / "build", ignore_errors=True)


def commands(target: Path, wheels: Path | None) -> Iterator[list[str]]:
    """What installs it all into a folder, for `PYTHONPATH`. A virtual environment could not be made on every machine:
    it takes a module that Debian packages apart."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index", "--no-deps"]
    pip += ["--target", str(target), "--upgrade"]
    if wheels is not None:
        files = sorted(str(path) for path in wheels.glob("*.whl"))
        if files:
            yield [*pip, *files]
    yield [*pip, "--no-build-isolation", *(str(ROOT / package) for package in PACKAGES)]


def variables(target: Path | None) -> dict[str, str]:
    """The environment of the parts."""
    found = dict(os.environ)
    if target is not None:
        found["PYTHONPATH"] = os.pathsep.join(filter(None, [str(target), found.get("PYTHONPATH", "")]))
    found |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    # Caches of compiled kernels that outlive the run would make a second one look better than the first.
    return found
