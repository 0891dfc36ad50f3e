"""The attention block of a decoder layer, around the paged attention that the runner gives each layer."""

from __future__ import annotations

import torch

from engine.interfaces.model import ModelContext
from engine.modeling.linear import QKVLinear, RowParallelLinear
from engine.modeling.module import Module
from engine.modeling.norm import RMSNorm
from engine.modeling.rotary import Rotary


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
