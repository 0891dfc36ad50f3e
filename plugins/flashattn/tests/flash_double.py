"""Attention as the libraries' kernels do it, in double precision: what their calls are answered with in tests.

It follows their tiles: a tile of keys is read whole, a key that a query does not see gets the weight 0, and its value
is multiplied by it, NaN included. So a driver that hands over a table with a foreign page in it, or a page with NaN in
it, gets what the libraries would give.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

QUERIES = 64
"""Of a tile."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """How a library's kernels differ.

    Args:
        keys: of a tile.
        clears_past_end: values after a row's end count as 0, instead of as what lies in the row's last page.
        relative_alibi: causal ALiBi adds slope * key, which shifts the sums of a query.
    """

    keys: int = 128
    clears_past_end: bool = True
    relative_alibi: bool = False


@dataclass(frozen=True, kw_only=True)
class Mask:
    """Which keys a query sees: from `left` before its own place to `right` after it, -1 for no bound; places are
    aligned at the row's end."""

    left: int = -1
    right: int = -1
    scale: float = 1.0
    cap: float = 0.0
    slopes: torch.Tensor | None = None


def attend_row(
    kernel: Kernel, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, length: int, mask: Mask
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row: q [n, Hq, D]; k, v [S, Hkv, D], S being length rounded up to tiles -> out [n, Hq, D], sums [Hq, n]."""
    outs, sums = [], []
    for first in range(0, len(q), QUERIES):
        place = torch.arange(first, min(first + QUERIES, len(q))) + length - len(q)
        lowest = 0 if mask.left < 0 else max(0, int(place[0]) - mask.left)
        highest = length if mask.right < 0 else min(length, int(place[-1]) + mask.right + 1)
        start, stop = lowest // kernel.keys * kernel.keys, -(-highest // kernel.keys) * kernel.keys
        key = torch.arange(start, stop)
        groups = q.shape[1] // k.shape[1]
        keys, values = (x[start:stop].double().repeat_interleave(groups, dim=1) for x in (k, v))
        values = torch.where((key < length)[:, None, None], values, 0.0) if kernel.clears_past_end else values
        scores = torch.einsum("nhd,shd->hns", q[first : first + QUERIES].double(), keys) * mask.scale
        if mask.cap:
            scores = mask.cap * torch.tanh(scores / mask.cap)
        if mask.slopes is not None:
            causal = mask.left < 0 and mask.right == 0
            distance = -key[None] if causal and kernel.relative_alibi else (place[:, None] - key).abs()
            scores = scores - mask.slopes.double()[:, None, None] * distance
        seen = key < length
        seen = seen & ((key <= place[:, None] + mask.right) if mask.right >= 0 else True)
        seen = seen & ((key >= place[:, None] - mask.left) if mask.left >= 0 else True)
        scores = torch.where(seen, scores, -torch.inf)
        total = torch.logsumexp(scores, dim=-1)
        weights = torch.where(seen, torch.exp(scores - total[..., None]), 0.0)
        outs.append(torch.einsum("hns,shd->nhd", weights, values))
        sums.append(total)
    return torch.cat(outs), torch.cat(sums, dim=1)


def attend_pages(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    table: torch.Tensor,
    bounds: list[int],
    lengths: list[int],
    mask: Mask,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All rows; k, v are pages [P, tokens, Hkv, D]. Entries of the table past a row's last page are not read, unless a
    kernel reads a whole tile: then what lies there counts."""
    page_size, outs, sums = k.shape[1], [], []
    for row, length in enumerate(lengths):
        if bounds[row] == bounds[row + 1]:
            continue
        reach = -(-length // kernel.keys) * kernel.keys
        key = torch.arange(reach)
        if kernel.clears_past_end:
            key = key.clamp(max=length - 1)
        pages = table[row].long()[(key // page_size).clamp(max=table.shape[1] - 1)]
        rows = q[bounds[row] : bounds[row + 1]]
        found = attend_row(kernel, rows, k[pages, key % page_size], v[pages, key % page_size], length, mask)
        outs.append(found[0])
        sums.append(found[1])
    return torch.cat(outs).to(q.dtype), torch.cat(sums, dim=1).to(torch.promote_types(q.dtype, torch.float32))


def attend_packed(
    kernel: Kernel,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_bounds: list[int],
    k_bounds: list[int],
    mask: Mask,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows without pages, one after another; a tile that reaches past a row's end is cleared there."""
    outs, sums = [], []
    for row in range(len(q_bounds) - 1):
        length = k_bounds[row + 1] - k_bounds[row]
        padding = -length % kernel.keys
        keys, values = (
            torch.nn.functional.pad(x[k_bounds[row] : k_bounds[row + 1]], (0, 0, 0, 0, 0, padding)) for x in (k, v)
        )
        found = attend_row(kernel, q[q_bounds[row] : q_bounds[row + 1]], keys, values, length, mask)
        outs.append(found[0])
        sums.append(found[1])
    return torch.cat(outs).to(q.dtype), torch.cat(sums, dim=1).to(torch.promote_types(q.dtype, torch.float32))
