"""The operations of mixtures of experts, on plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_moe.ops_moe.card import ClampedGLU, RouteForm

Expert = Callable[[torch.Tensor], torch.Tensor]
_SMALLEST = 1e-20
"""Added to a sum that is divided by, as DeepSeek's own code does: sigmoids may all be 0."""


class MoeOpsBody:
    """Without state, on whatever device the inputs lie. `moe_apply` waits for the device: it needs the numbers of
    tokens that experts have."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    def moe_route(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, form: RouteForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, and the weights of what they give.

        x [T, H]; weight [E, H], in float32 at least; bias [E], added to the scores by which experts are chosen, but not
        to their weights (DeepSeek-V3, 2024), or to the logits (`RouteForm.biased_logits`). Logits, scores and weights
        are computed in the weight's dtype.

        Returns (ids int64 [T, k], weights [T, k] in the weight's dtype), in no particular order.
        """
        logits = F.linear(x.to(weight.dtype), weight, bias if form.biased_logits else None)
        if form.jitter is not None:
            return _one_by_one(logits, form.top_k, form.jitter)
        scores = logits.sigmoid() if form.sigmoid else logits.softmax(dim=-1)
        choice = scores if bias is None or form.biased_logits else scores + bias
        if form.top_groups < form.groups:
            grouped = choice.unflatten(-1, (form.groups, -1))
            best = grouped.topk(2, dim=-1).values.sum(-1) if form.pairs else grouped.amax(-1)
            closed = torch.ones_like(best, dtype=torch.bool)
            closed.scatter_(1, best.topk(form.top_groups, dim=-1).indices, False)
            choice = grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(1)
        ids = choice.topk(form.top_k, dim=-1).indices
        weights = scores.gather(1, ids)
        if form.renormalise:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _SMALLEST)
        return ids, weights if form.scale == 1.0 else weights * form.scale

    def moe_apply(
        self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: Sequence[Expert]
    ) -> torch.Tensor:
        """out[t] = sum over i of weights[t, i] * experts[ids[t, i]](x[t]).

        x [T, H], ids int64 [T, k] of different experts for each token, weights [T, k]. Each expert that has tokens is
        called once, with all of them, [n, H] -> [n, H'], each row for itself; the first one where there is no token. A
        token's terms are added in the order of `ids`, in the wider dtype of x and weights: -> [T, H'] in x's.
        """
        per_token = ids.shape[1]
        if not len(x):
            return experts[0](x)
        if len(x) == 1:
            given = [experts[expert](x) for expert in ids[0].tolist()]
            return (torch.cat(given) * weights[0].unsqueeze(1)).sum(0, keepdim=True).to(x.dtype)
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        rows = x.index_select(0, order // per_token)
        counts = torch.bincount(flat, minlength=len(experts)).tolist()
        given = [expert(part) for expert, part in zip(experts, rows.split(counts), strict=True) if len(part)]
        terms = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        each = torch.cat(given).index_select(0, terms).unflatten(0, ids.shape)
        return (each * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def moe_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(gate): x [T, H], gate [T, 1] -> [T, H]; the sigmoid in float32 at least."""
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return (x * wide.sigmoid()).to(x.dtype)

    def moe_clamped_glu(self, gate_up: torch.Tensor, form: ClampedGLU) -> torch.Tensor:
        """gate_up [T, 2 * I], all gates first -> [T, I], see `ClampedGLU`; in float32 at least."""
        gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, dim=-1)
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
        return ((up + 1) * gate * (form.alpha * gate).sigmoid()).to(gate_up.dtype)


def _one_by_one(logits: torch.Tensor, top_k: int, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """See `RouteForm.jitter`: logits [T, E] -> ids, weights [T, top_k]."""
    left = logits
    ids, weights = [], []
    for _ in range(top_k):
        best, chosen = left.max(dim=-1, keepdim=True)
        far = (best - logits) / torch.maximum(logits.abs(), best) > 2 * jitter
        ids.append(chosen)
        weights.append(left.masked_fill(far, float("-inf")).softmax(dim=-1).gather(1, chosen))
        left = left.scatter(1, chosen, float("-inf"))
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1)
