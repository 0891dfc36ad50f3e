"""Tokens sorted by expert: each expert that has some is called once, with all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

Compute = Callable[[int, torch.Tensor], torch.Tensor]
"""(number of the expert, rows [n, H]) -> [n, H'], each row for itself."""


class Rows(NamedTuple):
    """The rows that experts compute, n = T * k without nobody's. Those of one expert follow one another.

    Args:
        x: [n, H].
        token, expert: int64 [n]; of each.
        counts: (expert, rows) of those that have some, in the order of the rows.
        place: int64 [T * k]; of each token's first choice, its second and so on the row; n where nobody computes it.
    """

    x: torch.Tensor
    token: torch.Tensor
    expert: torch.Tensor
    counts: list[tuple[int, int]]
    place: torch.Tensor

    @classmethod
    def of(cls, x: torch.Tensor, ids: torch.Tensor, num_experts: int) -> Rows:
        """x [T, H] of at least one token, ids int [T, k] of different experts for each token, `num_experts` for nobody.
        Waits for the device."""
        flat = ids.flatten().long()
        each = torch.arange(len(flat), device=x.device)
        if len(x) == 1 and max(chosen := flat.tolist()) < num_experts:
            return cls(x.expand(len(flat), -1), each.new_zeros(len(flat)), flat, [(e, 1) for e in chosen], each)
        order = flat.argsort(stable=True)
        place = torch.empty_like(order).scatter_(0, order, each)
        *counts, nobody = torch.bincount(flat, minlength=num_experts + 1).tolist()
        if nobody:
            order = order[:-nobody]
            place.clamp_(max=len(order))
        token = order // ids.shape[1]
        present = [(expert, count) for expert, count in enumerate(counts) if count]
        return cls(x.index_select(0, token), token, flat[order], present, place)

    def each(self, x: torch.Tensor, compute: Compute) -> torch.Tensor:
        """x [n, H] -> [n, H'], what experts make of their rows. Where there is none the first one says how wide."""
        if not self.counts:
            return compute(0, x)
        parts = torch.split(x, [count for _, count in self.counts])
        return torch.cat([compute(expert, part) for (expert, _), part in zip(self.counts, parts, strict=True)])

    def summed(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """y [n, H'], weights [T, k] -> [T, H'] in y's dtype: a token's terms are added in the order of its experts, in
        the wider dtype of both. What nobody computes adds nothing."""
        if len(self.place) > len(y):
            y = F.pad(y, (0, 0, 0, 1))
        each = y.index_select(0, self.place).view(*weights.shape, -1)
        out: torch.Tensor = (each * weights.unsqueeze(-1)).sum(1).to(y.dtype)
        return out


def by_expert(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int, compute: Compute
) -> torch.Tensor:
    """out[t] = sum over i of weights[t, i] * compute(ids[t, i], x[t]).

    x [T, H] of at least one token, ids int [T, k] of different experts for each token, or `num_experts` for nobody,
    weights [T, k]. A token's terms are added in the order of `ids`, in the wider dtype of x and weights: -> [T, H'] in
    x's. Waits for the device.
    """
    rows = Rows.of(x, ids, num_experts)
    return rows.summed(rows.each(rows.x, compute), weights).to(x.dtype)


class Spread(NamedTuple):
    """As `Rows`, without waiting for the device: shapes turn on no id, so that captured steps may have it. Rows of one
    expert follow one another, from a multiple of `aligned` on; what fills up is nobody's.

    Args:
        token: int64 [M]; the token whose row it is; 0 of nobody's.
        expert: int32 [M]; -1 of nobody's.
        starts: int64 [E + 1]; where the rows of each expert begin, and where those of the last one end.
        place: int64 [T, k]; the row of each choice, M where no expert here was chosen.
    """

    token: torch.Tensor
    expert: torch.Tensor
    starts: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, ids: torch.Tensor, num_experts: int, aligned: int = 1) -> Spread:
        """ids int [T, k] of different experts for each token, `num_experts` for nobody."""
        flat = ids.flatten().long()
        pairs = len(flat)
        most = (pairs + min(num_experts, pairs) * (aligned - 1)) // aligned * aligned
        counts = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))
        order = flat.argsort(stable=True)
        sorted_ids = flat[order]
        padded = (counts[:-1] + aligned - 1) // aligned * aligned
        starts = F.pad(padded.cumsum(0), (1, 0))
        within = torch.arange(pairs, device=flat.device) - (counts.cumsum(0) - counts)[sorted_ids]
        at = torch.where(sorted_ids < num_experts, starts[sorted_ids] + within, most)
        token = flat.new_zeros(most + 1).scatter_(0, at, order // ids.shape[1])[:most]
        expert = flat.new_full((most + 1,), -1).scatter_(0, at, sorted_ids)[:most].int()
        place = torch.empty_like(flat).scatter_(0, order, at)
        return cls(token, expert, starts, place.view(ids.shape))

    def summed(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `Rows.summed`: y [M, H'], weights [T, k] -> [T, H'] in y's dtype. Nobody's rows of y are not read."""
        there = (self.place < len(y)).unsqueeze(-1)
        each = y.index_select(0, self.place.flatten().clamp(max=len(y) - 1)).view(*weights.shape, -1)
        # Not multiplied by 0: what nobody wrote may be no number.
        out: torch.Tensor = (each.masked_fill(~there, 0) * weights.unsqueeze(-1)).sum(1).to(y.dtype)
        return out
