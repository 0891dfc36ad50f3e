"""The card of StarCoder2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import integer
from engine_models.decoder_card import GELU, DecoderCard


class Starcoder2(DecoderCard):
    """Starcoder2ForCausalLM (2024)."""

    body = "engine_models.starcoder2:Starcoder2Model"
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "gelu_pytorch_tanh",
        "norm_epsilon": 1e-5,
        "tie_word_embeddings": True,
        "num_key_value_heads": 2,
    }
    activations = GELU

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """`sliding_window`, of every layer; null is full attention."""
        window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
        return (window,) * integer(config, "num_hidden_layers")
