"""Tables with a row for each slot, as wide as the widest entry so far."""

from __future__ import annotations

import torch


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
