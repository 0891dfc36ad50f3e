"""Whether Humming is installed, and whether it can compile here: read from metadata and files alone."""

from __future__ import annotations

import importlib.util
import os
import shutil
from functools import lru_cache
from importlib import metadata
from typing import NamedTuple

DISTRIBUTION = "humming-kernels"
READ = (0, 1, 20)
"""The version whose functions were read."""
NEEDED = ("cuda.bindings", "jinja2", "filelock", "tqdm", "tabulate")
"""What it imports that is not torch, numpy or Triton."""


class Facts(NamedTuple):
    """What this machine has.

    Args:
        version: of the library; "" for none.
        missing: modules that it imports, and that are not there.
        compiler: where kernels come from, for people; "" for nowhere.
        capability: of the GPU; None for none.
    """

    version: str = ""
    missing: tuple[str, ...] = ()
    compiler: str = ""
    capability: tuple[int, int] | None = None


@lru_cache(maxsize=1)
def facts() -> Facts:
    """The facts of this machine; found out once."""
    from engine_cuda.machine import machine

    try:
        version = metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        version = ""
    missing = tuple(name for name in NEEDED if not _there(name)) if version else ()
    return Facts(version, missing, _compiler(), machine().capability)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _compiler() -> str:
    """NVRTC before nvcc, as the library has it; both as a toolkit or as wheels."""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            return os.environ[name]
    found = shutil.which("nvcc") or ("/usr/local/cuda" if os.path.isdir("/usr/local/cuda") else "")
    wheels = ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu12")
    return found or next((wheel for wheel in wheels if _installed(wheel)), "")


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "0.1.20.post1" -> (0, 1, 20)."""
    parts = version.partition("+")[0].split(".")[:3]
    return tuple(int(part) if part.isdecimal() else 0 for part in parts)
