"""The card of communicator `gloo`."""

from __future__ import annotations

from engine.interfaces.communicator import CommunicatorCard, CommunicatorNeed


class GlooCommunicator(CommunicatorCard):
    """Collectives in host memory over the loopback device, by torch's gloo: the oracle of faster drivers."""

    framework = "torch"
    batch_invariant = True
    body = "engine_reference.communicator_gloo.gloo:Gloo"

    @classmethod
    def unsupported(cls, need: CommunicatorNeed) -> list[str]:
        reasons = []
        if need.world_size < 2:
            reasons.append("one rank has nobody to speak to")
        if need.device.partition(":")[0] != "cpu":
            reasons.append(f"it moves host memory, not {need.device}'s")
        if need.batch_invariant and need.world_size > 2:
            reasons.append("the order in which it adds up more than two ranks depends on the tensor's length")
        return reasons
