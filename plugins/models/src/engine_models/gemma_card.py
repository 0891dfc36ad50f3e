"""The cards of Gemma 1, 2 and 3 (text)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.interfaces.ops import MODEL_OPERATIONS
from engine_kit.model_config import number
from engine_kit.pooled_decoders import Classifier, Embedder
from engine_models.decoder_card import GELU, DecoderCard, windows_by_type
from engine_models.rope_by_type import rope_of

_SECOND = {
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "num_key_value_heads": 4,
}


class Gemma(DecoderCard):
    """GemmaForCausalLM (2024)."""

    body = "engine_models.gemma:GemmaModel"
    operations = frozenset((*MODEL_OPERATIONS, "gelu_mul"))
    defaults: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": True, "hidden_act": "gelu_pytorch_tanh"}
    # Old files say "gelu" and mean its approximation, as transformers reads them.
    activations: ClassVar[Mapping[str, str]] = {**GELU, "gelu": "gelu_tanh"}
    foreign: ClassVar[Mapping[str, Any]] = {"use_bidirectional_attention": False}
    default_head_dim = 256

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Old files have a key of their own for the activation, which transformers no longer reads."""
        other = config.get("hidden_activation")
        if other in (None, "gelu_pytorch_tanh"):
            return []
        return [f"hidden_activation {other!r} is not 'gelu_pytorch_tanh'"]


class Gemma2(DecoderCard):
    """Gemma2ForCausalLM (2024): every second layer sees a window; scores and logits are capped."""

    body = "engine_models.gemma:Gemma2Model"
    operations = frozenset((*MODEL_OPERATIONS, "gelu_mul"))
    defaults: ClassVar[Mapping[str, Any]] = _SECOND
    activation = "hidden_activation"
    activations = GELU
    foreign: ClassVar[Mapping[str, Any]] = {"use_bidirectional_attention": False}
    default_head_dim = 256
    pattern = 2

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """By `layer_types`."""
        pattern = config.get("sliding_window_pattern")
        return windows_by_type(config, pattern if isinstance(pattern, int) and pattern > 0 else cls.pattern)

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """The cap of scores."""
        capped = config["attn_logit_softcapping"] is not None
        return {"soft_cap": number(config, "attn_logit_softcapping") if capped else None}


class Gemma2Embedder(Embedder, Gemma2):
    """Gemma2Model."""


class Gemma2Classifier(Classifier, Gemma2):
    """Gemma2ForSequenceClassification."""


class Gemma3(Gemma2):
    """Gemma3ForCausalLM (2025): norms of queries and keys; layers with a window have other rotary positions."""

    body = "engine_models.gemma:Gemma3Model"
    defaults: ClassVar[Mapping[str, Any]] = {**_SECOND, "final_logit_softcapping": None, "attn_logit_softcapping": None}
    pattern = 6

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """transformers reads the key for the cap of scores, and does not use it."""
        return {}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """A cap of scores."""
        cap = config["attn_logit_softcapping"]
        return [] if cap is None else [f"attn_logit_softcapping is {cap!r}, which this architecture does not have"]

    @classmethod
    def ropes(cls, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Those of layers that see everything, and of layers with a window."""
        return [
            rope_of(config, "full_attention", 1e6),
            rope_of(config, "sliding_attention", 1e4, "rope_local_base_freq"),
        ]
