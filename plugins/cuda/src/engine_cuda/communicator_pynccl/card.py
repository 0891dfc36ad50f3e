"""The card of communicator `pynccl`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.communicator import CommunicatorCard, CommunicatorNeed
from engine_cuda.nvidia import visible_gpus, wrong_gpu

PACKAGE, OLDEST = "nccl4py", (0, 6)
PIP = 'pip install "nccl4py>=0.6,<0.7"'


class PyNcclOptions(BaseModel):
    """Options of `pynccl`.

    Attributes:
        timeout: seconds that the ranks wait for each other at the start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout: float = Field(default=600.0, gt=0)


class PyNccl(CommunicatorCard):
    """All collectives between NVIDIA's GPUs, by NCCL, through NVIDIA's own bindings (nccl4py)."""

    priority = 10
    framework = "torch"
    Options = PyNcclOptions
    body = "engine_cuda.communicator_pynccl.body:PyNcclBody"

    @classmethod
    def unsupported(cls, need: CommunicatorNeed) -> list[str]:
        reasons = wrong_gpu(need.device)
        if need.device.partition(":")[0] != "cuda":
            reasons.append(f"NCCL moves the memory of NVIDIA's GPUs, not {need.device}'s")
        reasons += _missing()
        if need.num_nodes > 1:
            reasons.append(f"its ranks meet in a folder, and {need.num_nodes} machines have none together")
        if need.world_size < 2:
            reasons.append("one rank has nobody to speak to")
        if not reasons and visible_gpus() < need.world_size:
            reasons.append(f"NCCL takes a GPU for each rank: {need.world_size} ranks, {visible_gpus()} visible")
        return reasons

    @classmethod
    def remarks(cls, need: CommunicatorNeed) -> list[str]:
        return ["it was not run on GPUs yet: its suite passed with another library in NCCL's place"]


def _missing() -> list[str]:
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        return [f"{PACKAGE} is not installed: {PIP}"]
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdecimal())
    return [] if numbers >= OLDEST else [f"{PACKAGE} {found} is too old: {PIP}"]
