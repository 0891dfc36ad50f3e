"""The card of communicator `shm`."""

from __future__ import annotations

import sys

from engine.interfaces.communicator import CommunicatorCard, CommunicatorNeed
from engine_cpu.native import TAPE, why_not_built

MOST_RANKS = 64
"""Mailboxes for every pair: at 64 ranks half a GiB of address space, of which only what is used takes memory."""


class ShmCommunicator(CommunicatorCard):
    """Collectives over shared memory between the ranks of one machine, by native code."""

    priority = 10
    framework = "torch"
    captured_by = frozenset({TAPE})
    batch_invariant = True
    body = "engine_cpu.communicator_shm.body:Shm"

    @classmethod
    def unsupported(cls, need: CommunicatorNeed) -> list[str]:
        reasons = why_not_built()
        if not sys.platform.startswith("linux"):
            reasons.append(f"it is written for Linux, not for {sys.platform}")
        if need.world_size < 2:
            reasons.append("one rank has nobody to speak to")
        if need.world_size > MOST_RANKS:
            reasons.append(f"{need.world_size} ranks are more than {MOST_RANKS}")
        if need.num_nodes > 1:
            reasons.append(f"ranks on {need.num_nodes} machines share no memory")
        if need.device.partition(":")[0] != "cpu":
            reasons.append(f"it moves host memory, not {need.device}'s")
        return reasons
