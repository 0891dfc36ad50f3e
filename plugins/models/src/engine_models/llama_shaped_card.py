"""The cards of decoders that compute as Llama does, and whose checkpoints say it otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import bad_key, integer, number
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


class Baichuan(DecoderCard):
    """BaichuanForCausalLM, BaiChuanForCausalLM: Baichuan and Baichuan 2 (2023): queries, keys and values in one tensor.

    Those of 7B have rotary positions, and say so by `max_position_embeddings`; those of 13B have ALiBi, and
    `model_max_length` alone.

    Attributes:
        normed_vocabulary: Baichuan 2's size, by which its head is told from the first one's; the config has nothing
            else of it (vLLM does so too).
    """

    body = "engine_models.llama_shaped:BaichuanModel"
    normed_vocabulary: ClassVar[int] = 125696

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """With `alibi`, and the length under one name."""
        alibi = config.get("max_position_embeddings") is None
        if alibi and config.get("model_max_length") is None:
            raise bad_key(config, "max_position_embeddings", "it is missing, and so is 'model_max_length'")
        length = integer(config, "model_max_length" if alibi else "max_position_embeddings")
        return {**super().filled(config), "alibi": alibi, "max_position_embeddings": length}

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Distances instead of positions, where the config has them."""
        return {"attention_features": ("alibi",)} if config["alibi"] else {}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """A 13B whose config says what only those of 7B do: one of both is wrong."""
        if config["hidden_size"] != 5120 or config["alibi"]:
            return []
        return [
            "max_position_embeddings stands for rotary positions, and the models with a hidden_size of 5120 have none"
        ]
