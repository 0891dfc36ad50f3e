"""The card of `nccl_on_gloo`."""

from __future__ import annotations

from engine.interfaces.communicator import CommunicatorCard, CommunicatorNeed
from engine_cuda.communicator_pynccl.card import PyNcclOptions


class OnGloo(CommunicatorCard):
    """`pynccl` with gloo in NCCL's place, for tests."""

    framework = "torch"
    Options = PyNcclOptions
    body = "nccl_on_gloo:PyNcclOnGloo"

    @classmethod
    def unsupported(cls, need: CommunicatorNeed) -> list[str]:
        reasons = [] if need.world_size > 1 else ["one rank has nobody to speak to"]
        reasons += [] if need.device == "cpu" else ["gloo moves the processor's memory"]
        return reasons + ([] if need.framework == "torch" else ["it computes with torch"])
