"""The card of GPT-NeoX and Pythia."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_models.decoder_card import GELU, DecoderCard


class GPTNeoX(DecoderCard):
    """GPTNeoXForCausalLM: GPT-NeoX-20B (2022), Pythia (2023)."""

    body = "engine_models.gpt_neox:GPTNeoXModel"
    defaults: ClassVar[Mapping[str, Any]] = {"hidden_act": "gelu", "layer_norm_eps": 1e-5}
    activations = GELU
    foreign: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": None}
    partial = True

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Files of transformers 4 have names of their own for the rotary parameters."""
        own = {
            "partial_rotary_factor": config.get("rotary_pct", 0.25),
            "rope_theta": config.get("rotary_emb_base", 10000.0),
        }
        return super().filled({**own, **config})
