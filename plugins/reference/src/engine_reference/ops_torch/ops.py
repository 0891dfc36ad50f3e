"""The reference operations: rows and elements, norms, rotary positions, linear layers, a step's inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F

from engine.interfaces.ops import StepInputs, StepTables
from engine.types.kv import NULL_PAGE
from engine_reference.ops_torch.common import widened
from engine_reference.ops_torch.drawing import Drawing
from engine_reference.ops_torch.logits import Logits

if TYPE_CHECKING:
    from engine.interfaces.context import WorkerContext


class PackedLinear(NamedTuple):
    """What `pack_linear` makes: here the weights as they are, [O, I] and [O]."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class TorchOpsBody(Logits, Drawing):
    """All operations of `engine.interfaces.ops.OPERATIONS`, without state, on whatever device its inputs lie.

    RMS norm: Zhang, Sennrich 2019; layer norm: Ba et al. 2016; rotary embedding: Su et al. 2021.
    """

    def __init__(self, context: WorkerContext) -> None:
        del context

    def embedding(self, ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """ids int [T], weight [V, H] -> [T, H]."""
        return F.embedding(ids, weight)

    def embedding_part(self, ids: torch.Tensor, weight: torch.Tensor, first: int) -> torch.Tensor:
        """ids int [T], weight [V', H] -> [T, H]; zeros for ids outside first .. first + V' - 1."""
        local = ids - first
        outside = (local < 0) | (local >= len(weight))
        return F.embedding(local.masked_fill(outside, 0), weight).masked_fill(outside[:, None], 0)

    def gather_rows(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        """x [T, H], index int [R] -> [R, H]."""
        return x.index_select(0, index)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """a + b, equal shapes."""
        return a + b

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        """x * factor."""
        return x * factor

    def soft_cap(self, x: torch.Tensor, cap: float) -> torch.Tensor:
        """cap * tanh(x / cap)."""
        return (torch.tanh(widened(x) / cap) * cap).to(x.dtype)

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """gate_up [T, 2 * I] -> silu(gate) * up, [T, I]."""
        gate, up = widened(gate_up).chunk(2, dim=-1)
        return (F.silu(gate) * up).to(gate_up.dtype)

    def gelu_mul(self, gate_up: torch.Tensor, tanh: bool) -> torch.Tensor:
        """gate_up [T, 2 * I] -> gelu(gate, tanh) * up, [T, I]."""
        gate, up = widened(gate_up).chunk(2, dim=-1)
        return (F.gelu(gate, approximate="tanh" if tanh else "none") * up).to(gate_up.dtype)

    def gelu(self, x: torch.Tensor, tanh: bool) -> torch.Tensor:
        """x * Phi(x); with `tanh` by its approximation."""
        return F.gelu(widened(x), approximate="tanh" if tanh else "none").to(x.dtype)

    def relu(self, x: torch.Tensor, squared: bool) -> torch.Tensor:
        """max(x, 0); with `squared` its square."""
        return F.relu(widened(x)).square().to(x.dtype) if squared else F.relu(x)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """x [..., H] / sqrt(mean(x^2) + eps) * weight [H]."""
        wide = widened(x)
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        # Rounded before the weight is applied, as transformers does: float32 and float64 do not notice.
        return normed.to(x.dtype) * weight

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual)."""
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
        """(x - mean) / sqrt(variance + eps) * weight + bias; x [..., H], weight and bias [H]."""
        wide = widened(x)
        return F.layer_norm(wide, weight.shape, weight.to(wide.dtype), bias.to(wide.dtype), eps).to(x.dtype)

    def rope(
        self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first `rotary_dim` elements of each head, in two halves (GPT-NeoX's form).

        q [T, Hq, D], k [T, Hkv, D], positions int64 [T], cos_sin [max_position, rotary_dim].
        """
        cos, sin = cos_sin.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return _rotate(q, cos, sin), _rotate(k, cos, sin)

    def qk_norm_rope(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor,
        k_weight: torch.Tensor,
        eps: float,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`rms_norm` of each head, then `rope`. q [T, Hq, D], k [T, Hkv, D], q_weight, k_weight [D]."""
        return self.rope(self.rms_norm(q, q_weight, eps), self.rms_norm(k, k_weight, eps), positions, cos_sin)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """weight [O, I], bias [O] -> what `linear` takes. The tensors are kept, not copied."""
        return PackedLinear(weight, bias)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """x [T, I] -> [T, O]."""
        return F.linear(x, packed.weight, packed.bias)

    def linear_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x [T, H, I], weight [H, O, I] -> [T, H, O]: out[t, h] = weight[h] @ x[t, h]."""
        out = torch.empty((*x.shape[:2], weight.shape[1]), dtype=x.dtype, device=x.device)
        torch.bmm(x.transpose(0, 1), weight.transpose(1, 2), out=out.transpose(0, 1))
        return out

    def prepare_inputs(self, tables: StepTables, inputs: StepInputs) -> None:
        """Fill `token_ids`, `positions`, `block_tables` and `slot_mappings` from the tables, in place.

        Where R is T every row has one token. Tokens at or past query_start_loc[R] are padding, rows may have none.
        """
        num_rows, num_tokens = len(inputs.slot_of_row), len(inputs.token_ids)
        # Tables are as wide as the longest request may be. Elsewhere than on the CPU asking would wait for the device.
        longest = int(inputs.seq_lens.max()) if inputs.seq_lens.device.type == "cpu" else None
        for table, out, size in zip(tables.blocks, inputs.block_tables, tables.tokens_per_block, strict=True):
            width = table.shape[1] if longest is None else -(-longest // size)
            torch.index_select(table[:, :width], 0, inputs.slot_of_row, out=out[:, :width])
        if num_rows == num_tokens:  # so each row has exactly one token, and none is padding
            inputs.positions.copy_(inputs.num_computed)
            row: torch.Tensor | None = None
            padding: torch.Tensor | None = None
            slot = inputs.slot_of_row
        else:
            token = torch.arange(num_tokens, device=inputs.slot_of_row.device, dtype=torch.int32)
            row = torch.searchsorted(inputs.query_start_loc[1:], token, right=True)
            padding = row == num_rows
            row.clamp_(max=num_rows - 1)
            start = inputs.num_computed - inputs.query_start_loc[:-1]
            inputs.positions.copy_((start[row] + token).masked_fill_(padding, 0))
            slot = inputs.slot_of_row[row]
        place = torch.add(inputs.positions, slot, alpha=tables.tokens.shape[1])
        torch.index_select(tables.tokens.view(-1), 0, place, out=inputs.token_ids)
        if padding is not None:
            inputs.token_ids.masked_fill_(padding, 0)
        for block_table, slot_mapping, tokens_per_block in zip(
            inputs.block_tables, inputs.slot_mappings, tables.tokens_per_block, strict=True
        ):
            block = torch.div(inputs.positions, tokens_per_block, rounding_mode="floor")
            if row is None:
                page = block_table.gather(1, block.unsqueeze(1)).squeeze(1)
            else:
                page = block_table[row, block]
            # page * tokens_per_block + (position - block * tokens_per_block), in int64
            torch.add(inputs.positions, page.long() - block, alpha=tokens_per_block, out=slot_mapping)
            if padding is not None:
                slot_mapping.masked_fill_(padding, NULL_PAGE * tokens_per_block)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    wide = widened(x)
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], x[..., 2 * half :]
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)
    return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated
