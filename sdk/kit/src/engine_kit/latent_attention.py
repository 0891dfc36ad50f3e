"""The latent attention block of a decoder layer, around the paged attention that the runner gives each layer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Linear, Module, Param, RMSNorm, Rotary, RowParallelLinear, Weight
from engine.modeling.parallel import even
from engine.types.parallel import Shard

LATENT_NORM_EPS = 1e-6
"""Of the norms of the latents, whatever `rms_norm_eps` says: the architecture's own code has it so."""


class LatentAttention(Module):
    """Latent attention (DeepSeek-AI, "DeepSeek-V2", 2024): projections to latents and back, attention over latents.

    Keys and values of all heads are made from one latent a token, by W_UK and W_UV (`kv_b_proj`). They are never made
    here: W_UK is multiplied into the queries and W_UV into the result, and attention sees latents alone. The latent's
    projections are whole on every rank, heads are divided.

    Args:
        index: of the model's layer: its cache.
        num_heads: of the whole model.
        q_lora_rank: size of the latent from which queries are made; None: they are made from the hidden state.
        kv_lora_rank: size of the cached latent, C.
        nope_size, rope_size, v_size: of each head: elements of queries and keys without and with rotary positions, and
            of values.
        rotary: shared by the layers, for heads of `rope_size`.
        name: the checkpoint's, e.g. "model.layers.0.self_attn".
        bias: whether the projections to latents and the last one have biases.
        interleaved: the checkpoint's rotary pairs are neighbours (2 i, 2 i + 1). The rows of its projections are put
            into the order that `Ops.rope` turns (i, i + rope_size / 2), once, while they are loaded; scores do not
            depend on the order.
        scale: of scores.
    """

    def __init__(
        self,
        context: ModelContext,
        index: int,
        *,
        hidden_size: int,
        num_heads: int,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        nope_size: int,
        rope_size: int,
        v_size: int,
        rotary: Rotary,
        name: str,
        bias: bool,
        interleaved: bool,
        scale: float,
    ) -> None:
        heads = even(num_heads, context, f"the heads of {name}")
        self._heads = heads.length
        self._split_head = [nope_size, rope_size]
        kv_name, q_name = f"{name}.kv_a_proj_with_mqa", f"{name}.{'q_proj' if q_lora_rank is None else 'q_b_proj'}"
        orders = {
            q_name: _halves(heads.length, nope_size, rope_size),
            kv_name: _halves(1, kv_lora_rank, rope_size),
        }
        kind: dict[str, Any] = {"kind": "linear", "orders": orders if interleaved else {}}
        self.q_norm = None
        kv_width, q_out = kv_lora_rank + rope_size, heads.of_units(nope_size + rope_size)
        self._split_kv = [kv_lora_rank, rope_size]
        self._split_down = [q_lora_rank or 0, kv_width]
        if q_lora_rank is None:
            self.down = Linear(context, hidden_size, [kv_width], [kv_name], bias, **kind)
            q_in = hidden_size
        else:  # both latents are made of the same input, by one matrix
            names = [f"{name}.q_a_proj", kv_name]
            self.down = Linear(context, hidden_size, self._split_down, names, bias, **kind)
            self.q_norm = RMSNorm(context, q_lora_rank, LATENT_NORM_EPS, f"{name}.q_a_layernorm")
            q_in = q_lora_rank
        self.q_up = Linear(context, q_in, [q_out], [q_name], False, **kind)
        self.kv_norm = RMSNorm(context, kv_lora_rank, LATENT_NORM_EPS, f"{name}.kv_a_layernorm")
        self.kv_up = LatentUp(context, heads, kv_lora_rank, nope_size, v_size, f"{name}.kv_b_proj")
        self.rotary = rotary
        assert context.latent_attention is not None, "the description has no layer of kind 'mla'"
        self.attend = context.latent_attention(index, scale)
        self.o = RowParallelLinear(context, num_heads * v_size, hidden_size, f"{name}.o_proj", bias)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], positions int64 [T] -> [T, hidden_size]."""
        q_in, kv = x, self.down(x)
        if self.q_norm is not None:
            q_latent, kv = torch.split(kv, self._split_down, dim=-1)
            q_in = self.q_norm(q_latent)
        q = torch.unflatten(self.q_up(q_in), -1, (self._heads, -1))
        q_nope, q_rope = torch.split(q, self._split_head, dim=-1)
        latent, rope_key = torch.split(kv, self._split_kv, dim=-1)
        latent = self.kv_norm(latent)
        q_rope, rope_key = self.rotary(q_rope, rope_key.unsqueeze(1), positions)
        found = self.attend(self.kv_up.absorb(q_nope), q_rope, latent, rope_key.squeeze(1))
        return self.o(self.kv_up.values(found).flatten(1))


class LatentUp(Weight):
    """W_UK and W_UV of this rank's heads: one tensor of the checkpoint, [heads * (nope_size + v_size), C].

    It is kept as it is, in the model's dtype, and multiplied head by head. Where the checkpoint stores it in a form of
    its own, the form's driver tells once what that stands for.
    """

    def __init__(
        self, context: ModelContext, heads: Shard, latent_size: int, nope_size: int, v_size: int, name: str
    ) -> None:
        rows = heads.of_units(nope_size + v_size)
        super().__init__(context, (rows.total, latent_size), name, ((rows.part,),))
        self._latent_size = latent_size
        self.stored: Linear | None = None
        if context.covers is not None and context.covers(name, "linear"):
            alone = replace(context, adapters=None)
            self.stored = Linear(alone, latent_size, [rows], [name], bias=False, kind="linear")
        self._heads = heads.length
        self._nope_size = nope_size
        self._key: torch.Tensor | None = None
        self._value: torch.Tensor | None = None

    def params(self) -> list[Param]:
        """The weight, or none of its own."""
        return super().params() if self.stored is None else []

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy this rank's heads."""
        super().load(param, tensor)
        self._divide()

    def finish(self) -> None:
        """Take what was stored out of its form."""
        if self.stored is not None:
            ones = torch.eye(self._latent_size, dtype=self._dtype, device=self._device)
            self._weight = self.stored(ones).T.contiguous()
            self.stored = None
            self._divide()

    def _divide(self) -> None:
        by_head = torch.unflatten(self.weight, 0, (self._heads, -1))
        self._key = by_head[:, : self._nope_size].transpose(1, 2)
        self._value = by_head[:, self._nope_size :]

    def absorb(self, q_nope: torch.Tensor) -> torch.Tensor:
        """Queries [T, Hq, nope_size] -> [T, Hq, C]: what they ask of a latent."""
        assert self._key is not None, f"{self.name} is not loaded"
        return self._ops.linear_heads(q_nope, self._key)

    def values(self, latent: torch.Tensor) -> torch.Tensor:
        """Mean latents [T, Hq, C] -> mean values [T, Hq, v_size]."""
        assert self._value is not None, f"{self.name} is not loaded"
        return self._ops.linear_heads(latent, self._value)


def _halves(heads: int, before: int, rope_size: int) -> list[int]:
    """The rows of heads [before + rope_size] with the rotary ones in two halves: all even ones, then all odd ones."""
    turned = [*range(before), *range(before, before + rope_size, 2), *range(before + 1, before + rope_size, 2)]
    width = before + rope_size
    return [head * width + row for head in range(heads) for row in turned]
