"""Whether DeepGEMM is installed, and whether it can compile here: read from metadata and files alone."""

from __future__ import annotations

import os
import shutil
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from engine_kit.libraries import version_of

DISTRIBUTION = "sgl-deep-gemm"
READ = (0, 2, 5)
"""The version whose functions were read; older ones lack arguments that are needed."""
CUDA = 13
"""Its wheel is linked with the libraries of this version of CUDA."""
HOMES = ("CUDA_HOME", "CUDA_PATH")
"""The library's own variables, in its order."""


class Facts(NamedTuple):
    """What this machine has.

    Args:
        version: of the library; "" for none.
        cuda: that torch is built for; None for another build.
        compiler: where nvcc is; "" for nowhere.
        capability: of the GPU; None for none.
    """

    version: str = ""
    cuda: tuple[int, int] | None = None
    compiler: str = ""
    capability: tuple[int, int] | None = None

    @property
    def blackwell(self) -> bool:
        """Whether scales are powers of two: its tensor cores take no others."""
        return self.capability is not None and self.capability[0] == 10


@lru_cache(maxsize=1)
def facts() -> Facts:
    """The facts of this machine; found out once."""
    from engine_cuda.machine import machine

    there = machine()
    cuda = there.torch.cuda if there.torch is not None else None
    return Facts(version_of(DISTRIBUTION), cuda, _compiler(), there.capability)


def _compiler() -> str:
    """Where the library looks."""
    home = next((os.environ[name] for name in HOMES if os.environ.get(name)), "")
    found = str(Path(home, "bin", "nvcc")) if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    return found if os.access(found, os.X_OK) else ""
