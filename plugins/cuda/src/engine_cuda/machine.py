"""What GPUs this process may use, and what the installed torch can do with them: torch-free, in a few milliseconds.

Cards ask here. NVIDIA's are asked for through the driver's own libraries, AMD's through Linux's files, and torch's
build is read from its version file. Nothing is started on a device, and torch is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from engine_cuda.gpu import Gpus, TorchBuild
from engine_cuda.gpu_amd import amd_gpus
from engine_cuda.gpu_nvidia import nvidia_gpus
from engine_cuda.torch_build import torch_build

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""The makers' own, by which a process sees some of the GPUs. Torch heeds them; so do these facts."""


class Machine(NamedTuple):
    """Everything that a card asks. `torch` is None where none is installed."""

    nvidia: Gpus | None
    amd: Gpus | None
    torch: TorchBuild | None

    @property
    def used(self) -> Gpus | None:
        """Those that this torch computes on: of the maker that it is built for, as far as any are visible."""
        if self.torch is None or (self.torch.cuda is None and not self.torch.rocm):
            return None
        gpus = self.amd if self.torch.rocm else self.nvidia
        return gpus if gpus is not None and gpus.visible else None

    @property
    def capability(self) -> tuple[int, int] | None:
        """The lowest compute capability of the GPUs that torch computes on; None where there are none, or AMD's."""
        used = self.used
        found = [gpu.capability for gpu in used.visible if gpu.capability is not None] if used is not None else []
        return min(found, default=None)


def machine(environ: Mapping[str, str] | None = None) -> Machine:
    """The facts of this machine. Found out once for each set of the makers' variables: free memory is of that time.

    environ: where these variables are read; None is the process's own environment.
    """
    environ = os.environ if environ is None else environ
    return _machine(tuple((name, environ[name]) for name in VARIABLES if name in environ))


@lru_cache(maxsize=4)
def _machine(variables: tuple[tuple[str, str], ...]) -> Machine:
    environ = dict(variables)
    return Machine(nvidia_gpus(environ), amd_gpus(environ), torch_build())
