"""What is known of GPUs and of an installed torch, and which GPUs a maker's variable names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple


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
