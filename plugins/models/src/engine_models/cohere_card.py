"""The cards of Command R and Command R7B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_models.decoder_card import DecoderCard, windows_by_type


class Cohere(DecoderCard):
    """CohereForCausalLM: Command R (2024), Aya. Without norms of queries and keys."""

    body = "engine_models.cohere:CohereModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "rope_theta": 500000.0,
        "layer_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "logit_scale": 0.0625,
    }
    foreign: ClassVar[Mapping[str, Any]] = {"use_qk_norm": False}


class Cohere2(DecoderCard):
    """Cohere2ForCausalLM: Command R7B, Command A (2025). Layers that see everything have no positions."""

    body = "engine_models.cohere:Cohere2Model"
    defaults: ClassVar[Mapping[str, Any]] = {"layer_norm_eps": 1e-5, "tie_word_embeddings": True, "logit_scale": 0.0625}

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """By `layer_types`."""
        pattern = config.get("sliding_window_pattern")
        return windows_by_type(config, pattern if isinstance(pattern, int) and pattern > 0 else 4)
