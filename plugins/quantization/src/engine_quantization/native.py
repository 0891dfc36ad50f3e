"""Driver `stored-cpu`: codes multiplied as they are stored, by engine-cpu's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.interfaces.quantization import LayerShape
from engine.types.errors import ConfigError
from engine_cpu.packed import MOST_INPUTS, Packed, PackedLinear
from engine_cpu.packed_experts import ExpertProducts, PackedExperts, joined
from engine_quantization.body import ReadsStored
from engine_quantization.readers import Codes

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext
    from engine_kit.routing import ExpertAct
    from engine_quantization.cards import CpuOptions

PART = 32
"""Inputs of a piece of a group that is not whole."""
UNIT = 4
"""Inputs that the kernels take together: a group is a multiple of it."""
ELSEWHERE = "name the slower driver that takes it, by --quantization stored, or choose a smaller --tensor-parallel-size"


class NativeBody(ReadsStored):
    """Whole numbers meet rows that are rounded to 8 bits in the groups of the weights; floats meet rows as they are."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        options: CpuOptions = context.options
        self._layers = PackedLinear("quantization", options.level)
        self._products = ExpertProducts(options.level)

    def _packed(self, layer: LayerShape, codes: Codes, bias: torch.Tensor | None) -> Packed:
        codes, order = _in_order(layer, codes)
        stored, zeros, inputs = codes.codes, codes.zeros, codes.codes.shape[1]
        group_size = codes.group_size
        if codes.scales.shape[1] == 1:
            group_size = -(-inputs // UNIT) * UNIT
        if group_size % UNIT:
            raise _refused(layer, f"{group_size} inputs share a scale, which is no multiple of {UNIT}")
        scales, table = codes.scales, None
        if codes.values is None:
            assert zeros is not None
            form = f"codes{codes.bits}"
            if codes.bits == 8 and group_size > MOST_INPUTS:
                raise _refused(layer, f"sums of more than {MOST_INPUTS} products may not fit 32 bits")
            if codes.bits == 8 and scales.shape[1] == 1 and order is None and bool((zeros == 128).all()):
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


def _in_order(layer: LayerShape, codes: Codes) -> tuple[Codes, torch.Tensor | None]:
    """Inputs that are put group by group, and which input of a row comes where; None: as they stand.

    Where a rank has parts of groups, these are cut into pieces of `PART` inputs: the last one of a group is filled up
    with its last input, by weights of 0.
    """
    if codes.group_of is None:
        return codes, None
    assert codes.zeros is not None
    order = torch.argsort(codes.group_of, stable=True)
    counts = torch.bincount(codes.group_of, minlength=codes.scales.shape[1])
    if not bool((counts[:-1] != codes.group_size).any()):
        return codes._replace(codes=codes.codes[:, order], group_of=None), order
    if layer.kind == "expert":
        raise _refused(layer, "its groups of inputs do not follow one another (g_idx), and ranks have parts of them")
    pieces = -(-counts // PART)
    of_piece = torch.repeat_interleave(torch.arange(len(counts)), pieces)
    firsts = torch.cumsum(counts, 0) - counts  # of each group's inputs among all that are sorted
    pieces_before = torch.cumsum(pieces, 0) - pieces
    inside = (torch.arange(len(of_piece)) - pieces_before[of_piece]).unsqueeze(1) * PART + torch.arange(PART)
    there = (inside < counts[of_piece].unsqueeze(1)).flatten()
    at = torch.minimum(inside, counts[of_piece].unsqueeze(1) - 1) + firsts[of_piece].unsqueeze(1)
    order, scales, zeros = order[at.flatten()], codes.scales[:, of_piece], codes.zeros[:, of_piece]
    filled = torch.where(there, codes.codes[:, order], zeros.repeat_interleave(PART, 1))
    return Codes(filled, codes.bits, scales, zeros, None, PART), order


def _refused(layer: LayerShape, why: str) -> ConfigError:
    return ConfigError(f"multiply with {', '.join(layer.names)} as it is stored", why, ELSEWHERE)
