"""The operations of mixtures of experts, as engine-moe defines them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine_cpu._native import ExpertOps
from engine_cpu.dtypes import DTYPES
from engine_cpu.packed import Packed, PackedLinear
from engine_cpu.packed_experts import ACTS, ExpertProducts, PackedExperts, joined

if TYPE_CHECKING:
    from engine_kit.routing import ExpertAct, RouteForm


class Experts:
    """Logits and weights of routing are float32."""

    _routing: ExpertOps
    _products: ExpertProducts
    _linear: PackedLinear

    def router_logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, H], weight float32 [E, H] -> float32 [T, E]."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        weight, rows = weight.contiguous(), len(x)
        out = torch.empty((rows, len(weight)), dtype=torch.float32)
        self._routing.router_logits(
            DTYPES[x.dtype], x.data_ptr(), x.stride(0), rows, x.shape[1], len(weight), weight.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def route(
        self, logits: torch.Tensor, bias: torch.Tensor | None, form: RouteForm
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """logits float32 [T, E], bias float32 [E] -> ids int32 [T, k], weights float32 [T, k]; of equals the first."""
        logits, (rows, experts) = logits.contiguous(), logits.shape
        ids = torch.empty((rows, form.top_k), dtype=torch.int32)
        weights = torch.empty((rows, form.top_k), dtype=torch.float32)
        bias = None if bias is None else bias.contiguous()
        self._routing.route(
            logits.data_ptr(), rows, experts, 0 if bias is None else bias.data_ptr(), form.top_k, form.groups,
            form.top_groups, form.sigmoid, form.renormalise, form.pairs, form.jitter is not None, form.biased_logits,
            form.scale, form.jitter or 0.0, ids.data_ptr(), weights.data_ptr(),
        )  # fmt: skip
        return ids, weights

    def pack_experts(
        self,
        first: torch.Tensor,
        last: torch.Tensor,
        first_bias: torch.Tensor | None,
        last_bias: torch.Tensor | None,
    ) -> PackedExperts:
        """first [E, 2 * I, H] or [E, I, H], last [E, H, I] and their biases; copies are made, and none is kept."""

        def packed(weight: torch.Tensor, bias: torch.Tensor | None) -> list[Packed]:
            form = str(weight.dtype).removeprefix("torch.")
            biases = [None] * len(weight) if bias is None else list(bias)
            return [self._linear.pack(form, *each) for each in zip(weight, biases, strict=True)]

        return joined(list(zip(packed(first, first_bias), packed(last, last_bias), strict=True)))

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights float32 [T, k] -> [T, H]."""
        return self._products.experts(x, packed, ids, weights, act)

    def place_experts(self, ids: torch.Tensor, table: torch.Tensor, first: int, load: torch.Tensor) -> torch.Tensor:
        """ids int32 [T, k], table int32 [E, R], load int64 [n] -> int32 [T, k]."""
        ids, (rows, per_token), (experts, replicas) = ids.contiguous(), ids.shape, table.shape
        out = torch.empty_like(ids)
        self._routing.place_experts(
            ids.data_ptr(), rows, per_token, table.data_ptr(), experts, replicas, first, len(load), load.data_ptr(),
            out.data_ptr(),
        )  # fmt: skip
        return out

    def gated_act(self, x: torch.Tensor, act: ExpertAct) -> torch.Tensor:
        """x [T, 2 * I] -> act(gate) * up, [T, I]; x [T, I] -> act(x) where `act` has no gates."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        rows, size = x.shape[0], x.shape[1] // 2 if act.gated else x.shape[1]
        out = x.new_empty((rows, size))
        self._routing.gated_act(
            DTYPES[x.dtype], ACTS.index(act.kind), act.gated, act.alpha, act.limit, x.data_ptr(), x.stride(0), rows,
            size, out.data_ptr(),
        )  # fmt: skip
        return out

    def moe_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [T, H] * sigmoid(gate [T, 1])."""
        if x.stride(-1) != 1:
            x = x.contiguous()
        out = x.new_empty(x.shape)
        self._routing.row_gate(
            DTYPES[x.dtype], x.data_ptr(), x.stride(0), gate.data_ptr(), gate.stride(0), len(x), x.shape[1],
            out.data_ptr(),
        )  # fmt: skip
        return out
