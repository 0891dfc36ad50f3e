"""The card of EXAONE 4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_models.decoder_card import DecoderCard, windows_by_type


class Exaone4(DecoderCard):
    """Exaone4ForCausalLM (2025): layers that see everything have no positions, where others have windows."""

    body = "engine_models.exaone4:Exaone4Model"
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5, "num_key_value_heads": 32, "sliding_window": 4096}

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """By `layer_types`; in old files "LLLG" names a pattern."""
        pattern = config.get("sliding_window_pattern", 4)
        if isinstance(pattern, str):
            pattern = len(pattern)
        if config.get("sliding_window") is None and config.get("layer_types") is None:
            return super().windows(config)
        return windows_by_type(config, pattern if isinstance(pattern, int) and pattern > 0 else 4)
