"""The cards of OLMo-2 and OLMo-3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_models.decoder_card import DecoderCard, windows_by_type
from engine_models.rope_by_type import rope_of


class Olmo2(DecoderCard):
    """Olmo2ForCausalLM (2024): norms behind the blocks, and of all heads of queries and keys together."""

    body = "engine_models.olmo:Olmo2Model"
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}


class Olmo3(Olmo2):
    """Olmo3ForCausalLM (2025): three of four layers see a window, and have rotary positions that are not scaled."""

    body = "engine_models.olmo:Olmo3Model"

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """By `layer_types`."""
        return windows_by_type(config, 4)

    @classmethod
    def ropes(cls, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Those of layers that see everything, and of layers with a window, for which transformers reads no old key."""
        return [rope_of(config, "full_attention", 5e5), rope_of(config, "sliding_attention", 5e5, old_key="")]
