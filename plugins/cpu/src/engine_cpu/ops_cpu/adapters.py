"""The operations of adapters, as engine-lora defines them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine_cpu._native import LoraOps
from engine_cpu.dtypes import DTYPES
from engine_cpu.packed import Packed, PackedLinear

Pair = tuple[torch.Tensor, torch.Tensor]
"""A [r, I] and B [O, r] of a part."""


class PackedAdapter(NamedTuple):
    """One adapter's matrices of a layer: the tensors, and what stands of them in the layer's table."""

    kept: tuple[Packed, ...]
    row: torch.Tensor


@dataclass(frozen=True, slots=True)
class AdapterMemory:
    """A layer's places.

    Args:
        inputs, outputs: of the layer, and of each of its parts.
        form: of matrices, "float32" or "bfloat16".
        most_rank: of all parts together.
        sizes: int64 [parts]; `outputs` as the kernel reads them.
        table: int64 [places + 1, 2 + 3 * parts]; see native/lora.h.
        places: what lies in each, from 1.
    """

    inputs: int
    outputs: tuple[int, ...]
    form: str
    most_rank: int
    sizes: torch.Tensor
    table: torch.Tensor
    places: list[PackedAdapter | None]


class Adapters:
    """Matrices of the layer's dtype, packed as those of linear layers."""

    _adapters: LoraOps
    _linear: PackedLinear
    _inner: torch.Tensor
    _outgrown: list[torch.Tensor]

    def lora_memory(
        self, inputs: int, outputs: Sequence[int], places: int, max_rank: int, dtype: torch.dtype
    ) -> AdapterMemory:
        """Room for so many adapters; they take memory when they are packed."""
        table = torch.zeros(places + 1, 2 + 3 * len(outputs), dtype=torch.int64)
        form, most = str(dtype).removeprefix("torch."), max_rank * len(outputs)
        sizes = torch.tensor(outputs, dtype=torch.int64)
        return AdapterMemory(inputs, tuple(outputs), form, most, sizes, table, [None] * (places + 1))

    def lora_pack(self, memory: AdapterMemory, parts: Sequence[Pair | None]) -> PackedAdapter:
        """A of all parts as one matrix, B of each."""
        dtype, row = getattr(torch, memory.form), torch.zeros(memory.table.shape[1], dtype=torch.int64)
        kept: list[Packed] = []
        there = [pair for pair in parts if pair is not None]
        if there:
            whole = torch.cat([a for a, _ in there]).to(dtype)
            kept.append(self._linear.pack(memory.form, whole, None, lasting=False))
            row[0], row[1] = kept[0].weight.data_ptr(), kept[0].outputs
        offset = 0
        for index, pair in enumerate(parts):
            if pair is not None:
                kept.append(self._linear.pack(memory.form, pair[1].to(dtype), None, lasting=False))
                rank = pair[0].shape[0]
                row[2 + 3 * index : 5 + 3 * index] = torch.tensor([kept[-1].weight.data_ptr(), rank, offset])
                offset += rank
        return PackedAdapter(tuple(kept), row)

    def lora_place(self, memory: AdapterMemory, place: int, packed: PackedAdapter | None) -> None:
        """Put an adapter into a place, or None."""
        memory.table[place] = 0 if packed is None else packed.row
        memory.places[place] = packed

    def lora_add(
        self, x: torch.Tensor, y: torch.Tensor, memory: AdapterMemory, tokens: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """x [T, I], y [T, O], which is written into."""
        if not len(x):
            return y
        if x.stride(-1) != 1:
            x = x.contiguous()
        size = len(x) * memory.most_rank * x.itemsize
        if size > self._inner.nbytes:
            self._outgrown.append(self._inner)  # whose address was recorded, perhaps
            self._inner = torch.empty(2 * size, dtype=torch.uint8)
        self._adapters.add(
            DTYPES[x.dtype], x.data_ptr(), x.stride(0), memory.inputs, y.data_ptr(), y.stride(0),
            memory.table.data_ptr(), memory.sizes.data_ptr(), len(memory.places) - 1, len(memory.outputs),
            tokens.data_ptr(), starts.data_ptr(), self._inner.data_ptr(), memory.most_rank,
        )  # fmt: skip
        return y
