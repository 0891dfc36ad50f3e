"""The card of communicator `custom_allreduce`."""

from __future__ import annotations

import sys

from pydantic import BaseModel, ConfigDict, Field

from engine.interfaces.communicator import CommunicatorCard, CommunicatorNeed
from engine_cuda.interpreter import interpreted, wrong_device
from engine_cuda.links import not_linked
from engine_cuda.nvidia import wrong_gpu

SIZES = (2, 4, 8)


class CustomAllReduceOptions(BaseModel):
    """Options of `custom_allreduce`.

    Attributes:
        max_bytes: of a tensor that it sums; what is larger is the next communicator's. 0: 8 MiB for 2 ranks, 4 MiB for
            4, 2 MiB for 8.
        one_shot_bytes: up to here every rank adds up everything, above it its share alone. 0: all for 2 ranks, 512 KiB
            for 4, 256 KiB for 8.
        timeout: seconds that the ranks wait for each other at the start.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_bytes: int = Field(default=0, ge=0, le=1 << 30)
    one_shot_bytes: int = Field(default=0, ge=0, le=1 << 30)
    timeout: float = Field(default=600.0, gt=0)


class CustomAllReduce(CommunicatorCard):
    """Sums of small tensors over GPUs that see each other's memory, in one launch: a decode step's are such."""

    priority = 20
    framework = "torch"
    Options = CustomAllReduceOptions
    body = "engine_cuda.communicator_custom_allreduce.body:CustomAllReduceBody"

    @classmethod
    def unsupported(cls, need: CommunicatorNeed) -> list[str]:
        reasons = [*wrong_device(need.device), *wrong_gpu(need.device)]
        if not sys.platform.startswith("linux"):
            reasons.append(f"it is written for Linux, not for {sys.platform}")
        if need.world_size not in SIZES:
            reasons.append(f"{need.world_size} ranks are not one of {', '.join(map(str, SIZES))}")
        if need.num_nodes > 1:
            reasons.append(f"GPUs of {need.num_nodes} machines do not see each other's memory")
        if not reasons and not interpreted():
            reasons += not_linked(need.world_size)
        return reasons

    @classmethod
    def remarks(cls, need: CommunicatorNeed) -> list[str]:
        return ["it was not run on GPUs yet: interpreted kernels passed its suite, over processes that share memory"]
