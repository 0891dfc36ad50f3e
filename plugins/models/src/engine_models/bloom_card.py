"""The card of BLOOM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import integer
from engine_models.decoder_card import DecoderCard


class Bloom(DecoderCard):
    """BloomForCausalLM (2022), BLOOMZ."""

    body = "engine_models.bloom:BloomModel"
    defaults: ClassVar[Mapping[str, Any]] = {"layer_norm_epsilon": 1e-5}
    foreign: ClassVar[Mapping[str, Any]] = {"apply_residual_connection_post_layernorm": False}

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """BLOOM has names of its own. How long its contexts may be only its first files say; it was trained on 2048."""
        size = integer(config, "hidden_size" if config.get("n_embed") is None else "n_embed")
        return {
            **super().filled(config),
            "hidden_size": size,
            "num_hidden_layers": integer(config, "n_layer"),
            "num_attention_heads": integer(config, "n_head"),
            "max_position_embeddings": integer(config, "seq_length", 2048),
            "intermediate_size": 4 * size,
        }

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Distances instead of positions."""
        return {"attention_features": ("alibi",)}
