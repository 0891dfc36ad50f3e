"""The card of Jamba."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import bad_key, flag, integer, number
from engine_kit.routing import RouteForm
from engine_models.experts_card import ExpertsCard
from engine_models.hybrid_card import HybridCard
from engine_moe.ops_moe.card import OPERATIONS
from engine_states.forms import Mamba1Form


class Jamba(HybridCard, ExpertsCard):
    """JambaForCausalLM (AI21 2024): Mamba's mixer in most layers, attention without positions in the others, and routed
    experts in every second one."""

    body = "engine_models.jamba:JambaModel"
    operations = HybridCard.operations | OPERATIONS
    quantized = HybridCard.quantized | {"expert"}
    inner = "intermediate_size"
    defaults: ClassVar[Mapping[str, Any]] = {"num_key_value_heads": 8, "num_experts": 16, "num_experts_per_tok": 2}

    @classmethod
    def mixer(cls, config: Mapping[str, Any]) -> Mamba1Form:
        """Of every mixer."""
        size, auto = integer(config, "hidden_size"), config.get("mamba_dt_rank", "auto") in (None, "auto")
        return Mamba1Form(
            hidden_size=size,
            inner=int(number(config, "mamba_expand", 2) * size),
            state=integer(config, "mamba_d_state", 16),
            kernel=integer(config, "mamba_d_conv", 4, low=2),
            dt_rank=-(-size // 16) if auto else integer(config, "mamba_dt_rank"),
            bias=flag(config, "mamba_proj_bias", False),
            conv_bias=flag(config, "mamba_conv_bias", True),
            norm_eps=number(config, "rms_norm_eps", 1e-6),
        )

    @classmethod
    def mixes(cls, config: Mapping[str, Any]) -> list[bool]:
        """All but the `attn_layer_offset`-th of each `attn_layer_period` layers."""
        return [not attends for attends in _turns(config, "attn_layer", 8, 4)]

    @classmethod
    def sparse(cls, config: Mapping[str, Any]) -> list[bool]:
        """Whether each layer has routed experts; none where there is but one. `config` is filled."""
        return [one and cls.num_experts(config) > 1 for one in _turns(config, "expert_layer", 2, 1)]

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """The best of a softmax, as it is."""
        return RouteForm(integer(config, "num_experts_per_tok"))

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Raises as `describe`."""
        return super().more_unsupported(config) if any(cls.sparse(config)) else []


def _turns(config: Mapping[str, Any], word: str, period: int, offset: int) -> list[bool]:
    """Whether each layer is the `offset`-th of a `period`, counted from 0. Raises CheckpointError."""
    every, first = integer(config, f"{word}_period", period), integer(config, f"{word}_offset", offset, low=0)
    if first >= every:
        raise bad_key(config, f"{word}_offset", f"{first} is not below {word}_period = {every}")
    return [index % every == first for index in range(integer(config, "num_hidden_layers"))]
