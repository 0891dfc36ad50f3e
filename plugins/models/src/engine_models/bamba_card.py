"""The card of Bamba."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import bad_key, integer, number
from engine_models.hybrid_card import HybridCard, mamba2_form
from engine_states.forms import Mamba2Form


class Bamba(HybridCard):
    """BambaForCausalLM (IBM, Princeton, CMU, UIUC 2024): Llama's layers, most of them with Mamba-2's mixer in place of
    attention."""

    body = "engine_models.bamba:BambaModel"
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "rms_norm_eps": 1e-5}
    partial = True

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Half of each head is rotated, where the rotary parameters themselves say nothing else."""
        return {**super().filled(config), "partial_rotary_factor": 0.5}

    @classmethod
    def mixer(cls, config: Mapping[str, Any]) -> Mamba2Form:
        """Of every mixer."""
        return mamba2_form(config, int(number(config, "mamba_expand", 2) * integer(config, "hidden_size")))

    @classmethod
    def mixes(cls, config: Mapping[str, Any]) -> list[bool]:
        """All but those that `attn_layer_indices` names."""
        layers, given = integer(config, "num_hidden_layers"), config.get("attn_layer_indices") or []
        if not isinstance(given, (list, tuple)) or not all(type(one) is int and 0 <= one < layers for one in given):
            raise bad_key(config, "attn_layer_indices", f"{given!r} are not places among {layers} layers")
        return [index not in given for index in range(layers)]
