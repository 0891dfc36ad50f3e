"""Reasons why a driver that is NVIDIA's alone cannot serve here: for `Card.unsupported`, without torch."""

from __future__ import annotations

from engine_cuda.machine import machine
from engine_cuda.platform_cuda.reasons import why_not


def wrong_gpu(device: str, capability: tuple[int, int] = (0, 0), without: int | None = None) -> list[str]:
    """Why what runs on NVIDIA's GPUs of this compute capability alone cannot serve a torch device of kind "cuda".

    Empty for other kinds. without: a major number, later than that, for which it does not either.
    """
    if device.partition(":")[0] != "cuda":
        return []
    facts = machine()
    reasons = why_not(facts)
    if not reasons and facts.capability is None:
        reasons.append("it is for NVIDIA's GPUs, not for AMD's")
    if not reasons and facts.capability is not None and facts.capability < capability:
        found, wanted = (".".join(map(str, pair)) for pair in (facts.capability, capability))
        reasons.append(f"it needs compute capability {wanted} or later, the GPU has {found}")
    if not reasons and facts.capability is not None and facts.capability[0] == without:
        reasons.append(f"it is not for compute capability {without}.x, which the GPU has")
    return reasons


def visible_gpus() -> int:
    """How many GPUs this process may use."""
    used = machine().used
    return 0 if used is None else len(used.visible)
