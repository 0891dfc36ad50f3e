"""The attention blocks of a decoder layer, around the paged attention that the runner gives each layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.layers import RMSNorm
from engine.modeling.linear import Linear, QKVLinear, RowParallelLinear
from engine.modeling.module import Module, Param
from engine.modeling.parallel import Shard, even
from engine.modeling.rotary import Rotary

LATENT_NORM_EPS = 1e-6
"""Of the norms of the latents, whatever `rms_norm_eps` says: the architecture's own code has it so."""


class Attention(Module):
    """Projections, norms of queries and keys where the model has them, rotary positions, attention, projection.

    Args:
        index: of the model's layer: its cache.
        num_q_heads, num_kv_heads: of the whole model.
        rotary: shared by the layers.
        name: the checkpoint's, e.g. "model.layers.0.self_attn".
        qkv_bias, o_bias: whether the projections have biases.
        qk_norm_eps: each head of queries and keys is normed with this eps; None for no norms.
        scale: of scores; None for head_size ** -0.5.
    """

    def __init__(
        self,
        context: ModelContext,
        index: int,
        *,
        hidden_size: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_size: int,
        rotary: Rotary,
        name: str,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        scale: float | None = None,
    ) -> None:
        self.qkv = QKVLinear(context, hidden_size, num_q_heads, num_kv_heads, head_size, name, qkv_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:
            self.q_norm = RMSNorm(context, head_size, qk_norm_eps, f"{name}.q_norm")
            self.k_norm = RMSNorm(context, head_size, qk_norm_eps, f"{name}.k_norm")
        self.rotary = rotary
        self.attend = context.attention(index, head_size**-0.5 if scale is None else scale)
        self.o = RowParallelLinear(context, num_q_heads * head_size, hidden_size, f"{name}.o_proj", o_bias)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size], positions int64 [T] -> [T, hidden_size]."""
        q, k, v = self.qkv(x)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.rotary.normed(q, k, self.q_norm, self.k_norm, positions)
        else:
            q, k = self.rotary(q, k, positions)
        return self.o(self.attend(q, k, v))


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
        q_rows = _halves(heads.length, nope_size, rope_size) if interleaved else None
        kv_rows = _halves(1, kv_lora_rank, rope_size) if interleaved else None
        kv_name = f"{name}.kv_a_proj_with_mqa"
        self.q_norm = None
        kv_width, q_out = kv_lora_rank + rope_size, heads.of_units(nope_size + rope_size)
        self._split_kv = [kv_lora_rank, rope_size]
        self._split_down = [q_lora_rank or 0, kv_width]
        if q_lora_rank is None:
            self.down = _Projection(context, hidden_size, [kv_width], [kv_name], bias, {kv_name: kv_rows})
            q_in, q_name = hidden_size, f"{name}.q_proj"
        else:  # both latents are made of the same input, by one matrix
            names = [f"{name}.q_a_proj", kv_name]
            self.down = _Projection(context, hidden_size, self._split_down, names, bias, {kv_name: kv_rows})
            self.q_norm = RMSNorm(context, q_lora_rank, LATENT_NORM_EPS, f"{name}.q_a_layernorm")
            q_in, q_name = q_lora_rank, f"{name}.q_b_proj"
        self.q_up = _Projection(context, q_in, [q_out], [q_name], False, {q_name: q_rows})
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
        q = self.q_up(q_in).unflatten(-1, (self._heads, -1))
        q_nope, q_rope = torch.split(q, self._split_head, dim=-1)
        latent, rope_key = torch.split(kv, self._split_kv, dim=-1)
        latent = self.kv_norm(latent)
        q_rope, rope_key = self.rotary(q_rope, rope_key.unsqueeze(1), positions)
        found = self.attend(self.kv_up.absorb(q_nope), q_rope, latent, rope_key.squeeze(1))
        return self.o(self.kv_up.values(found).flatten(1))


class LatentUp(Module):
    """W_UK and W_UV of this rank's heads: one tensor of the checkpoint, [heads * (nope_size + v_size), C].

    It is kept as it is, in the model's dtype, and multiplied head by head.
    """

    def __init__(
        self, context: ModelContext, heads: Shard, latent_size: int, nope_size: int, v_size: int, name: str
    ) -> None:
        self._ops = context.ops
        self.name = name
        self._heads = heads
        self._latent_size = latent_size
        self._nope_size = nope_size
        self._width = nope_size + v_size
        self._dtype = context.dtype
        self._device = context.device
        self._key: torch.Tensor | None = None
        self._value: torch.Tensor | None = None

    def params(self) -> list[Param]:
        """`<name>.weight`."""
        rows = self._heads.of_units(self._width)
        return [Param(f"{self.name}.weight", (rows.total, self._latent_size), self, pieces=((rows.part,),))]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy this rank's heads, cast to the model's dtype."""
        weight = torch.empty(param.local_shape, dtype=self._dtype, device=self._device)
        weight.copy_(tensor)
        by_head = weight.view(self._heads.length, self._width, self._latent_size)
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


class _Projection(Linear):
    """A linear layer that takes the rows of some of its parts in another order.

    Args:
        orders: by part's name, which of its rows (of this rank) comes at each place; None leaves them.
    """

    kind = "linear"

    def __init__(
        self,
        context: ModelContext,
        in_size: int,
        out_sizes: Sequence[int | Shard],
        names: Sequence[str],
        bias: bool,
        orders: Mapping[str, list[int] | None],
    ) -> None:
        super().__init__(context, in_size, out_sizes, names, bias)
        self._orders = orders

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """As `Linear.load`."""
        order = self._orders.get(param.name.removesuffix(".weight").removesuffix(".bias"))
        super().load(param, tensor if order is None else tensor[order])


def _halves(heads: int, before: int, rope_size: int) -> list[int]:
    """The rows of heads [before + rope_size] with the rotary ones in two halves: all even ones, then all odd ones."""
    turned = [*range(before), *range(before, before + rope_size, 2), *range(before + 1, before + rope_size, 2)]
    width = before + rope_size
    return [head * width + row for head in range(heads) for row in turned]
