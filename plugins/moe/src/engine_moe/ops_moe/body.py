"""The operations of mixtures of experts, on plain torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from engine_kit.by_expert import by_expert

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_kit.routing import ExpertAct, RouteForm

_SMALLEST = 1e-20
"""Added to a sum that is divided by, as DeepSeek's own code does: sigmoids may all be 0."""


class PackedExperts(NamedTuple):
    """A layer's experts as they were given."""

    first: torch.Tensor
    last: torch.Tensor
    first_bias: torch.Tensor | None
    last_bias: torch.Tensor | None

    def tensors(self, place: int) -> list[torch.Tensor]:
        """See `engine_kit.routing.TellsTensors`."""
        return [tensor[place] for tensor in self if tensor is not None]


class MoeOpsBody:
    """Without state, on whatever device the inputs lie. `experts` waits for the device: it needs the numbers of tokens
    that experts have."""

    def __init__(self, context: WorkerContext) -> None:
        del context

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, H], weight [E, H] in float32 at least -> [T, E] in the weight's dtype, in which they are computed: of
        near experts the wrong one would be another model."""
        return F.linear(x.to(weight.dtype), weight)

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor | None, form: RouteForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, and the weights of what they give.

        logits [T, E] in float32 at least; bias [E] of the same dtype, added to the scores by which experts are chosen,
        but not to their weights (DeepSeek-V3, 2024), or to the logits (`RouteForm.biased_logits`).

        Returns (ids int32 [T, k], different ones in each row, weights [T, k] in the logits' dtype), in no particular
        order. A row that holds a NaN or an infinity gets any experts that there are, perhaps one several times.
        """
        if bias is not None and form.biased_logits:
            logits, bias = logits + bias, None
        if form.jitter is not None:
            return _one_by_one(logits, form.top_k, form.jitter)
        scores = logits.sigmoid() if form.sigmoid else logits.softmax(dim=-1)
        choice = scores if bias is None else scores + bias
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
        return ids.int(), weights if form.scale == 1.0 else weights * form.scale

    def pack_experts(
        self,
        first: torch.Tensor,
        last: torch.Tensor,
        first_bias: torch.Tensor | None,
        last_bias: torch.Tensor | None,
    ) -> PackedExperts:
        """first [E, 2 * I, H], of each expert all gates before all ups (without gates [E, I, H]), last [E, H, I],
        biases [E, 2 * I] and [E, H] or None -> what `experts` of the same driver takes; once, after loading. The
        tensors are its own from then on."""
        return PackedExperts(first, last, first_bias, last_bias)

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """out[t] = sum over i of weights[t, i] * expert(ids[t, i])(x[t]), where expert(e)(x) is
        last[e] @ gated_act(first[e] @ x + first_bias[e]) + last_bias[e].

        x [T, H], ids int32 [T, k], weights [T, k] in float32 at least -> [T, H] in x's dtype. An id of E is nobody's
        here, and adds nothing. What an expert gives may be rounded to x's dtype, after each projection; a token's terms
        are added in the order of `ids`, in the wider dtype of x and weights, and rounded once.
        """
        if not len(x):
            return x.new_empty((0, packed.last.shape[1]))

        def expert(index: int, rows: torch.Tensor) -> torch.Tensor:
            first, last = (None if bias is None else bias[index] for bias in packed[2:])
            return F.linear(self.gated_act(F.linear(rows, packed.first[index], first), act), packed.last[index], last)

        return by_expert(x, ids, weights, len(packed.first), expert)

    def place_experts(self, ids: torch.Tensor, table: torch.Tensor, first: int, load: torch.Tensor) -> torch.Tensor:
        """Which of a rank's experts computes whom, where several ranks have some, and some are at several places.

        ids int32 [T, k], table int32 [E, R], the places of each expert, load int64 [n] -> int32 [T, k]: the place
        table[ids[t, i], t % R], less `first`; n where that is none of 0 .. n - 1, as `experts` of n experts takes it.
        load[p] grows by the tokens that place p gets.
        """
        turn = torch.arange(len(ids), device=ids.device) % table.shape[1]
        places = table[ids.long(), turn.unsqueeze(1)] - first
        here = (places >= 0) & (places < len(load))
        places = torch.where(here, places, len(load))
        load += torch.bincount(places.flatten(), minlength=len(load) + 1)[:-1]
        return places

    def gated_act(self, x: torch.Tensor, act: ExpertAct) -> torch.Tensor:
        """x [T, 2 * I], all gates first -> act(gate) * up, [T, I]; x [T, I] -> act(x) where `act` has no gates. In
        float32 at least, rounded once; see `ExpertAct`."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        gate, up = wide.chunk(2, dim=-1) if act.gated else (wide, None)
        if act.kind == "clamped":
            assert up is not None, "a clamped act has gates"
            gate, up = gate.clamp(max=act.limit), up.clamp(-act.limit, act.limit)
            return ((up + 1) * gate * (act.alpha * gate).sigmoid()).to(x.dtype)
        if act.kind == "silu":
            gate = F.silu(gate)
        elif act.kind in ("relu", "relu2"):
            gate = gate.relu() if act.kind == "relu" else gate.relu().square()
        else:
            gate = F.gelu(gate, approximate="tanh" if act.kind == "gelu_tanh" else "none")
        return (gate if up is None else gate * up).to(x.dtype)

    def moe_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x * sigmoid(gate): x [T, H], gate [T, 1] -> [T, H]; the sigmoid in float32 at least."""
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        return (x * wide.sigmoid()).to(x.dtype)


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
    return torch.cat(ids, dim=1).int(), torch.cat(weights, dim=1)
