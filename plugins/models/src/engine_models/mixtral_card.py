"""The cards of Mixtral and OLMoE, whose layers all have routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import flag, integer
from engine_kit.routing import RouteForm
from engine_models.experts_card import ExpertsCard


class Mixtral(ExpertsCard):
    """MixtralForCausalLM (2024): Mistral's form, with a softmax over the chosen experts."""

    body = "engine_models.mixtral:MixtralModel"
    count = ("num_local_experts", "num_experts")
    inner = "intermediate_size"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
    }

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """`sliding_window`, of all layers; null is full attention."""
        window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
        return (window,) * integer(config, "num_hidden_layers")

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """Always renormalised."""
        return RouteForm(integer(config, "num_experts_per_tok"), renormalise=True)


class Olmoe(ExpertsCard):
    """OlmoeForCausalLM (Ai2 2024): norms of all heads of queries and keys together."""

    body = "engine_models.mixtral:OlmoeModel"
    inner = "intermediate_size"
    defaults: ClassVar[Mapping[str, Any]] = {"num_experts": 64, "num_experts_per_tok": 8, "rms_norm_eps": 1e-5}
    foreign: ClassVar[Mapping[str, Any]] = {"clip_qkv": None}

    @classmethod
    def bias(cls, config: Mapping[str, Any]) -> bool:
        """Whether the projections of attention have biases."""
        return flag(config, "attention_bias", False)
