"""The card of Falcon."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import flag, integer
from engine_models.decoder_card import GELU, DecoderCard


class Falcon(DecoderCard):
    """FalconForCausalLM: Falcon 7B, 40B, 180B (2023), Falcon2 11B. Without ALiBi (Falcon-RW)."""

    body = "engine_models.falcon:FalconModel"
    defaults: ClassVar[Mapping[str, Any]] = {"activation": "gelu", "layer_norm_epsilon": 1e-5}
    activation = "activation"
    activations = GELU

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """With KV heads by the form of the checkpoint: grouped, one for all, or one for each."""
        size, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
        groups = 1 if flag(config, "multi_query", True) else heads
        if flag(config, "new_decoder_architecture", False):
            groups = integer(config, "num_kv_heads", heads)
        return {
            **super().filled(config),
            "num_key_value_heads": groups,
            "intermediate_size": integer(config, "ffn_hidden_size", 4 * size),
            "max_position_embeddings": integer(config, "max_position_embeddings", 2048),
        }

    @classmethod
    def norms(cls, config: Mapping[str, Any]) -> int:
        """How many norms a layer with parallel blocks has."""
        grouped = flag(config, "new_decoder_architecture", False)
        return integer(config, "num_ln_in_parallel_attn", 2 if grouped else 1)

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """ALiBi, and forms that no checkpoint has."""
        grouped, parallel = flag(config, "new_decoder_architecture", False), flag(config, "parallel_attn", True)
        reasons = []
        if flag(config, "alibi", False):
            reasons.append("alibi is true, whose biases Falcon rounds to bfloat16: they cannot be had by slopes alone")
        if grouped and not parallel:
            reasons.append("new_decoder_architecture with parallel_attn false is no form of Falcon's")
        if cls.norms(config) not in ((1, 2) if grouped else (1,)):
            reasons.append(f"num_ln_in_parallel_attn {cls.norms(config)} is no form of Falcon's")
        return reasons
