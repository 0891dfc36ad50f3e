"""The Llama family's cards for pooling: bare decoders that embed, and decoders with a classification head.

A ...ForCausalLM embeds too, where the engine is started with `runner="pooling"`; its own card serves it then.
"""

from __future__ import annotations

from typing import Any

import msgspec

from engine.interfaces.model import ModelCard
from engine.modeling.config import classifier, embedder
from engine.types.model import ModelDescription
from engine_reference.models.card import Llama, Mistral, Qwen2, Qwen3


class _Embedder(ModelCard):
    """Embeds by its last token."""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """As the decoder's, but without a head."""
        return msgspec.structs.replace(super().describe(config), generates=False, pooler=embedder(config, "last"))


class _Classifier(ModelCard):
    """Classifies by its last token."""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """As the decoder's, with the head `score`."""
        return msgspec.structs.replace(super().describe(config), generates=False, pooler=classifier(config, "last"))


class LlamaEmbedder(_Embedder, Llama):
    """LlamaModel."""


class MistralEmbedder(_Embedder, Mistral):
    """MistralModel."""


class Qwen2Embedder(_Embedder, Qwen2):
    """Qwen2Model."""


class Qwen3Embedder(_Embedder, Qwen3):
    """Qwen3Model."""


class LlamaClassifier(_Classifier, Llama):
    """LlamaForSequenceClassification."""


class MistralClassifier(_Classifier, Mistral):
    """MistralForSequenceClassification."""


class Qwen2Classifier(_Classifier, Qwen2):
    """Qwen2ForSequenceClassification."""


class Qwen3Classifier(_Classifier, Qwen3):
    """Qwen3ForSequenceClassification."""
