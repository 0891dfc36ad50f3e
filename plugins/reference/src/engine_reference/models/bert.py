"""BERT (Devlin et al. 2018) and RoBERTa (Liu et al. 2019): encoders with learned positions, normed after each block.

RoBERTa differs in where its positions begin and in its classification head.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

import torch

from engine.interfaces.model import LayerIterator, ModelContext, State
from engine.modeling import (
    ColumnParallelLinear,
    Embedding,
    Linear,
    ModelBody,
    Module,
    QKVLinear,
    RowParallelLinear,
)
from engine_kit.encoder_layers import LayerNorm, Table
from engine_kit.model_config import integer, number
from engine_reference.models.bert_card import ACTIVATIONS, behind_padding

_OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
"""LayerNorm's, in checkpoints that were converted from TensorFlow."""
_UNUSED = ("cls.", "lm_head.")
"""The heads of pre-training."""
_COUNTERS = ("embeddings.position_ids", "embeddings.token_type_ids")
"""0, 1, 2, ... and zeros, as old versions of transformers saved them."""


class BertEmbeddings(Module):
    """Word, position and token type, summed and normed."""

    def __init__(self, context: ModelContext, eps: float, first_position: int) -> None:
        model = context.description
        config = context.description.config
        self._ops = context.ops
        size, positions = model.hidden_size, integer(config, "max_position_embeddings")
        self.words = Embedding(context, model.vocab_size, size, "embeddings.word_embeddings")
        self.positions = Table(context, positions, size, "embeddings.position_embeddings", first_position)
        self.types = Table(context, model.num_token_types, size, "embeddings.token_type_embeddings")
        self.norm = LayerNorm(context, size, eps, "embeddings.LayerNorm")

    def __call__(self, state: State) -> torch.Tensor:
        """[T, hidden_size]."""
        add = self._ops.add
        hidden = add(self.words(state["token_ids"]), self.types(state["token_type_ids"]))
        return self.norm(add(hidden, self.positions(state["positions"])))


class BertLayer(Module):
    """Attention, norm, feed-forward, norm; each norm is over the sum of its block's input and output."""

    def __init__(self, context: ModelContext, index: int, eps: float) -> None:
        model = context.description
        config = context.description.config
        self._ops = context.ops
        spec, size, inner = model.kv_specs[index], model.hidden_size, integer(config, "intermediate_size")
        name = f"encoder.layer.{index}"
        self._tanh = ACTIVATIONS[config.get("hidden_act", "gelu")]
        self.qkv = QKVLinear(
            context,
            size,
            model.num_q_heads,
            spec.num_kv_heads,
            spec.head_size,
            f"{name}.attention.self",
            bias=True,
            parts=("query", "key", "value"),
        )
        self.attend = context.attention(index, spec.head_size**-0.5)
        self.attention_out = RowParallelLinear(context, size, size, f"{name}.attention.output.dense", bias=True)
        self.attention_norm = LayerNorm(context, size, eps, f"{name}.attention.output.LayerNorm")
        self.up = ColumnParallelLinear(context, size, inner, f"{name}.intermediate.dense", bias=True)
        self.down = RowParallelLinear(context, inner, size, f"{name}.output.dense", bias=True)
        self.norm = LayerNorm(context, size, eps, f"{name}.output.LayerNorm")

    def __call__(self, state: State) -> None:
        """Change `hidden` [T, hidden_size] in the state."""
        add, hidden = self._ops.add, state["hidden"]
        hidden = self.attention_norm(add(self.attention_out(self.attend(*self.qkv(hidden))), hidden))
        inner = self._ops.gelu(self.up(hidden), self._tanh)
        state["hidden"] = self.norm(add(self.down(inner), hidden))


class BertModel(ModelBody):
    """BertModel: the last layer's hidden states. The dense layer "pooler" behind them is no part of an embedding."""

    prefix: ClassVar[str] = "bert."
    dropped: ClassVar[tuple[str, ...]] = ("pooler.", *_UNUSED)

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model, config = context.description, context.description.config
        eps = number(config, "layer_norm_eps", 1e-12)
        self.embeddings = BertEmbeddings(context, eps, self.position_of_first(config))
        self.layers = [BertLayer(context, index, eps) for index in range(model.num_layers)]

    @staticmethod
    def position_of_first(config: dict[str, Any]) -> int:
        """The row of the position table that the first token has."""
        return 0

    def forward(self, state: State, walk: LayerIterator) -> torch.Tensor:
        """The last layer's hidden states [T, hidden_size]."""
        if "hidden" not in state:
            state["hidden"] = self.embeddings(state)
        for layer in walk(self.layers, state):
            layer(state)
        return state["hidden"]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As `ModelBody.load_weights`; the names may have the prefix of the model's class or not."""
        super().load_weights(self._named(weights))

    def _named(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            name = name.removeprefix(self.prefix)
            if name.startswith(self.dropped) or name in _COUNTERS:
                continue
            for old, new in _OLD_NAMES.items():
                if name.endswith(old):
                    name = name.removesuffix(old) + new
            yield name, tensor


class BertForClassification(BertModel):
    """BertForSequenceClassification: tanh(dense(hidden)), then a linear layer."""

    dropped = _UNUSED

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        model = context.description
        self.pooler = Linear(context, model.hidden_size, [model.hidden_size], ["pooler.dense"], bias=True)
        self.classifier = Linear(context, model.hidden_size, [model.pooler.num_labels], ["classifier"], bias=True)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size], of the first tokens -> [R, num_labels]."""
        return self.classifier(self.context.ops.soft_cap(self.pooler(hidden), 1.0))  # capped at 1: tanh itself


class RobertaModel(BertModel):
    """RobertaModel and XLMRobertaModel."""

    prefix = "roberta."

    @staticmethod
    def position_of_first(config: dict[str, Any]) -> int:
        """Behind the padding id."""
        return behind_padding(config)


class RobertaForClassification(RobertaModel):
    """RobertaForSequenceClassification: the dense layer is the head's own."""

    def __init__(self, context: ModelContext) -> None:
        super().__init__(context)
        size, labels = context.description.hidden_size, context.description.pooler.num_labels
        self.dense = Linear(context, size, [size], ["classifier.dense"], bias=True)
        self.out = Linear(context, size, [labels], ["classifier.out_proj"], bias=True)

    def classify(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size], of the first tokens -> [R, num_labels]."""
        return self.out(self.context.ops.soft_cap(self.dense(hidden), 1.0))  # capped at 1: tanh itself
