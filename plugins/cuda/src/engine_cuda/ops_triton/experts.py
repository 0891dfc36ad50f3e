"""Mixtures of experts: what a layer's experts compute of the tokens that chose them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, NamedTuple

import torch
import triton

from engine_cuda.dependents import MayDepend
from engine_cuda.ops_triton.expert_kernels import (
    combine_kernel,
    few_first_kernel,
    few_last_kernel,
    first_kernel,
    gated_act_kernel,
    last_kernel,
    place_kernel,
    row_gate_kernel,
    sort_kernel,
)
from engine_cuda.ops_triton.launching import power_of_2

if TYPE_CHECKING:
    from engine_kit.routing import ExpertAct

BLOCK = 1024
"""Elements of a program of what is computed one by one."""
PLACED = 256
"""Pairs whose places a program looks up."""
SORTED = 4096
"""Pairs that a program of the sort looks at together, at most."""
FEW = 4
"""So many times the pairs of a step are at most the experts where each pair is computed by itself: two of them hardly
ever have an expert in common. One token's always are."""
ELEMENTS = 4096
"""Of matrices that a program of few pairs reads at once: four pieces of 16 bytes a thread, of two bytes each."""
GROUP = 8
"""Blocks of rows that go through the matrix together."""


class PackedExperts(NamedTuple):
    """A layer's experts, dense: first [E, 2 * I, H] or [E, I, H], last [E, H, I], and their biases or None."""

    first: torch.Tensor
    last: torch.Tensor
    first_bias: torch.Tensor | None
    last_bias: torch.Tensor | None

    def tensors(self, place: int) -> list[torch.Tensor]:
        """See `engine_kit.routing.TellsTensors`."""
        return [tensor[place] for tensor in self if tensor is not None]


class Tile(NamedTuple):
    """What a program multiplies: `rows` by `outputs` (of the second projection; of the first half as many gates and
    what they gate), `width` inputs at a time."""

    rows: int
    outputs: int
    width: int
    warps: int
    stages: int


def tile_of(pairs: int, experts: int, itemsize: int, roomy: bool) -> Tile:
    """By the rows that an expert has on average: hardly more than they are, so that a program does not multiply what
    is not there, and as many as its tensor cores can use.

    roomy: see `is_roomy`.
    """
    rows = pairs / experts
    if itemsize > 2:  # float32 numbers are multiplied one by one, and take twice the room
        return Tile(16, 32, 32, 4, 2) if rows <= 8 else Tile(32, 64, 32, 4, 2)
    if rows <= 8:
        return Tile(16, 128, 128, 4, 4) if roomy else Tile(16, 64, 64, 4, 3)
    if rows <= 24:
        return Tile(32, 128, 128, 4, 4) if roomy else Tile(32, 64, 64, 4, 3)
    if rows <= 48:
        return Tile(64, 128, 64, 4, 4) if roomy else Tile(64, 128, 32, 4, 3)
    return Tile(128, 256, 64, 8, 4) if roomy else Tile(128, 128, 32, 8, 3)


@functools.cache
def is_roomy(device: torch.device) -> bool:
    """Whether a program has 227 KB of shared memory, and tensor cores that read it (Hopper, Blackwell); others have 64
    KB at least."""
    if device.type != "cuda":
        return True  # nothing but memory of the host limits the interpreter
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] in (9, 10)


