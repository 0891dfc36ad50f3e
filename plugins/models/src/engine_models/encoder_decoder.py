"""What encoder-decoder models are made of: blocks with a residual, attention over the encoder, and the two stacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from engine.interfaces.model import ModelContext, State
from engine.modeling import ColumnParallelLinear, Decoder, Module, Norm, QKVLinear, RowParallelLinear


class SelfAttention(Module):
    """Projections, attention, projection: of the decoder's layers, and of the encoder's.

    Args:
        index: of the layer; the encoder's are counted behind the decoder's.
        name: the checkpoint's, e.g. "model.decoder.layers.0.self_attn".
        bias: whether the projections have biases.
        parts, out: the projections' names in it.
        scale: of scores; None for head_size ** -0.5.
        more: further arguments of `AttentionFactory`.
    """

    def __init__(
        self,
        context: ModelContext,
        index: int,
        name: str,
        *,
        bias: bool = True,
        parts: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
        out: str = "out_proj",
        scale: float | None = None,
        **more: Any,
    ) -> None:
        size, heads, head_size = _sizes(context)
        self.qkv = QKVLinear(context, size, heads, heads, head_size, name, bias, parts)
        self.attend = context.attention(index, head_size**-0.5 if scale is None else scale, **more)
        self.o = RowParallelLinear(context, heads * head_size, size, f"{name}.{out}", bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.o(self.attend(*self.qkv(x)))


class EncoderAttention(Module):
    """A decoder layer's attention over the encoder. Arguments as for `SelfAttention`."""

    def __init__(
        self,
        context: ModelContext,
        index: int,
        name: str,
        *,
        bias: bool = True,
        parts: tuple[str, str, str] = ("q_proj", "k_proj", "v_proj"),
        out: str = "out_proj",
        scale: float | None = None,
    ) -> None:
        assert context.cross_attention is not None
        size, heads, head_size = _sizes(context)
        self._head_size = head_size
        q, k, v = (ColumnParallelLinear(context, size, heads * head_size, f"{name}.{part}", bias) for part in parts)
        self.q = q
        self.k = k
        self.v = v
        self.attend = context.cross_attention(index, head_size**-0.5 if scale is None else scale)
        self.o = RowParallelLinear(context, heads * head_size, size, f"{name}.{out}", bias)

    def encode(self, encoded: torch.Tensor) -> None:
        """Keep the keys and values of what the encoder made, [n, hidden_size]."""
        self.attend.store(self._heads(self.k(encoded)), self._heads(self.v(encoded)))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.o(self.attend(self._heads(self.q(x))))

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self._head_size))


class Block(Module):
    """x + work(norm(x)); or, where the norm stands behind, norm(x + work(x)) (BART)."""

    def __init__(
        self, context: ModelContext, work: Callable[[torch.Tensor], torch.Tensor], norm: Norm, behind: bool
    ) -> None:
        self._ops = context.ops
        self.work = work
        self.norm = norm
        self.behind = behind

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        if self.behind:
            return self.norm(self._ops.add(x, self.work(x)))
        return self._ops.add(x, self.work(self.norm(x)))


class Layer(Module):
    """Blocks, one after the other. A decoder's layer changes `hidden` in the state.

    Args:
        cross: which of the blocks' works reads the encoder; None in the encoder itself.
    """

    def __init__(self, blocks: Sequence[Block], cross: EncoderAttention | None = None) -> None:
        self.blocks = list(blocks)
        self.cross = cross

    def __call__(self, state: State) -> None:
        """Change `hidden` [T, hidden_size] in the state."""
        state["hidden"] = self.apply(state["hidden"])

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] -> [T, hidden_size]."""
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


class EncoderDecoder(Decoder):
    """Base of encoder-decoder models: beside what a `Decoder` sets, `encoder`, its layers, in `__init__`; and how what
    it reads becomes hidden states, in `embedded`."""

    encoder: list[Layer]

    def embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        """What the encoder's first layer reads, [n, hidden_size]; inputs as `encode` has them."""
        raise NotImplementedError

    def encoded(self, hidden: torch.Tensor) -> torch.Tensor:
        """What the encoder's last layer leaves, [n, hidden_size], as the decoder reads it."""
        return hidden

    def encode(self, inputs: torch.Tensor) -> None:
        """See `engine.interfaces.model.Model.encode`."""
        hidden = self.embedded(inputs)
        for layer in self.encoder:
            hidden = layer.apply(hidden)
        hidden = self.encoded(hidden)
        for layer in self.layers:
            layer.cross.encode(hidden)


def _sizes(context: ModelContext) -> tuple[int, int, int]:
    """hidden_size, heads, head_size."""
    model = context.description
    return model.hidden_size, model.num_q_heads, model.kv_specs[0].head_size
