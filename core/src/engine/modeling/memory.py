"""A device whose memory has ended: the error that says so, in the same words wherever it is noticed."""

from __future__ import annotations

import torch

from engine.types.errors import DeviceMemoryError

_SENTENCES = 3
"""Of torch's message that say how much was asked for and how much is there; advice about its settings follows."""


def out_of_memory(asked: str, error: torch.OutOfMemoryError, remedy: str, where: str = "") -> DeviceMemoryError:
    """The error to raise where torch found no memory.

    Args:
        asked: what was to be done.
        error: torch's.
        remedy: what helps.
        where: how far it came; it goes before torch's own words.
    """
    said = ". ".join(str(error).strip().split("\n", 1)[0].split(". ")[:_SENTENCES]).rstrip(".")
    return DeviceMemoryError(asked, ": ".join(part for part in (where, said) if part), remedy)
