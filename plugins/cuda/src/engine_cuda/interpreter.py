"""Whether Triton's kernels run in Triton's interpreter, on the processor's tensors, as its variable asks for."""

from __future__ import annotations

import os

VARIABLE = "TRITON_INTERPRET"
"""Triton's own, read by Triton when a kernel is defined: it must be set before a body is imported."""


def interpreted() -> bool:
    """True where kernels are interpreted. Torch and Triton are not imported."""
    return os.environ.get(VARIABLE, "0").lower() in ("1", "true", "on", "yes", "y")


def wrong_device(device: str) -> list[str]:
    """The reason why kernels cannot serve a torch device: for `Card.unsupported`. Empty where they can."""
    kind = device.partition(":")[0]
    if kind == "cuda" or (kind == "cpu" and interpreted()):
        return []
    if kind == "cpu":
        return [f"it needs a GPU (or {VARIABLE}=1, to try its kernels on the processor, thousands of times slower)"]
    return [f"it needs a GPU, not a device of kind '{kind}'"]
