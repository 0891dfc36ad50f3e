"""The layers of a decoder: norms, the vocabulary's two ends, the feed-forward and attention blocks.

Over several ranks each holds some rows of the vocabulary: an id's vector comes from the one that has it (the others
give zeros, and the sum goes round), and logits are gathered on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol, cast

import torch

from engine.interfaces.attention import Rotation
from engine.interfaces.model import ModelContext
from engine.interfaces.quantization import EMBEDDING, LayerShape, stored_form
from engine.modeling.linear import Linear, MergedColumnLinear, QKVLinear, RowParallelLinear
from engine.modeling.module import Module, Param
from engine.modeling.parallel import group_of, vocabulary
from engine.types.parallel import Shard


class Weight(Module):
    """Base of what has one plain weight, `<name>.weight`, which is kept in the model's dtype.

    Args:
        shape: in the checkpoint.
        name: the checkpoint's, without ".weight".
        pieces: what this rank keeps of it, see `Param`.
    """

    def __init__(
        self, context: ModelContext, shape: tuple[int, ...], name: str, pieces: tuple[tuple[slice, ...], ...] = ()
    ) -> None:
        self._ops = context.ops
        self.name = name
        self._shape = shape
        self._pieces = pieces
        self._dtype = context.dtype
        self._device = context.device
        self._weight: torch.Tensor | None = None

    @property
    def weight(self) -> torch.Tensor:
        """What this rank keeps, once it is loaded."""
        assert self._weight is not None, f"{self.name} is not loaded"
        return self._weight

    def params(self) -> list[Param]:
        """The weight."""
        return [Param(f"{self.name}.weight", self._shape, self, pieces=self._pieces)]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy it."""
        self._weight = torch.empty(param.local_shape, dtype=self._dtype, device=self._device)
        self._weight.copy_(tensor)


class Norm(Protocol):
    """What is done to hidden states before a block, behind it, or at the end."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual), as `RMSNorm.add`."""


class RMSNorm(Weight):
    """x / sqrt(mean(x^2) + eps) * weight, over the last dimension (Zhang, Sennrich 2019).

    Args:
        size: of the last dimension: hidden_size, or head_size where each head is normed alone.
        eps: added to the mean.
        name: the checkpoint's, without ".weight".
    """

    def __init__(self, context: ModelContext, size: int, eps: float, name: str) -> None:
        super().__init__(context, (size,), name)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., size] -> the same shape."""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual) for x, residual [T, size]; without a residual, (norm(x), x).

        The inputs are used up: the ops driver may write into their memory.
        """
        if residual is None:
            return self._ops.rms_norm(x, self.weight, self.eps), x
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)


class Embedding(Linear):
    """token ids [T] -> [T, hidden_size]: rows of its matrix, looked up as it is packed.

    Args:
        name: the checkpoint's, e.g. "model.embed_tokens".
    """

    kind = EMBEDDING

    def __init__(self, context: ModelContext, vocab_size: int, hidden_size: int, name: str) -> None:
        self.name = name
        self._ops = context.ops
        self._group = group_of(context)
        rows = vocabulary(vocab_size, context.tp_size)[context.tp_rank]
        self._first = None if self._group is None else rows.start
        adapted = LayerShape((name,), EMBEDDING, rows, (Shard.of(hidden_size),), bias=False)
        super().__init__(context, hidden_size, [rows], [name], bias=False, adapted=adapted)

    @property
    def weight(self) -> torch.Tensor | None:
        """What this rank keeps; None where it is not plain, and before it is loaded."""
        return None if self._quantization is not None else self._packed

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int [T] -> [T, hidden_size]."""
        y: torch.Tensor = cast(Any, self._form).embedding(ids, self._packed, self._first)
        y = y if self._adapter is None else self._adapter.add(ids, y)
        return y if self._group is None else self._group.all_reduce(y)


class LMHead(Module):
    """hidden [R, hidden_size] -> logits [R, vocab_size], on every rank.

    Args:
        name: the checkpoint's, e.g. "lm_head".
        tied: the embedding whose matrix it shares; None where it has its own. A tied model's file may hold a copy
            under `name`, which is passed over.
    """

    def __init__(
        self,
        context: ModelContext,
        vocab_size: int,
        hidden_size: int,
        name: str,
        tied: Embedding | None = None,
        bias: bool = False,
    ) -> None:
        self.name = name
        self._group = group_of(context)
        shards = vocabulary(vocab_size, context.tp_size)
        self._sizes = tuple(shard.length for shard in shards)
        own = shards[context.tp_rank]
        if tied is None:
            self.linear = Linear(context, hidden_size, [own], [name], bias, kind="head")
        else:
            self.linear = _TiedLinear(context, hidden_size, own, name, tied)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        logits = self.linear(hidden)
        return logits if self._group is None else self._group.all_gather(logits, 1, self._sizes)


class _TiedLinear(Linear):
    """A head with an embedding's matrix: packed once more where the embedding keeps it plain, else its own."""

    def __init__(self, context: ModelContext, in_size: int, out_size: Shard, name: str, tied: Embedding) -> None:
        # Whatever the checkpoint stores in another form, a plain embedding's matrix is plain.
        plain = context if stored_form(context.description.config) is None else replace(context, quantization={})
        super().__init__(plain, in_size, [out_size], [name], bias=False, kind="head")
        self._tied = tied

    def params(self) -> list[Param]:
        """None of its own."""
        return []

    def tolerated(self) -> frozenset[str]:
        """The copy in a tied model's file."""
        return frozenset({f"{self.shape.names[0]}.weight"})

    def finish(self) -> None:
        """Pack the shared matrix, or take it as the embedding's driver packed it."""
        tied = self._tied
        if tied.weight is None:
            self._quantization = None  # its bytes are the embedding's
            self._form = tied._form
            self._linear = tied._linear
            self._packed = tied._packed
        else:
            self._packed = self._form.pack(self.shape, {"weight": tied.weight})

    def num_elements(self) -> int:
        """None of its own."""
        return 0


