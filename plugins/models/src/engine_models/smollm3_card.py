"""The card of SmolLM3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import bad_key, flag, integer
from engine_models.decoder_card import DecoderCard, windows_by_type


class SmolLM3(DecoderCard):
    """SmolLM3ForCausalLM (2025): every fourth layer has no positions."""

    body = "engine_models.smollm3:SmolLM3Model"
    defaults: ClassVar[Mapping[str, Any]] = {"tie_word_embeddings": True, "num_key_value_heads": 4}

    @classmethod
    def rotated(cls, config: dict[str, Any]) -> tuple[bool, ...]:
        """Of each layer, whether it has rotary positions: `no_rope_layers` says 1 for those that have."""
        layers, said = integer(config, "num_hidden_layers"), config.get("no_rope_layers")
        if said is None:
            interval = integer(config, "no_rope_layer_interval", 4)
            return tuple((index + 1) % interval != 0 for index in range(layers))
        if not isinstance(said, (list, tuple)) or len(said) != layers or not all(value in (0, 1) for value in said):
            raise bad_key(config, "no_rope_layers", f"it is not 0 or 1 for each of the {layers} layers")
        return tuple(bool(value) for value in said)

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """By `layer_types`, where `use_sliding_window` says so; without types, of layers without positions."""
        rotated = cls.rotated(config)
        if not flag(config, "use_sliding_window", False) or config.get("sliding_window") is None:
            return (None,) * len(rotated)
        if config.get("layer_types") is not None:
            return windows_by_type(config)
        window = integer(config, "sliding_window")
        return tuple(None if has else window for has in rotated)
