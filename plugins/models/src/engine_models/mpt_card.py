"""The card of MPT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.types.errors import CheckpointError
from engine_kit.model_config import integer
from engine_models.decoder_card import DecoderCard

_ATTENTION: Mapping[str, Any] = {
    "attn_type": "multihead_attention",
    "clip_qkv": None,
    "prefix_lm": False,
    "qk_ln": False,
    "alibi": True,
    "rope": False,
}
"""Keys of `attn_config` with the values that the body has."""


class Mpt(DecoderCard):
    """MptForCausalLM: MPT 7B and 30B (2023), where their queries, keys and values are not clipped."""

    body = "engine_models.mpt:MptModel"
    defaults: ClassVar[Mapping[str, Any]] = {"layer_norm_epsilon": 1e-5}
    foreign: ClassVar[Mapping[str, Any]] = {"expansion_ratio": 4, "no_bias": True, "logit_scale": None}

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """MPT has names of its own."""
        size = integer(config, "d_model")
        attention = config.get("attn_config") or {}
        if not isinstance(attention, Mapping):
            raise CheckpointError("read 'attn_config' of config.json", f"it is {attention!r:.80}, not an object")
        return {
            **super().filled(config),
            "hidden_size": size,
            "num_hidden_layers": integer(config, "n_layers"),
            "num_attention_heads": integer(config, "n_heads"),
            "max_position_embeddings": integer(config, "max_seq_len", 2048),
            "intermediate_size": 4 * size,
            "attn_config": dict(attention),
        }

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Distances instead of positions."""
        return {"attention_features": ("alibi",)}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Other forms of attention."""
        given = config["attn_config"]
        return [
            f"attn_config.{key} is {given[key]!r}, and the model's body has {has!r}"
            for key, has in _ATTENTION.items()
            if given.get(key, has) != has
        ]
