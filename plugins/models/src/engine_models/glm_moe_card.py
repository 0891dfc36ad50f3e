"""The card of GLM-4-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import flag, integer
from engine_models.experts_card import GroupsCard


class Glm4Moe(GroupsCard):
    """Glm4MoeForCausalLM (Zhipu 2025, GLM-4.5): rotary positions of a part of each head, DeepSeek-V3's routing."""

    body = "engine_models.glm_moe:Glm4MoeModel"
    partial = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
    }

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Raises CheckpointError for what the body reads beside routing."""
        flag(config, "attention_bias", False)
        flag(config, "use_qk_norm", False)
        integer(config, "first_k_dense_replace", low=0)
        integer(config, "n_shared_experts")
        return super().more_unsupported(config)
