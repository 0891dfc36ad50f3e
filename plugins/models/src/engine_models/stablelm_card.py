"""The card of StableLM."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_models.decoder_card import DecoderCard


class StableLm(DecoderCard):
    """StableLmForCausalLM: StableLM 3B and 2 1.6B (2024), without norms of single heads."""

    body = "engine_models.stablelm:StableLmModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "partial_rotary_factor": 0.25,
        "layer_norm_eps": 1e-5,
        "num_key_value_heads": 32,
    }
    foreign: ClassVar[Mapping[str, Any]] = {"qk_layernorm": False}
    partial = True
