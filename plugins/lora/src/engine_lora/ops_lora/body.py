"""The operations of LoRA adapters, on plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext

Pair = tuple[torch.Tensor, torch.Tensor]
"""A [r, I] and B [O, r] of a layer's part, scaled, as this rank has them."""


class Memory(NamedTuple):
    """A layer's places, whose memory is taken at once.

    Args:
        outputs: of each part, which follow one another.
        a: [places, parts, max_rank, I]; b: [places, O, max_rank]. Of an adapter the first ranks are its own.
        ranks: of the parts of what lies in each place, from 1; () where nothing does.
    """

    outputs: tuple[int, ...]
    a: torch.Tensor
    b: torch.Tensor
    ranks: list[tuple[int, ...]]


class LoRAOpsBody:
    """Without state, on whatever device the inputs lie. `lora_add` waits for the device: it needs the numbers of tokens
    that adapters have."""

    def __init__(self, context: WorkerContext) -> None:
        self._device = context.device

    def lora_memory(
        self, inputs: int, outputs: Sequence[int], places: int, max_rank: int, dtype: torch.dtype
    ) -> Memory:
        """Room for so many adapters of one layer of so many inputs, whose parts (query, key, value; gate, up) have
        `outputs`: what the other operations of this driver take. Its address stays: steps may be captured on it.

        max_rank: of an adapter. dtype: of the layer's inputs and outputs.
        """
        a = torch.zeros(places, len(outputs), max_rank, inputs, dtype=dtype, device=self._device)
        b = torch.zeros(places, sum(outputs), max_rank, dtype=dtype, device=self._device)
        return Memory(tuple(outputs), a, b, [()] * (places + 1))

    def lora_pack(self, memory: Memory, parts: Sequence[Pair | None]) -> tuple[Pair | None, ...]:
        """One adapter's matrices of the layer, A [r, I] and B [O, r] of each part (None: it leaves the part as it is),
        on the host, in any dtype -> what `lora_place` takes. May run beside steps, in a thread of its own; nothing of
        what is given is kept."""
        dtype = memory.a.dtype
        return tuple(pair and (pair[0].to(dtype, copy=True), pair[1].to(dtype, copy=True)) for pair in parts)

    def lora_place(self, memory: Memory, place: int, packed: tuple[Pair | None, ...] | None) -> None:
        """Put an adapter into a place, from 1, whatever was there; None: nothing is there. In order with the steps that
        are launched before and after."""
        memory.ranks[place] = () if packed is None else tuple(0 if pair is None else len(pair[0]) for pair in packed)
        column = 0
        for part, (pair, size) in enumerate(zip(packed or (), memory.outputs, strict=False)):
            if pair is not None:
                a, b = pair
                memory.a[place - 1, part, : len(a)] = a
                memory.b[place - 1, column : column + size, : len(a)] = b
            column += size

    def lora_add(
        self, x: torch.Tensor, y: torch.Tensor, memory: Memory, tokens: torch.Tensor, starts: torch.Tensor
    ) -> torch.Tensor:
        """y[t] + B[a] A[a] x[t], part by part, for the tokens t of each adapter a; others stay as they are.

        x [T, I], y [T, O], which may be written into. tokens int32 [n], starts int32 [places + 1], both read when the
        step runs: the tokens of place p are tokens[starts[p - 1]] .. tokens[starts[p] - 1], none twice. A x may be
        rounded to x's dtype, as B A x is before it is added.
        """
        begin = 0
        for place, end in enumerate(starts.tolist()):
            ranks = memory.ranks[place] if place else ()
            if ranks and begin < end:
                mine = tokens[begin:end].long()
                rows, column = x[mine], 0
                for part, (rank, size) in enumerate(zip(ranks, memory.outputs, strict=True)):
                    if rank:
                        inner = F.linear(rows, memory.a[place - 1, part, :rank])
                        b = memory.b[place - 1, column : column + size, :rank]
                        y[mine, column : column + size] += F.linear(inner, b)
                    column += size
            begin = end
        return y
