"""From queries and keys to scores, and from scores to weights: the same with a cache and without."""

from __future__ import annotations

import torch

from engine.interfaces.attention import AttentionLayer


def scores_of(layer: AttentionLayer, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """queries [b, n, D], keys [b, S, D] -> [b, n, S] in the precision of keys, soft-capped."""
    scores = torch.bmm(queries.to(keys.dtype) * layer.scale, keys.transpose(1, 2))
    cap = layer.need.soft_cap
    return scores if cap is None else scores.div_(cap).tanh_().mul_(cap)


def weights_of(
    scores: torch.Tensor, sinks: torch.Tensor | None, want_total: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """scores [..., S] -> (weights [..., S], where wanted logarithms of the sums of their exponentials [...]).

    sinks: of the shape [...], or one that broadcasts to it. A sink is one more score, whose weight goes to nobody.
    """
    if sinks is None:
        return torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1) if want_total else None
    total = torch.logaddexp(torch.logsumexp(scores, dim=-1), sinks.to(scores.dtype))
    return torch.exp(scores - total.unsqueeze(-1)), total
