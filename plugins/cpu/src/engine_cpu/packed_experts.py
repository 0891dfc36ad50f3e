"""Mixtures of experts over packed weights: tensors to addresses, for the drivers that compute with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.types.errors import UnsupportedModelError
from engine_cpu._native import ExpertOps, Layout, experts_scratch_bytes
from engine_cpu.dtypes import DTYPES
from engine_cpu.packed import Packed

if TYPE_CHECKING:
    from engine_kit.routing import ExpertAct

ACTS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped")
"""By the numbers of native/experts.h."""


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """A layer's experts.

    Args:
        experts: both projections of each; they hold the memory.
        first, last: formats and sizes of the projections, alike for all.
        table: int64 [8, E]; addresses of weights, scales, biases and orders of the first projections, then of the last
            ones; 0 where there are none.
    """

    experts: tuple[tuple[Packed, Packed], ...]
    first: Layout
    last: Layout
    outputs: int
    table: torch.Tensor

    def tensors(self, place: int) -> list[torch.Tensor]:
        """See `engine_kit.routing.TellsTensors`."""
        parts = [part for one in self.experts[place] for part in (one.weight, one.scales, one.bias, one.order)]
        return [part for part in parts if part is not None]


def joined(experts: Sequence[tuple[Packed, Packed]]) -> PackedExperts:
    """Both projections of each expert, packed one by one -> what `ExpertProducts.experts` takes.

    Raises UnsupportedModelError where they are not packed alike: the kernels take one layout for all.
    """
    first, last = experts[0]
    for expert, pair in enumerate(experts):
        for one, of_first in zip(pair, (first, last), strict=True):
            if one.made_of != of_first.made_of:
                raise UnsupportedModelError(
                    "compute a layer's experts together",
                    f"the checkpoint stores expert {expert} as {_said(one)}, and expert 0 as {_said(of_first)}",
                    "name --quantization stored, which takes them one by one",
                )
    table = torch.tensor(
        [
            [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            for side in zip(*experts, strict=True)
            for tensors in zip(*((one.weight, one.scales, one.bias, one.order) for one in side), strict=True)
        ],
        dtype=torch.int64,
    )
    return PackedExperts(tuple(experts), first.layout, last.layout, last.outputs, table)


def _said(packed: Packed) -> str:
    form, outputs, inputs, group, scales = packed.made_of
    return f"{form} [{outputs}, {inputs}] in groups of {group} with scales of {scales}"


class ExpertProducts:
    """Computes with packed experts.

    Calls are native from end to end, and may be recorded: their scratch memory is this object's, and stays where it is
    for as long as that. They run one after the other.

    Args:
        level: of processor features, or "auto"; one that this processor has.
    """

    def __init__(self, level: str) -> None:
        self._ops = ExpertOps(level, torch.get_num_threads())
        self._scratch = torch.empty(0, dtype=torch.uint8)
        self._outgrown: list[torch.Tensor] = []  # whose addresses were recorded, perhaps

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, k], weights float32 [T, k] -> [T, H] in x's dtype; the number of experts is the id of
        nobody. Raises IndexError for an expert that there is not."""
        rows, per_token = ids.shape
        out = x.new_empty((rows, packed.outputs))
        if not rows:
            return out
        if x.stride(-1) != 1:
            x = x.contiguous()
        ids, weights = ids.contiguous(), weights.contiguous()
        dtype, count = DTYPES[x.dtype], len(packed.experts)
        size = experts_scratch_bytes(packed.first, packed.last, count, rows, per_token, dtype)
        if size > self._scratch.nbytes:
            self._outgrown.append(self._scratch)
            self._scratch = torch.empty(2 * size, dtype=torch.uint8)
        self._ops.experts(
            dtype, packed.first, packed.last, packed.table.data_ptr(), count, ACTS.index(act.kind), act.gated,
            act.alpha, act.limit, x.data_ptr(), x.stride(0), rows, per_token, ids.data_ptr(), weights.data_ptr(),
            out.data_ptr(), self._scratch.data_ptr(),
        )  # fmt: skip
        return out
