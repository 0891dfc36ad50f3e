"""Whether Humming is installed, and whether it can compile here: read from metadata and files alone."""

from __future__ import annotations

import glob
import importlib.util
import os
from functools import lru_cache
from typing import NamedTuple

from engine_kit.libraries import version_of

DISTRIBUTION = "humming-kernels"
READ = (0, 1, 20)
"""The version whose functions were read."""
NEEDED = ("cuda.bindings", "jinja2", "filelock", "tqdm", "tabulate")
"""What it imports that is not torch, numpy or Triton."""
TOOLKITS = "/usr/local/cuda*"
HOMES = ("CUDA_HOME", "CUDA_PATH")
"""The library's own variables, which it reads after it has looked there."""


class Facts(NamedTuple):
    """What this machine has.

    Args:
        version: of the library; "" for none.
        missing: modules that it imports, and that are not there.
        compiler: where kernels come from, for people; "" for nowhere.
        capability: of the GPU; None for none.
        cuda: major version of what torch is built for; None for another build.
    """

    version: str = ""
    missing: tuple[str, ...] = ()
    compiler: str = ""
    capability: tuple[int, int] | None = None
    cuda: int | None = None

    @property
    def extra(self) -> str:
        """Of the distribution, by which the compiler comes with it."""
        return f"[cu{self.cuda or 13}]"


@lru_cache(maxsize=1)
def facts() -> Facts:
    """The facts of this machine; found out once."""
    from engine_cuda.machine import machine

    there, version = machine(), version_of(DISTRIBUTION)
    cuda = there.torch.cuda[0] if there.torch is not None and there.torch.cuda is not None else None
    missing = tuple(name for name in NEEDED if not _there(name)) if version else ()
    return Facts(version, missing, _compiler(cuda), there.capability, cuda)


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _compiler(cuda: int | None) -> str:
    """Where the library looks: toolkits, then wheels, of which NVRTC's headers are in another."""
    toolkits = [*sorted(glob.glob(TOOLKITS)), *(os.environ.get(name, "") for name in HOMES)]
    found = next((path for path in toolkits if os.path.isdir(path)), "")
    suffix = "-cu12" if cuda == 12 else ""
    if found or not version_of(f"nvidia-cuda-cccl{suffix}"):
        return found
    wheels = (f"nvidia-cuda-nvrtc{suffix}", f"nvidia-cuda-nvcc{suffix}")
    return next((wheel for wheel in wheels if version_of(wheel)), "")
