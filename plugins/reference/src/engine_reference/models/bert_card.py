"""The cards of BERT and RoBERTa: encoders that embed, and encoders with a classification head."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.interfaces.model import ModelCard, ModelFeature, ModelNeed
from engine.types.errors import EngineError
from engine.types.model import KVSpec, ModelDescription
from engine_kit.model_config import (
    architecture,
    bad_key,
    classifier,
    embedder,
    head_dim,
    integer,
    stored_dtype,
    unsupported_ranks,
)

ACTIVATIONS = {"gelu": False, "gelu_python": False, "gelu_new": True, "gelu_pytorch_tanh": True, "gelu_fast": True}
"""hidden_act -> whether it is gelu's approximation by tanh."""


def behind_padding(config: dict[str, Any]) -> int:
    """The first row of RoBERTa's position table that is used: that of the padding id and those before it are not."""
    return integer(config, "pad_token_id", 1, low=0) + 1


class Bert(ModelCard):
    """BertModel (Devlin et al. 2018): embeds by its first token, unless sentence-transformers' files say otherwise."""

    framework = "torch"
    quantized = frozenset({"linear"})
    body = "engine_reference.models.bert:BertModel"
    classifies: ClassVar[bool] = False

    @classmethod
    def first_position(cls, config: dict[str, Any]) -> int:
        """The row of the position table that the first token has."""
        return 0

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        layers, heads = integer(config, "num_hidden_layers"), integer(config, "num_attention_heads")
        positions = integer(config, "max_position_embeddings") - cls.first_position(config)
        if positions < 1:
            raise bad_key(config, "max_position_embeddings", "none is left behind pad_token_id")
        return ModelDescription(
            architecture=architecture(config),
            dtype=stored_dtype(config),
            vocab_size=integer(config, "vocab_size"),
            hidden_size=integer(config, "hidden_size"),
            num_layers=layers,
            num_q_heads=heads,
            max_model_len=positions,
            kv_specs=(KVSpec(kind="encoder", num_kv_heads=heads, head_size=head_dim(config)),) * layers,
            config=dict(config),
            generates=False,
            pooler=classifier(config, "cls") if cls.classifies else embedder(config, "cls"),
            num_token_types=integer(config, "type_vocab_size", 2),
        )

    @classmethod
    def unsupported_features(cls) -> frozenset[ModelFeature]:
        """It is small: all of its layers are on every rank."""
        return frozenset({"stages"})

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        config, reasons = need.config, []
        if config.get("hidden_act", "gelu") not in ACTIVATIONS:
            reasons.append(f"hidden_act {config['hidden_act']!r} is none of {', '.join(ACTIVATIONS)}")
        if config.get("position_embedding_type", "absolute") != "absolute":
            reasons.append(f"position_embedding_type {config['position_embedding_type']!r} is not 'absolute'")
        for key in ("is_decoder", "add_cross_attention"):
            if config.get(key):
                reasons.append(f"the config sets {key}, which it does not have")
        try:
            inner = integer(config, "intermediate_size")
            reasons += unsupported_ranks(cls.describe(config), need.parallel.tp, intermediate_size=inner)
        except EngineError as error:
            reasons.append(str(error))
        return reasons


class BertClassifier(Bert):
    """BertForSequenceClassification: classifies by its first token."""

    body = "engine_reference.models.bert:BertForClassification"
    classifies = True


class Roberta(Bert):
    """RobertaModel (Liu et al. 2019), XLMRobertaModel (Conneau et al. 2020): positions begin behind the padding id."""

    body = "engine_reference.models.bert:RobertaModel"

    @classmethod
    def first_position(cls, config: dict[str, Any]) -> int:
        """`pad_token_id` + 1."""
        return behind_padding(config)


class RobertaClassifier(Roberta):
    """RobertaForSequenceClassification and XLMRobertaForSequenceClassification."""

    body = "engine_reference.models.bert:RobertaForClassification"
    classifies = True