class Rotary:
    """Rotates queries and keys (Su et al. 2021). One for all layers that share its parameters.

    Args:
        cos_sin: float32 or float64 [positions, rotary_dim]; the cosines of each position's angles, then their sines, as
            `engine_kit.rotary` makes them.
    """

    def __init__(self, context: ModelContext, cos_sin: torch.Tensor) -> None:
        self._ops = context.ops
        self.cos_sin = cos_sin.to(context.device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [T, Hq, D], k [T, Hkv, D], positions int64 [T] -> the same, rotated."""
        return self._ops.rope(q, k, positions, self.cos_sin)

    def normed(
        self, q: torch.Tensor, k: torch.Tensor, q_norm: RMSNorm, k_norm: RMSNorm, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same, of queries and keys whose heads are normed first; both norms have one eps."""
        return self._ops.qk_norm_rope(q, k, q_norm.weight, k_norm.weight, q_norm.eps, positions, self.cos_sin)

    def rotation(self, positions: torch.Tensor, norms: Sequence[RMSNorm] = ()) -> Rotation:
        """The same for attention that rotates by itself; of several norms `eps` is one."""
        return Rotation(positions, self.cos_sin, tuple(norm.weight for norm in norms), norms[0].eps if norms else 0.0)


class GatedMLP(Module):
    """down(act(gate(x)) * up(x)) (SwiGLU and GEGLU, Shazeer 2020).

    Args:
        name: the checkpoint's, e.g. "model.layers.0.mlp".
        bias: whether all three projections have one.
        act: "gelu_tanh" is gelu's approximation by tanh. With gelu the model's card names the operation "gelu_mul".
        parts: the names of gate and up in it, or one where the checkpoint has them in one tensor.
        down: the name of the last projection in it.
    """

    def __init__(
        self,
        context: ModelContext,
        hidden_size: int,
        intermediate_size: int,
        name: str,
        bias: bool = False,
        act: Literal["silu", "gelu", "gelu_tanh"] = "silu",
        parts: Sequence[str] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
    ) -> None:
        self._ops = context.ops
        self.act = act
        names = [f"{name}.{part}" for part in parts]
        self.gate_up = MergedColumnLinear(context, hidden_size, [intermediate_size] * 2, names, bias)
        self.down = RowParallelLinear(context, intermediate_size, hidden_size, f"{name}.{down}", bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        inner = self.gate_up(x)
        if self.act == "silu":
            return self.down(self._ops.silu_mul(inner))
        return self.down(self._ops.gelu_mul(inner, self.act == "gelu_tanh"))


class Attention(Module):
    """Projections, norms of queries and keys where the model has them, rotary positions, attention, projection.

    Args:
        index: of the model's layer: its cache.
        num_q_heads, num_kv_heads: of the whole model.
        rotary: shared by the layers; None for a layer without positions.
        name: the checkpoint's, e.g. "model.layers.0.self_attn".
        in_size: of what it reads; None for hidden_size.
        parts, out: the projections' names in it, see `QKVLinear`.
        interleaved: see `QKVLinear`.
        qkv_bias, o_bias: whether the projections have biases.
        norms: of queries and of keys [T, heads, head_size], before they are rotated.
        scale: of scores; None for head_size ** -0.5.
        sinks, alibi_slopes: see `AttentionFactory`; of this rank's heads.
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
        rotary: Rotary | None,
        name: str,
        in_size: int | None = None,
        parts: tuple[str, str, str] | tuple[str] = ("q_proj", "k_proj", "v_proj"),
        out: str = "o_proj",
        interleaved: int = 0,
        qkv_bias: bool = False,
        o_bias: bool = False,
        norms: tuple[Callable[[torch.Tensor], torch.Tensor], ...] | None = None,
        scale: float | None = None,
        sinks: torch.Tensor | None = None,
        alibi_slopes: torch.Tensor | None = None,
    ) -> None:
        self.qkv = QKVLinear(
            context, in_size or hidden_size, num_q_heads, num_kv_heads, head_size, name, qkv_bias, parts, interleaved
        )
        self.norms = norms
        self.rotary = rotary
        scale = head_size**-0.5 if scale is None else scale
        self.attend: Any = context.attention(index, scale, sinks=sinks, alibi_slopes=alibi_slopes)
        self._rotates: bool = getattr(self.attend, "rotates", False)
        self.o = RowParallelLinear(context, num_q_heads * head_size, hidden_size, f"{name}.{out}", o_bias)

    def __call__(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x [T, in_size], positions int64 [T] -> [T, hidden_size]."""
        return self.o(self.attended(*self.qkv(x), positions))

    def attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """What lies between the projections: q, k, v [T, heads, head_size] -> [T, num_q_heads * head_size]."""
        norms: Any = self.norms or ()
        if norms and (self.rotary is None or not all(isinstance(norm, RMSNorm) for norm in norms)):
            q, k, norms = norms[0](q), norms[1](k), ()
        rotation: tuple[Rotation, ...] = ()
        if self.rotary is not None and self._rotates:
            rotation = (self.rotary.rotation(positions, norms),)
        elif self.rotary is not None:
            q, k = self.rotary.normed(q, k, norms[0], norms[1], positions) if norms else self.rotary(q, k, positions)
        found: torch.Tensor = self.attend(q, k, v, *rotation)
        return found