class Experts(MayDepend):
    """The operations `pack_experts`, `experts`, `gated_act` and `moe_gate`, which engine-moe defines."""

    def pack_experts(
        self,
        first: torch.Tensor,
        last: torch.Tensor,
        first_bias: torch.Tensor | None,
        last_bias: torch.Tensor | None,
    ) -> PackedExperts:
        """first [E, 2 * I, H] or [E, I, H], last [E, H, I] and their biases. Dense tensors are kept, not copied."""
        biases = [None if bias is None else bias.contiguous() for bias in (first_bias, last_bias)]
        return PackedExperts(first.contiguous(), last.contiguous(), *biases)

    def experts(
        self, x: torch.Tensor, packed: PackedExperts, ids: torch.Tensor, weights: torch.Tensor, act: ExpertAct
    ) -> torch.Tensor:
        """x [T, H], ids int32 [T, k] of experts that there are, or their number, weights float32 [T, k] -> [T, H]."""
        tokens, outputs = len(x), packed.last.shape[1]
        out = x.new_empty(tokens, outputs)
        if not out.numel():
            return out
        x = x if x.stride(1) == 1 else x.contiguous()
        ids, weights = ids.contiguous(), weights.contiguous()
        experts = len(packed.first)
        if tokens == 1 or FEW * ids.numel() <= experts:
            self._few(x, packed, ids, weights, act, out)
        else:
            self._many(x, packed, ids, weights, act, out)
        return out

    def place_experts(self, ids: torch.Tensor, table: torch.Tensor, first: int, load: torch.Tensor) -> torch.Tensor:
        """ids int32 [T, k], table int32 [E, R], load int64 [n] -> int32 [T, k]."""
        ids = ids.contiguous()
        out, (per_token, replicas) = torch.empty_like(ids), (ids.shape[1], table.shape[1])
        if out.numel():
            place_kernel[(triton.cdiv(ids.numel(), PLACED),)](
                ids, table, load, out, first, ids.numel(), len(load), per_token, replicas, PLACED,
                bool(self.dependent), **self.dependent,
            )  # fmt: skip
        return out

    def gated_act(self, x: torch.Tensor, act: ExpertAct) -> torch.Tensor:
        """x [T, 2 * I] -> act(gate) * up, [T, I]; x [T, I] -> act(x) where `act` has no gates."""
        x = x if x.stride(1) == 1 else x.contiguous()
        tokens, inner = x.shape[0], x.shape[1] // (2 if act.gated else 1)
        out = x.new_empty(tokens, inner)
        if out.numel():
            gated_act_kernel[(tokens, triton.cdiv(inner, BLOCK))](
                x, out, x.stride(0), inner, act.alpha, act.limit, act.kind, act.gated, BLOCK,
                bool(self.dependent), **self.dependent,
            )  # fmt: skip
        return out

    def moe_gate(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x [T, H] * sigmoid(gate [T, 1])."""
        x = x if x.stride(1) == 1 else x.contiguous()
        out = x.new_empty(x.shape)
        if out.numel():
            tokens, width = x.shape
            row_gate_kernel[(tokens, triton.cdiv(width, BLOCK))](
                x, gate, out, x.stride(0), gate.stride(0), width, BLOCK, bool(self.dependent), **self.dependent
            )
        return out

    def _few(
        self,
        x: torch.Tensor,
        packed: PackedExperts,
        ids: torch.Tensor,
        weights: torch.Tensor,
        act: ExpertAct,
        out: torch.Tensor,
    ) -> None:
        """Each pair by itself."""
        (tokens, per_token), (_, outputs, inner), inputs = ids.shape, packed.last.shape, x.shape[1]
        between = x.new_empty(ids.numel(), inner)
        block, width = few_first_blocks(inputs, act.gated)
        few_first_kernel[(triton.cdiv(inner, block), ids.numel())](
            x, packed.first, packed.first_bias, ids, between, x.stride(0), inner, len(packed.first), act.alpha,
            act.limit, per_token, inputs, act.kind, act.gated, block, width, bool(self.dependent), **self.dependent,
        )  # fmt: skip
        padded = power_of_2(per_token)
        block, width = few_last_blocks(inner, padded)
        few_last_kernel[(triton.cdiv(outputs, block), tokens)](
            between, packed.last, packed.last_bias, ids, weights, out, outputs, len(packed.last), per_token, padded,
            inner, block, width,
            bool(self.dependent), **self.dependent,
        )  # fmt: skip

    def _many(
        self,
        x: torch.Tensor,
        packed: PackedExperts,
        ids: torch.Tensor,
        weights: torch.Tensor,
        act: ExpertAct,
        out: torch.Tensor,
    ) -> None:
        """Sorted by expert."""
        (tokens, per_token), (experts, outputs, inner) = ids.shape, packed.last.shape
        inputs, pairs = x.shape[1], ids.numel()
        order, starts = ids.new_empty(pairs), ids.new_empty(experts + 1)
        sort_kernel[(experts + 1,)](
            ids, order, starts, pairs, min(SORTED, max(16, power_of_2(pairs))), bool(self.dependent), num_warps=8,
            **self.dependent,
        )  # fmt: skip
        tile = tile_of(pairs, experts, x.element_size(), is_roomy(x.device))
        blocks = most_blocks(pairs, experts, tile.rows)
        half = tile.outputs // (2 if act.gated else 1)
        between, terms = x.new_empty(pairs, inner), x.new_empty(pairs, outputs)
        first_kernel[(blocks * triton.cdiv(inner, half),)](
            x, packed.first, packed.first_bias, order, starts, between, x.stride(0), blocks, act.alpha,
            act.limit, per_token, experts, power_of_2(experts), inputs, inner, act.kind, act.gated, tile.rows, half,
            tile.width, GROUP, bool(self.dependent), num_warps=tile.warps, num_stages=tile.stages, **self.dependent,
        )  # fmt: skip
        last_kernel[(blocks * triton.cdiv(outputs, tile.outputs),)](
            between, packed.last, packed.last_bias, order, starts, terms, blocks, experts, power_of_2(experts),
            inner, outputs, tile.rows, tile.outputs, tile.width, GROUP, bool(self.dependent),
            num_warps=tile.warps, num_stages=tile.stages, **self.dependent,
        )  # fmt: skip
        combine_kernel[(tokens, triton.cdiv(outputs, BLOCK))](
            terms, weights, ids, out, outputs, experts, per_token, BLOCK, bool(self.dependent), **self.dependent
        )


def few_first_blocks(inputs: int, gated: bool) -> tuple[int, int]:
    """(outputs of a program, inputs that it takes at a time)."""
    width = min(512, max(16, power_of_2(inputs)))
    return ELEMENTS // 512 // (2 if gated else 1), width


def few_last_blocks(inner: int, padded: int) -> tuple[int, int]:
    """(outputs of a program, inputs of each expert that it takes at a time): whole warps' reads of one row."""
    width = min(256, max(16, power_of_2(inner)))
    return max(1, min(8, ELEMENTS // 256 // padded)), width


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """Blocks of at most so many rows, of one expert each, that so many pairs can fill, whoever has how many."""
    some = min(experts, pairs)
    return (pairs + some * (rows - 1)) // rows
