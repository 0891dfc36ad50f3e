"""Tokens sorted by expert: each expert that has some is called once, with all of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

Compute = Callable[[int, torch.Tensor], torch.Tensor]
"""(number of the expert, rows [n, H]) -> [n, H'], each row for itself."""


def by_expert(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, num_experts: int, compute: Compute
) -> torch.Tensor:
    """out[t] = sum over i of weights[t, i] * compute(ids[t, i], x[t]).

    x [T, H] of at least one token, ids int [T, k] of different experts for each token, weights [T, k]. A token's terms
    are added in the order of `ids`, in the wider dtype of x and weights: -> [T, H'] in x's. Waits for the device.
    """
    if len(x) == 1:
        given = [compute(expert, x) for expert in ids[0].tolist()]
        return (torch.cat(given) * weights[0].unsqueeze(1)).sum(0, keepdim=True).to(x.dtype)
    flat = ids.flatten()
    order = flat.argsort(stable=True)
    rows = x.index_select(0, order // ids.shape[1])
    counts = torch.bincount(flat, minlength=num_experts).tolist()
    parts = enumerate(torch.split(rows, counts))
    given = [compute(expert, part) for expert, part in parts if len(part)]
    terms = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    each = torch.cat(given).index_select(0, terms).view(*ids.shape, -1)
    out: torch.Tensor = (each * weights.unsqueeze(-1)).sum(1).to(x.dtype)
    return out
