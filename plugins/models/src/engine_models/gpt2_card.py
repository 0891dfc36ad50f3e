"""The card of GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import integer
from engine_models.decoder_card import GELU, DecoderCard


class GPT2(DecoderCard):
    """GPT2LMHeadModel (2019)."""

    body = "engine_models.gpt2:GPT2Model"
    defaults: ClassVar[Mapping[str, Any]] = {"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}
    activation = "activation_function"
    activations = GELU
    foreign: ClassVar[Mapping[str, Any]] = {"add_cross_attention": False}

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """GPT-2 has names of its own."""
        size = integer(config, "n_embd")
        return {
            **super().filled(config),
            "hidden_size": size,
            "num_hidden_layers": integer(config, "n_layer"),
            "num_attention_heads": integer(config, "n_head"),
            "max_position_embeddings": integer(config, "n_positions"),
            "intermediate_size": integer(config, "n_inner", 4 * size),
        }
