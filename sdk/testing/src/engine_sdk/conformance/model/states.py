"""States for a model under test, in pages in which what is not written is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from engine.interfaces.model import StateBatch
from engine.types.model import KVSpec


class LentStates:
    """One layer's. Implements `engine.interfaces.model.StateSite`, and looks at what it is given.

    Args:
        owner: the `PagedLayers` whose steps it is in.
        index: of the layer; group: of its states.
        spec: the layer's; size: over how many ranks it is divided.
        num_pages: of the pool.
    """

    def __init__(self, owner: Any, index: int, group: int, spec: KVSpec, size: int, num_pages: int) -> None:
        self._owner = owner
        self._index = index
        self._group = group
        self.pool: dict[str, torch.Tensor] = {}
        for state in spec.states:
            shape = list(state.shape)
            if state.divided_dim is not None:
                assert shape[state.divided_dim] % size == 0, f"{state.name} is not divided evenly over {size} ranks"
                shape[state.divided_dim] //= size
            pages = torch.full((num_pages, *shape), torch.nan, dtype=getattr(torch, state.dtype))
            self.pool[state.name] = pages.to(owner.device)

    @property
    def batch(self) -> StateBatch:
        """The step's."""
        found: StateBatch = self._owner.plans[self._group]
        return found

    def load(self, name: str) -> torch.Tensor:
        """See `StateSite.load`."""
        if name == next(iter(self.pool)):
            self._owner.calls.append(self._index)
        read = self.batch.read
        states = self.pool[name].index_select(0, read.clamp(min=0))
        return states.masked_fill_((read < 0).view(-1, *[1] * (states.dim() - 1)), 0)

    def save(self, name: str, states: torch.Tensor) -> None:
        """See `StateSite.save`."""
        pool, batch = self.pool[name], self.batch
        form = (len(batch.write_at_host), *pool.shape[1:])
        assert tuple(states.shape) == form, f"state {name} of layer {self._index} is {list(states.shape)}, not {form}"
        pool.index_copy_(0, batch.write, states.to(pool.dtype))


def state_batch(starts: Sequence[int], lengths: Sequence[int], table: np.ndarray, size: int, device: Any) -> StateBatch:
    """Of rows that go on at these tokens: they leave states at the ends of blocks of `size` tokens, and at their own.

    table: int32 [R, blocks]; the rows' pages.
    """
    loc = np.cumsum([0, *lengths]).astype(np.int32)
    read, write, write_at = [], [], []
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        end = start + length
        read.append(int(table[row, (start - 1) // size]) if start else -1)
        for block in range(start // size, (end - 1) // size + 1):
            write.append(int(table[row, block]))
            write_at.append(int(loc[row]) + min((block + 1) * size, end) - 1 - start)
    at = np.array(write_at, np.int64)
    return StateBatch(
        query_start_loc=torch.from_numpy(loc.copy()).to(device),
        query_start_loc_host=loc,
        read=torch.tensor(read, dtype=torch.int64, device=device),
        write=torch.tensor(write, dtype=torch.int64, device=device),
        write_at=torch.from_numpy(at).to(device),
        write_at_host=at,
    )
