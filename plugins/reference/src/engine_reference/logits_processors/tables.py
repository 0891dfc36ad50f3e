"""Tables with a row for each slot, as wide as the widest entry so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


def sent(context: WorkerContext, array: np.ndarray) -> torch.Tensor:
    """A copy on the device, which the host does not wait for."""
    assert context.platform is not None
    host = torch.from_numpy(np.ascontiguousarray(array))
    out = torch.empty(host.shape, dtype=host.dtype, device=context.device)
    context.platform.to_device(host, out)
    return out


def widened(table: torch.Tensor, shape: tuple[int, ...], fill: int) -> torch.Tensor:
    """`table` [slots, ...], or a copy in which each dimension but the first holds at least `shape`, filled up.

    Widths grow to powers of two, so that a table is copied a few times in an engine's life.
    """
    if all(have >= want for have, want in zip(table.shape[1:], shape, strict=True)):
        return table
    grown = [
        have if have >= want else 1 << (want - 1).bit_length()
        for have, want in zip(table.shape[1:], shape, strict=True)
    ]
    out = torch.full((table.shape[0], *grown), fill, dtype=table.dtype, device=table.device)
    out[tuple(slice(0, size) for size in table.shape)] = table
    return out
