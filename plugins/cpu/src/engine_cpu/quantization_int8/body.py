"""Weights of 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from engine.interfaces.quantization import LayerShape, StoredTensor, plain_tensors
from engine.types.errors import ConfigError
from engine_cpu.packed import MOST_INPUTS, Packed, PackedLinear
from engine_cpu.packed_experts import ExpertProducts, PackedExperts, joined
from engine_kit.plain_layer import plain_layer

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_cpu.quantization_int8.card import Int8Options
    from engine_kit.routing import ExpertAct


class Int8Body:
    """See `engine.interfaces.quantization.Quantization`."""

    def __init__(self, context: WorkerContext) -> None:
        options: Int8Options = context.options
        self._layers = PackedLinear("quantization", options.level)
        self._products = ExpertProducts(options.level)

    def tensors(self, layer: LayerShape) -> Sequence[StoredTensor]:
        """A plain layer's."""
        return plain_tensors(layer)

    def pack(self, layer: LayerShape, tensors: Mapping[str, torch.Tensor]) -> Packed:
        """The same way for layers of every kind. Raises ConfigError for too many inputs."""
        weight, bias = plain_layer(layer, tensors)
        check_inputs(layer.kind, weight)
        if weight.dtype not in (torch.float32, torch.bfloat16):
            weight = weight.float()
        return self._layers.pack("int8", weight, bias)

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


def check_inputs(kind: str, weight: torch.Tensor) -> None:
    """Raise ConfigError where the products of a row might not fit their sum."""
    if weight.shape[1] > MOST_INPUTS:
        raise ConfigError(
            f"quantise a layer of kind '{kind}' of {weight.shape[0]} x {weight.shape[1]} to 8 bits",
            f"sums of more than {MOST_INPUTS} products may not fit 32 bits",
            "leave --quantization out, or take int4 for this kind of layer",
        )
