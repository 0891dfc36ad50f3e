"""The memory of a recording: tensors lie where earlier ones lay that nobody needs any more, as in a plain run."""

from __future__ import annotations

import weakref

import numpy as np
import torch

ALIGNMENT = 64


class RecordedMemory:
    """Memory that a tape's calls write to. It lives as long as this object.

    A replay makes the calls in the order in which they were recorded, so memory that was given back in the meantime may
    serve a later call. Nobody else ever gets it: a replay writes there.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._blocks: list[np.ndarray] = []

    @property
    def nbytes(self) -> int:
        """All of it."""
        return sum(block.nbytes for block in self._blocks)

    def place(self, made: torch.Tensor) -> torch.Tensor:
        """A tensor of the form of `made`, which nobody has filled. When it and all its views are gone, another one may
        lie there."""
        size = made.untyped_storage().nbytes()
        if not size:
            return made
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new(size)
        lent = block[:]  # torch holds on to this view for as long as any tensor lies there
        weakref.finalize(lent, free.append, block).atexit = False
        storage = torch.from_numpy(lent).untyped_storage()
        return made.new_empty(0).set_(storage, made.storage_offset(), made.shape, made.stride())

    def _new(self, size: int) -> np.ndarray:
        memory = np.empty(size + ALIGNMENT, np.uint8)
        self._blocks.append(memory)
        first = -memory.ctypes.data % ALIGNMENT
        return memory[first : first + size]
