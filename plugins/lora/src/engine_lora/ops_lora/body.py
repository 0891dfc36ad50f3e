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
    """A layer's places.

    Args:
        outputs: of each part, which follow one another.
        dtype: of the matrices.
        places: what lies in each place, from 1; None where nothing does.
    """

    outputs: tuple[int, ...]
    dtype: torch.dtype
    places: list[tuple[Pair | None, ...] | None]


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
        return Memory(tuple(outputs), dtype, [None] * (places + 1))

    def lora_pack(self, memory: Memory, parts: Sequence[Pair | None]) -> tuple[Pair | None, ...]:
        """One adapter's matrices of the layer, A [r, I] and B [O, r] of each part (None: it leaves the part as it is),
        on the host, in any dtype -> what `lora_place` takes. May run beside steps, in a thread of its own; nothing of
        what is given is kept."""
        return tuple(pair and _moved(pair, memory.dtype, copy=True) for pair in parts)

    def lora_place(self, memory: Memory, place: int, packed: tuple[Pair | None, ...] | None) -> None:
        """Put an adapter into a place, from 1, whatever was there; None: nothing is there. In order with the steps that
        are launched before and after."""
        memory.places[place] = packed and tuple(pair and _moved(pair, self._device) for pair in packed)

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
            packed = memory.places[place] if place else None
            if packed is not None and begin < end:
                mine = tokens[begin:end].long()
                rows, column = x[mine], 0
                for pair, size in zip(packed, memory.outputs, strict=True):
                    if pair is not None:
                        a, b = pair
                        y[mine, column : column + size] += F.linear(F.linear(rows, a), b)
                    column += size
            begin = end
        return y


def _moved(pair: Pair, *to: object, copy: bool = False) -> Pair:
    a, b = (matrix.to(*to, copy=copy) for matrix in pair)  # type: ignore[call-overload]
    return a, b
