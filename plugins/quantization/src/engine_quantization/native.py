"""Driver `stored-cpu`: codes multiplied as they are stored, by engine-cpu's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.interfaces.quantization import LayerShape
from engine_cpu.packed import MOST_INPUTS, Packed, PackedLinear
from engine_cpu.packed_experts import ExpertProducts, PackedExperts, joined
from engine_quantization.body import ReadsStored
from engine_quantization.order import in_order, refused
from engine_quantization.readers import Codes

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_kit.routing import ExpertAct
    from engine_quantization.cards import CpuOptions

UNIT = 4
"""Inputs that the kernels take together: a group is a multiple of it."""


class NativeBody(ReadsStored):
    """Whole numbers meet rows that are rounded to 8 bits in the groups of the weights; floats meet rows as they are."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        options: CpuOptions = context.options
        self._layers = PackedLinear("quantization", options.level)
        self._products = ExpertProducts(options.level)

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Packed:
        codes, order = in_order(codes)
        stored, zeros, inputs = codes.codes, codes.zeros, codes.codes.shape[1]
        group_size = codes.group_size
        if codes.scales.shape[1] == 1:
            group_size = -(-inputs // UNIT) * UNIT
        if group_size % UNIT:
            raise refused(layer, f"{group_size} inputs share a scale, which is no multiple of {UNIT}")
        scales, table = codes.scales, None
        if codes.values is None:
            assert zeros is not None
            form = f"codes{codes.bits}"
            if codes.bits == 8 and group_size > MOST_INPUTS:
                raise refused(layer, f"sums of more than {MOST_INPUTS} products may not fit 32 bits")
            # Not of an expert: whether it may is told by its numbers, and all of a layer's have to be packed alike.
            plain = codes.bits == 8 and scales.shape[1] == 1 and order is None and layer.kind != "expert"
            if plain and bool((zeros == 128).all()):
                form, scales = "int8", scales.float()
        elif codes.bits == 8:
            form = "values8"
        elif bool(((doubled := 2 * codes.values) == doubled.round()).all()):  # halves: whole numbers of half the scale
            form, table = "codes4", doubled - doubled.min()
            zeros = torch.full_like(scales, int(-doubled.min()), dtype=torch.uint8)
            scales = scales / 2
        else:
            form, table = "values4", codes.values
        return self._layers.pack_codes(form, stored, scales, zeros, bias, group_size, table, order)

    def packed_bytes(self, packed: Packed) -> int:
        """Codes, scales, zeros and bias, with their padding."""
        return packed.nbytes

    def linear(self, x: torch.Tensor, packed: Packed) -> torch.Tensor:
        """x [T, I] -> [T, O] in x's dtype."""
        return self._layers.linear(x, packed)

    def pack_experts(self, experts: Sequence[tuple[Packed, Packed]]) -> PackedExperts:
        """Both projections of each, packed -> what `experts` takes."""
        return joined(experts)

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights float32 [T, k] -> [T, H]."""
        return self._products.experts(x, packed, ids, weights, act)
