"""The cards of Phi-2, of Phi-3 and Phi-4, and of Phi-3.5-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import bad_key, flag, integer, number, rope_parameters
from engine_kit.routing import RouteForm
from engine_models.decoder_card import GELU, DecoderCard
from engine_models.experts_card import ExpertsCard


class Phi(DecoderCard):
    """PhiForCausalLM: Phi-1, Phi-1.5, Phi-2 (2023). A part of each head is rotated."""

    body = "engine_models.phi:PhiModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "gelu_new",
        "partial_rotary_factor": 0.5,
        "layer_norm_eps": 1e-5,
    }
    activations = GELU
    partial = True


class Phi3(DecoderCard):
    """Phi3ForCausalLM: Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini (2024). Long contexts by longrope."""

    body = "engine_models.phi:Phi3Model"
    defaults: ClassVar[Mapping[str, Any]] = {"rms_norm_eps": 1e-5}
    partial = True

    @classmethod
    def filled(cls, config: Any) -> dict[str, Any]:
        """The first files say "su" or "yarn" and mean longrope. Without a scaling there is no other original length."""
        config = super().filled(config)
        for key in ("rope_scaling", "rope_parameters"):
            rope = config.get(key)
            if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in ("su", "yarn", "longrope"):
                config[key] = {**rope, "rope_type": "longrope"}
                config.setdefault("original_max_position_embeddings", 4096)
        return config

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """`sliding_window`, of every layer; null is full attention."""
        window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
        return (window,) * integer(config, "num_hidden_layers")


class Phimoe(ExpertsCard):
    """PhimoeForCausalLM: Phi-3.5-MoE (2024). Layer norms, experts that are chosen one after the other, longrope whose
    factors of cosines and sines stand in the config."""

    body = "engine_models.phi:PhimoeModel"
    inner = "intermediate_size"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_local_experts": 16,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "router_jitter_noise": 0.01,
    }

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """`sliding_window`, of every layer; null is full attention."""
        return Phi3.windows(config)

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """One after the other: `router_jitter_noise` says which others weigh against an expert."""
        return RouteForm(integer(config, "num_experts_per_tok"), jitter=number(config, "router_jitter_noise"))

    @classmethod
    def attention_factor(cls, config: Mapping[str, Any], max_model_len: int) -> float | None:
        """Of cosines and sines; None: they are plain. Raises CheckpointError where longrope's is missing."""
        rope = rope_parameters(config)
        if rope["rope_type"] == "default":
            return None
        original = integer(rope, "original_max_position_embeddings", integer(config, "max_position_embeddings"))
        original = integer(config, "original_max_position_embeddings", original)
        key = "long_mscale" if max_model_len > original else "short_mscale"
        return number({"architectures": config["architectures"], **rope}, key)

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Other numbers of experts a token, other rotary scaling."""
        if integer(config, "num_experts_per_tok") != 2:
            raise bad_key(config, "num_experts_per_tok", "it is not 2: this routing chooses two")
        for key in ("attention_bias", "lm_head_bias"):
            flag(config, key, False)
        if rope_parameters(config)["rope_type"] not in ("default", "longrope"):
            return [f"rope_type {rope_parameters(config)['rope_type']!r} is neither 'default' nor 'longrope'"]
        for length in (1, 1 << 62):
            cls.attention_factor(config, length)
        return super().more_unsupported(config)
