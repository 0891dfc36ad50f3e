"""Attention without a cache: each token of a row sees all tokens of the row, before and after itself."""

from __future__ import annotations

from itertools import pairwise

import torch

from engine.interfaces.attention import AttentionLayer
from engine_reference.attention_torch.scores import scores_of, weights_of

MAX_SCORES = 1 << 24
"""Most scores that are held at once; longer rows are computed in chunks of queries."""


def forward_encoder(
    layer: AttentionLayer,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bounds: list[int],
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    """See `engine.interfaces.attention.AttentionBackend.forward`; row r has the tokens bounds[r] .. bounds[r + 1] - 1.

    Scores are computed in float32 at least.
    """
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, groups = q.shape[1], q.shape[1] // k.shape[1]
    for start, stop in pairwise(bounds):
        # [heads, keys, head_size]; the queries of a group share their keys
        keys, values = (x[start:stop].transpose(0, 1).to(wide).repeat_interleave(groups, dim=0) for x in (k, v))
        at_once = max(1, MAX_SCORES // (heads * (stop - start)))
        for first in range(start, stop, at_once):
            last = min(first + at_once, stop)
            scores = scores_of(layer, q[first:last].transpose(0, 1), keys)
            if layer.alibi_slopes is not None:
                place = torch.arange(stop - start, device=q.device)
                distance = (place - place[first - start : last - start].unsqueeze(1)).abs()
                scores -= layer.alibi_slopes.to(wide).view(-1, 1, 1) * distance
            sinks = None if layer.sinks is None else layer.sinks.unsqueeze(1)
            weights, total = weights_of(scores, sinks, lse is not None)
            out[first:last] = torch.bmm(weights, values).transpose(0, 1)
            if lse is not None and total is not None:
                lse[first:last] = total.T
