"""Weights of 4 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine.interfaces.quantization import LayerShape, StoredTensor, plain_tensors
from engine_cpu.packed import Packed, PackedLinear
from engine_cpu.packed_experts import ExpertProducts, PackedExperts, joined
from engine_cpu.quantization_int8.body import check_inputs
from engine_kit.plain_layer import plain_layer

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cpu.quantization_int4.card import Int4Options
    from engine_kit.routing import ExpertAct


class Int4Body:
    """See `engine.interfaces.quantization.Quantization`."""

    def __init__(self, context: WorkerContext) -> None:
        options: Int4Options = context.options
        self._group_size = options.group_size
        self._head_bits = options.head_bits
        self._layers = PackedLinear("quantization", options.level)
        self._products = ExpertProducts(options.level)

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """A plain layer's."""
        return plain_tensors(layer)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Packed:
        """Raises ConfigError for a head of too many inputs for 8 bits."""
        weight, bias = plain_layer(layer, tensors)
        if weight.dtype not in (torch.float32, torch.bfloat16):
            weight = weight.float()
        if layer.kind == "head" and self._head_bits == 8:
            check_inputs(layer.kind, weight)
            return self._layers.pack("int8", weight, bias)
        return self._layers.pack("int4", weight, bias, self._group_size)

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype; each row is rounded to 8 bits by itself."""
        return self._layers.linear(x, packed)

    def pack_experts(self, experts: Sequence[tuple[Packed, Packed]]) -> PackedExperts:
        """Both projections of each, packed -> what `experts` takes."""
        return joined(experts)

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights float32 [T, k] -> [T, H]; rows are rounded in front of each product."""
        return self._products.experts(x, packed, ids, weights, act)

    def packed_bytes(self, packed: Packed) -> int:
        """Codes, scales and bias, with their padding."""
        return packed.nbytes
