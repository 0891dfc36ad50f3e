"""The cards of GLM-4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_models.decoder_card import DecoderCard


class Glm(DecoderCard):
    """GlmForCausalLM: GLM-4-9B (2024). Half of each head is rotated, in neighbouring pairs."""

    body = "engine_models.glm:GlmModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 0.00000015625,
        "num_key_value_heads": 2,
    }
    default_head_dim = 128
    partial = True


class Glm4(Glm):
    """Glm4ForCausalLM: GLM-4-0414 (2025). What the blocks give is normed too."""

    body = "engine_models.glm:Glm4Model"
