"""The card of gpt-oss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import flag, integer, number
from engine_kit.routing import ExpertAct, RouteForm
from engine_models.decoder_card import windows_by_type
from engine_models.experts_card import ExpertsCard

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Of a config that says nothing."""


class GptOss(ExpertsCard):
    """GptOssForCausalLM (OpenAI 2025): sinks, windows in every other layer, biases, a clamped gate in experts."""

    body = "engine_models.gpt_oss:GptOssModel"
    inner = "intermediate_size"
    default_head_dim = 64
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150000.0,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """With yarn where the config has no rotary parameters."""
        found = super().filled(config)
        if not found.get("rope_scaling") and not found.get("rope_parameters"):
            found["rope_parameters"] = _YARN
        return found

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """By `layer_types`, else of the first, the third, and so on."""
        return windows_by_type(config, pattern=2, default=128)

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Each head has a sink."""
        return {"attention_features": ("sinks",)}

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """A softmax over the chosen experts alone."""
        return RouteForm(integer(config, "num_experts_per_tok"), renormalise=True, biased_logits=True)

    @classmethod
    def clamped(cls, config: Mapping[str, Any]) -> ExpertAct:
        """The experts' gate."""
        alpha, limit = number(config, "swiglu_alpha"), number(config, "swiglu_limit")
        return ExpertAct("clamped", alpha=alpha, limit=limit)

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Nothing; what the config says is read."""
        flag(config, "attention_bias", True)
        cls.clamped(config)
        return super().more_unsupported(config)
