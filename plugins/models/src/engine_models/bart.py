"""BART (Lewis et al. 2020), mBART (Liu et al. 2020), Marian (Junczys-Dowmunt et al. 2018): one embedding for both
stacks and the head, learned or sinusoidal positions, plain feed-forward blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import ColumnParallelLinear, Embedding, LMHead, Module, Param, RowParallelLinear, Stack
from engine_kit.encoder_layers import LayerNorm, Table
from engine_kit.model_config import flag, integer
from engine_models.bart_card import Bart, Marian
from engine_models.encoder_decoder import Block, EncoderAttention, EncoderDecoder, Layer, SelfAttention
from engine_models.layers import MLP

_EPS = 1e-5
_UNUSED = ("encoder.version", "decoder.version", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
"""Of old files; and copies of an embedding that is shared under a name of its own."""
_BIAS = "final_logits_bias"


class SiluMLP(Module):
    """down(silu(up(x))).

    Args:
        up, down: the checkpoint's names.
    """

    def __init__(self, context: ModelContext, size: int, inner: int, up: str, down: str) -> None:
        self.up = ColumnParallelLinear(context, size, inner, up, bias=True)
        self.down = RowParallelLinear(context, inner, size, down, bias=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return self.down(torch.nn.functional.silu(self.up(x)))


class LogitsBias(Module):
    """What is added to all logits; nothing where the checkpoint has zeros or none.

    Args:
        never: ids that are not to be drawn. Marian never learned to write its padding, whose logit is 0 where others
            are negative: its checkpoints name it among `bad_words_ids`.
    """

    def __init__(self, context: ModelContext, never: Sequence[int] = ()) -> None:
        self._size = context.description.vocab_size
        self._never = torch.tensor(never, dtype=torch.int64, device=context.device)
        self._dtype = context.dtype
        self._device = context.device
        self._bias: torch.Tensor | None = None

    def params(self) -> list[Param]:
        """`final_logits_bias` [1, vocab_size]."""
        return [Param(_BIAS, (1, self._size), self)]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Copy it."""
        if tensor.any():
            self._bias = tensor.to(self._device, self._dtype, copy=True)

    def num_elements(self) -> int:
        """None: it is no parameter, but a constant that some checkpoints do not have."""
        return 0

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, vocab_size] -> the same shape."""
        biased = logits if self._bias is None else logits + self._bias
        return biased.index_fill(1, self._never, -torch.inf) if len(self._never) else biased


class BartModel(EncoderDecoder):
    """BartForConditionalGeneration.

    Attributes:
        behind: norms stand behind the blocks, and no stack has a last one.
        first: the row of position 0 in the tables; None: positions are sinusoidal.
        normed: embeddings are.
        shared, output: the names of the embedding and of the head in the checkpoint.
    """

    behind: ClassVar[bool] = True
    first: ClassVar[int | None] = 2
    normed: ClassVar[bool] = True
    card: ClassVar[type[Bart]] = Bart
    shared: ClassVar[str] = "model.shared"
    output: ClassVar[str] = "lm_head"

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model, config = context.description, self.card.filled(context.description.config)
        size, decoders = model.hidden_size, model.num_layers
        positions = {"encoder": self.card.encoder(config).max_tokens, "decoder": integer(config, self.card.positions)}
        self._scale = math.sqrt(size) if flag(config, "scale_embedding", False) else 1.0
        self._act = self.card.activations[config["activation_function"]]
        self._inner = {part: integer(config, f"{part}_ffn_dim") for part in ("encoder", "decoder")}
        self.embed = Embedding(context, model.vocab_size, size, self.shared)
        self.tables: dict[str, torch.Tensor] = {}
        if self.first is None:
            places = sinusoids(positions["decoder"], size).to(context.device, context.dtype)
            self.tables = dict.fromkeys(self._inner, places)
        else:
            names = {part: f"model.{part}.embed_positions" for part in self._inner}
            rows = {part: count + self.first for part, count in positions.items()}
            self.encoder_positions = Table(context, rows["encoder"], size, names["encoder"], self.first)
            self.decoder_positions = Table(context, rows["decoder"], size, names["decoder"], self.first)
        if self.normed:
            self.encoder_embedding_norm = LayerNorm(context, size, _EPS, "model.encoder.layernorm_embedding")
            self.decoder_embedding_norm = LayerNorm(context, size, _EPS, "model.decoder.layernorm_embedding")
        self.encoder = [
            self._layer(context, decoders + index, f"model.encoder.layers.{index}", "encoder")
            for index in range(integer(config, "encoder_layers"))
        ]
        self.layers = Stack(
            context,
            decoders,
            lambda context, index: self._layer(context, index, f"model.decoder.layers.{index}", "decoder"),
        )
        if not self.behind:
            self.encoder_norm = LayerNorm(context, size, _EPS, "model.encoder.layer_norm")
            self.norm = LayerNorm(context, size, _EPS, "model.decoder.layer_norm")
        self.head = LMHead(context, model.vocab_size, size, self.output, self.embed)
        self.bias = LogitsBias(context, self.card.never_drawn(config))

    def _layer(self, context: ModelContext, index: int, name: str, part: str) -> Layer:
        def block(work: Module, norm: str) -> Block:
            return Block(context, work, LayerNorm(context, size, _EPS, f"{name}.{norm}"), self.behind)  # type: ignore[arg-type]

        size, inner, fc = context.description.hidden_size, self._inner[part], (f"{name}.fc1", f"{name}.fc2")
        mlp = SiluMLP(context, size, inner, *fc) if self._act == "silu" else MLP(context, size, inner, *fc, self._act)  # type: ignore[arg-type]
        blocks = [block(SelfAttention(context, index, f"{name}.self_attn"), "self_attn_layer_norm")]
        cross = None
        if part == "decoder":
            cross = EncoderAttention(context, index, f"{name}.encoder_attn")
            blocks.append(block(cross, "encoder_attn_layer_norm"))
        return Layer([*blocks, block(mlp, "final_layer_norm")], cross)

    def _embedded(self, part: str, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        ops, hidden = self.context.ops, self.embed(ids)
        hidden = hidden if self._scale == 1.0 else ops.scale(hidden, self._scale)
        if part in self.tables:
            placed = ops.embedding(positions, self.tables[part])
        else:
            placed = getattr(self, f"{part}_positions")(positions)
        hidden = ops.add(hidden, placed)
        return getattr(self, f"{part}_embedding_norm")(hidden) if self.normed else hidden

    def embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: int32 [n], token ids -> [n, hidden_size]."""
        return self._embedded("encoder", inputs, torch.arange(len(inputs), device=inputs.device))

    def encoded(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed, where the stack has a last norm."""
        return hidden if self.behind else self.encoder_norm(hidden)

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """The last layer's hidden states [T, hidden_size], normed where the stack has a last norm."""
        state["hidden"] = self._embedded("decoder", state["token_ids"], state["positions"])
        for layer in walk(self.layers, state):
            layer(state)
        return state["hidden"] if self.behind else self.norm(state["hidden"])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        return self.bias(self.head(hidden))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `ModelBody.load_weights`; the bias of the logits may be missing."""
        super().load_weights(self._named(weights))

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        biased = False
        for name, tensor in weights:
            biased = biased or name == _BIAS
            unused = name.removeprefix("model.") in _UNUSED and name != f"{self.shared}.weight"
            if not unused and not (self.first is None and name.endswith("embed_positions.weight")):
                yield name, tensor
        if not biased:
            yield _BIAS, torch.zeros(1, self.context.description.vocab_size)


class MBartModel(BartModel):
    """MBartForConditionalGeneration."""

    behind = False


class MarianModel(BartModel):
    """MarianMTModel."""

    first = None
    normed = False
    card = Marian


def sinusoids(positions: int, size: int) -> torch.Tensor:
    """float32 [positions, size]: sines of each position at wavelengths from 2 pi to 20000 pi, then their cosines
    (Vaswani et al. 2017, with the two apart)."""
    place = torch.arange(positions, dtype=torch.float64)[:, None]
    wave = 10000.0 ** (-2 * torch.div(torch.arange(size), 2, rounding_mode="floor").double() / size)
    angles = place * wave
    return torch.cat([angles[:, 0::2].sin(), angles[:, 1::2].cos()], dim=1).float()
