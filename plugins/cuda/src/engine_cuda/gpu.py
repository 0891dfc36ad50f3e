"""What GPUs this process may use, and what the installed torch can do with them: torch-free, in a few milliseconds.

Cards ask here. NVIDIA's are asked for through the driver's own libraries, AMD's through Linux's files, and torch's
build is read from its version file. Nothing is started on a device, and torch is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER")
"""The makers' own, by which a process sees some of the GPUs. Torch heeds them; so do these facts."""


class Gpu(NamedTuple):
    """One GPU, as torch will count it.

    Args:
        name: for people, e.g. "NVIDIA H100 80GB HBM3".
        total_bytes: of its memory; 0 where the driver does not say.
        free_bytes: when it was asked; None where the driver does not say.
        capability: NVIDIA's compute capability, e.g. (9, 0); None for AMD.
        target: AMD's, e.g. "gfx942"; "" for NVIDIA.
    """

    name: str
    total_bytes: int
    free_bytes: int | None = None
    capability: tuple[int, int] | None = None
    target: str = ""


@dataclass(frozen=True, kw_only=True)
class Gpus:
    """Those of one maker.

    Args:
        maker: "NVIDIA" or "AMD".
        visible: what this process may use, in torch's order.
        installed: how many the machine has.
        hidden_by: the variable that leaves some or all of them out, as "NAME=value"; "" for none.
        driver: the driver's version; "" where unknown.
        serves: the newest CUDA version that the driver serves, e.g. (13, 0); None where unknown.
        problem: why the driver that is there cannot be asked; "" where it answered.
    """

    maker: Literal["NVIDIA", "AMD"]
    visible: tuple[Gpu, ...] = ()
    installed: int = 0
    hidden_by: str = ""
    driver: str = ""
    serves: tuple[int, int] | None = None
    problem: str = ""


class TorchBuild(NamedTuple):
    """What an installed torch was built for.

    Args:
        version: e.g. "2.13.0+cpu".
        cuda: the version of CUDA, e.g. (13, 0); None for another build.
        rocm: that of ROCm (HIP), e.g. "7.2"; "" for another build.
    """

    version: str
    cuda: tuple[int, int] | None = None
    rocm: str = ""


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
    from engine_cuda.gpu_amd import amd_gpus
    from engine_cuda.gpu_nvidia import nvidia_gpus
    from engine_cuda.torch_build import torch_build

    environ = dict(variables)
    return Machine(nvidia_gpus(environ), amd_gpus(environ), torch_build())


def chosen(text: str | None, identifiers: tuple[str, ...]) -> tuple[int, ...]:
    """Which of some GPUs a list like CUDA_VISIBLE_DEVICES names, in its order.

    As the drivers read it: numbers, or (the beginnings of) identifiers; what is named twice hides everything, and the
    first name that is none ends the list.

    Args:
        text: the variable; None where it is not set: all of them.
        identifiers: of the GPUs in the driver's order, e.g. "GPU-5f0c...".
    """
    if text is None:
        return tuple(range(len(identifiers)))
    places: list[int] = []
    for entry in text.split(","):
        place = _place(entry.strip(), identifiers)
        if place is None:
            break
        if place in places:
            return ()
        places.append(place)
    return tuple(places)


def _place(entry: str, identifiers: tuple[str, ...]) -> int | None:
    if entry.isdecimal():
        return int(entry) if int(entry) < len(identifiers) else None
    found = [place for place, name in enumerate(identifiers) if entry and name.lower().startswith(entry.lower())]
    return found[0] if len(found) == 1 else None
