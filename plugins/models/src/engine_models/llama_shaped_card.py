"""The cards of decoders that compute as Llama does, and whose checkpoints say it otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import number
from engine_kit.pooled_decoders import Reward
from engine_models.decoder_card import DecoderCard


class InternLM2(DecoderCard):
    """InternLM2ForCausalLM (2024): queries, keys and values of each KV head together, names of its own."""

    body = "engine_models.llama_shaped:InternLM2Model"
    defaults: ClassVar[Mapping[str, Any]] = {"bias": True}


class InternLM2Reward(Reward, InternLM2):
    """InternLM2ForRewardModel (2024): one number, which is not bounded."""

    body = "engine_models.llama_shaped:InternLM2RewardModel"


class InternLM3(DecoderCard):
    """InternLM3ForCausalLM (2025): biases by `qkv_bias` and `bias`."""

    body = "engine_models.llama_shaped:InternLM3Model"
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    default_head_dim = 128


class SeedOss(DecoderCard):
    """SeedOssForCausalLM (ByteDance 2025): biases by `attention_bias`, `attention_out_bias` and `mlp_bias`."""

    body = "engine_models.llama_shaped:SeedOssModel"
    default_head_dim = 128


class MiniCPM(DecoderCard):
    """MiniCPMForCausalLM: MiniCPM 1B and 2B (2024): Granite's multipliers under other names."""

    body = "engine_models.llama_shaped:MiniCPMModel"
    foreign: ClassVar[Mapping[str, Any]] = {"num_experts": 0}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Multipliers that make no sense."""
        for key in ("scale_emb", "scale_depth", "dim_model_base"):
            number(config, key, 1.0)
        return []
