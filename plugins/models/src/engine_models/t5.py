"""T5 (Raffel et al. 2020) and mT5: RMS norms before the blocks, no biases, scores that are not scaled, and in place of
positions a bias for each distance, which all layers of a stack share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch

from engine.interfaces.model import ModelContext
from engine.modeling import Embedding, GatedMLP, LMHead, Module, Param, RMSNorm, Stack
from engine.modeling.parallel import even
from engine.types.errors import ConfigError
from engine_kit.model_config import integer, number
from engine_models.encoder_decoder import Block, EncoderAttention, EncoderDecoder, Layer, SelfAttention
from engine_models.layers import MLP
from engine_models.t5_card import MT5, T5

_PARTS = ("q", "k", "v")
_HEAD, _SHARED = "lm_head.weight", "shared.weight"
_UNUSED = frozenset(
    {
        *("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
        "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",
    }
)
"""Copies of the shared embedding; and what old files have and no T5 reads."""


class RelativeBias(Module):
    """What a stack's scores get for the distance of the key, by buckets that grow with it.

    Args:
        name: of the stack in the checkpoint.
        both: keys ahead of a query have buckets of their own.

    Attributes:
        table: see `engine.interfaces.attention.AttentionLayer.relative_bias`; filled when the weights are loaded.
    """

    def __init__(self, context: ModelContext, buckets: int, farthest: int, name: str, both: bool) -> None:
        self._name = f"{name}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        heads = context.description.num_q_heads
        self._heads = even(heads, context, f"the heads of {name}")
        self._shape = (buckets, heads)
        distance = torch.arange(-farthest, farthest + 1)
        self._bucket = buckets_of(distance, buckets, farthest, both)
        size = (self._heads.length, len(distance))
        self.table = torch.zeros(size, dtype=torch.float32, device=context.device)

    def params(self) -> list[Param]:
        """[buckets, heads], of which a rank keeps its heads."""
        return [Param(self._name, self._shape, self, pieces=((slice(None), self._heads.part),))]

    def load(self, param: Param, tensor: torch.Tensor) -> None:
        """Spread it over the distances."""
        self.table.copy_(tensor[self._bucket].T)


def buckets_of(ahead: torch.Tensor, buckets: int, farthest: int, both: bool) -> torch.Tensor:
    """int64 [n]; the bucket of a key that stands so many places, int64 [n], ahead of its query: half of them for one
    place each, the others for ever longer ranges up to `farthest`."""
    first = torch.zeros_like(ahead)
    if both:
        buckets //= 2
        first = (ahead > 0).long() * buckets
        distance = ahead.abs()
    else:
        distance = (-ahead).clamp(min=0)
    exact = buckets // 2
    # In float32, as the models were trained: at the edges of ranges rounding decides.
    beyond = torch.log(distance.float().clamp(min=1) / exact) / math.log(farthest / exact) * (buckets - exact)
    return first + torch.where(distance < exact, distance, (exact + beyond.long()).clamp(max=buckets - 1))


class T5Model(EncoderDecoder):
    """T5ForConditionalGeneration."""

    card: ClassVar[type[T5]] = T5

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        if context.dtype == torch.float16:
            raise ConfigError(
                f"compute {context.description.architecture} in float16",
                "its feed-forward blocks add up to more than float16 holds",
                "use --dtype bfloat16 or --dtype float32",
            )
        model, config = context.description, self.card.filled(context.description.config)
        size, decoders = model.hidden_size, model.num_layers
        self._inner = integer(config, "d_ff")
        self._eps = number(config, "layer_norm_epsilon")
        self._act = self.card.activations[config["feed_forward_proj"]]
        self._scale = size**-0.5 if self.card.scaled(config) else 1.0
        buckets = integer(config, "relative_attention_num_buckets")
        farthest = integer(config, "relative_attention_max_distance")
        self.embed = Embedding(context, model.vocab_size, size, "shared")
        self.encoder_bias = RelativeBias(context, buckets, farthest, "encoder", both=True)
        self.decoder_bias = RelativeBias(context, buckets, farthest, "decoder", both=False)
        self.encoder = [
            self._layer(context, decoders + index, f"encoder.block.{index}.layer", self.encoder_bias, False)
            for index in range(integer(config, "num_layers"))
        ]
        self.layers = Stack(
            context,
            decoders,
            lambda context, index: self._layer(context, index, f"decoder.block.{index}.layer", self.decoder_bias, True),
        )
        self.encoder_norm = RMSNorm(context, size, self._eps, "encoder.final_layer_norm")
        self.norm = RMSNorm(context, size, self._eps, "decoder.final_layer_norm")
        self.head = LMHead(context, model.vocab_size, size, "lm_head", self.embed if self._scale != 1.0 else None)

    def _layer(self, context: ModelContext, index: int, name: str, bias: RelativeBias, decodes: bool) -> Layer:
        size, blocks, cross = context.description.hidden_size, [], None
        attention = SelfAttention(
            context,
            index,
            f"{name}.0.SelfAttention",
            bias=False,
            parts=_PARTS,
            out="o",
            scale=1.0,
            relative_bias=bias.table,
        )
        works: list[Module] = [attention]
        if decodes:
            name_of = f"{name}.1.EncDecAttention"
            cross = EncoderAttention(context, index, name_of, bias=False, parts=_PARTS, out="o", scale=1.0)
            works.append(cross)
        dense = f"{name}.{len(works)}.DenseReluDense"
        if self._act == "relu":
            works.append(MLP(context, size, self._inner, f"{dense}.wi", f"{dense}.wo", "relu", bias=False))
        else:
            parts = ("wi_0", "wi_1")
            works.append(GatedMLP(context, size, self._inner, dense, act=self._act, parts=parts, down="wo"))  # type: ignore[arg-type]
        for place, work in enumerate(works):
            norm = RMSNorm(context, size, self._eps, f"{name}.{place}.layer_norm")
            blocks.append(Block(context, work, norm, behind=False))  # type: ignore[arg-type]
        return Layer(blocks, cross)

    def embedded(self, inputs: torch.Tensor) -> torch.Tensor:
        """inputs: int32 [n], token ids -> [n, hidden_size]."""
        return self.embed(inputs)

    def encoded(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normed."""
        return self.encoder_norm(hidden)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]."""
        return self.head(hidden if self._scale == 1.0 else self.context.ops.scale(hidden, self._scale))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `ModelBody.load_weights`; a head of its own that the checkpoint does not have is the embedding."""
        super().load_weights(self._named(weights))

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        shared: torch.Tensor | None = None
        headed = self._scale != 1.0
        for name, tensor in weights:
            headed = headed or name == _HEAD
            if name == _SHARED and not headed:
                shared = tensor.clone()
            if name not in _UNUSED:
                yield name, tensor
        if not headed and shared is not None:
            yield _HEAD, shared


class MT5Model(T5Model):
    """MT5ForConditionalGeneration."""

    card = MT5
