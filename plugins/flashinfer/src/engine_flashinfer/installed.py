"""Whether FlashInfer is installed, and where its kernels come from: read from metadata and files alone."""

from __future__ import annotations

import importlib.util
import shutil
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from engine_kit.host_gpus import capabilities
from engine_kit.libraries import version_of

TESTED = (0, 7)
"""The version whose functions were read; older ones lack arguments that are needed."""
COMPILERS = (Path("/usr/local/cuda/bin/nvcc"), Path("/opt/cuda/bin/nvcc"))
"""Where CUDA's compiler is looked for beside the search path."""
WHEEL = "nvidia-cuda-nvcc"
"""The compiler as a wheel; its name begins so."""
CACHE = "flashinfer-jit-cache"
"""Kernels that were compiled by FlashInfer's makers, in the same version."""


class Facts(NamedTuple):
    """What this machine has.

    Args:
        capabilities: compute capability of each GPU; empty for none.
        version: of flashinfer-python; "" for none.
        cache: version of the compiled kernels; "" for none.
        compiler: where nvcc is; "" for nowhere.
        ninja: it is there, by which FlashInfer compiles.
        rocm: torch is built for AMD's GPUs.
        triton: it is installed.
    """

    capabilities: tuple[tuple[int, int], ...]
    version: str = ""
    cache: str = ""
    compiler: str = ""
    ninja: bool = True
    rocm: bool = False
    triton: bool = True

    @property
    def kernels(self) -> str:
        """Where kernels come from, for people; "" where they cannot come."""
        if self.cache:
            return f"{CACHE} {self.cache}"
        return f"compiled at the first start by {self.compiler}" if self.compiler and self.ninja else ""


@lru_cache(maxsize=1)
def facts() -> Facts:
    """The facts of this machine; found out once."""
    ninja = importlib.util.find_spec("ninja") is not None or shutil.which("ninja") is not None
    return Facts(
        capabilities(),
        version_of("flashinfer-python"),
        version_of(CACHE),
        _compiler(),
        ninja,
        "+rocm" in version_of("torch"),
        importlib.util.find_spec("triton") is not None,
    )


def _compiler() -> str:
    found = shutil.which("nvcc")
    if found is not None:
        return found
    there = next((str(path) for path in COMPILERS if path.is_file()), "")
    wheels = (f"{WHEEL}{suffix}" for suffix in ("", "-cu12", "-cu13"))
    return there or next((wheel for wheel in wheels if version_of(wheel)), "")
