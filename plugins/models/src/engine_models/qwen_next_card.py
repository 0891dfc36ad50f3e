"""The cards of Qwen3-Next, and of its layer for further tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from engine.interfaces.ops import MODEL_OPERATIONS
from engine.types.model import ModelDescription
from engine_kit.model_config import bad_key, flag, integer, number, unsupported_ranks
from engine_kit.routing import RouteForm
from engine_models.qwen_moe_card import Qwen2Moe
from engine_moe.ops_moe.card import OPERATIONS
from engine_states.delta_form import DeltaForm
from engine_states.ops_states.card import OPERATIONS as STATE_OPERATIONS

LINEAR, FULL = "linear_attention", "full_attention"


class Qwen3Next(Qwen2Moe):
    """Qwen3NextForCausalLM (2025): gated delta nets, each fourth layer attention with gates; Qwen2-MoE's experts."""

    body = "engine_models.qwen_next:Qwen3NextModel"
    operations = frozenset(MODEL_OPERATIONS) | OPERATIONS | STATE_OPERATIONS
    batch_invariant = False
    """Its drafts' states are computed token by token, a prompt's in chunks."""
    partial = True
    default_head_dim = 256
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.25,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
    }

    @classmethod
    def delta(cls, config: Mapping[str, Any]) -> DeltaForm:
        """Of every gated delta net. Raises CheckpointError where a key makes no sense."""
        keys, values = integer(config, "linear_num_key_heads", 16), integer(config, "linear_num_value_heads", 32)
        if values % keys:
            raise bad_key(config, "linear_num_value_heads", f"{values} is no multiple of linear_num_key_heads = {keys}")
        return DeltaForm(
            hidden_size=integer(config, "hidden_size"),
            key_heads=keys,
            key_size=integer(config, "linear_key_head_dim", 128),
            value_heads=values,
            value_size=integer(config, "linear_value_head_dim", 128),
            kernel=integer(config, "linear_conv_kernel_dim", 4, low=2),
            eps=number(config, "rms_norm_eps", 1e-6),
        )

    @classmethod
    def types(cls, config: Mapping[str, Any]) -> list[str]:
        """Each layer's, by `layer_types`, else every `full_attention_interval`-th attends."""
        layers, given = range(integer(config, "num_hidden_layers")), config.get("layer_types")
        if given is None:
            every = integer(config, "full_attention_interval", 4)
            return [LINEAR if (index + 1) % every else FULL for index in layers]
        if not isinstance(given, (list, tuple)) or len(given) != len(layers):
            raise bad_key(config, "layer_types", f"it does not name a type for each of the {len(layers)} layers")
        for kind in given:
            if kind not in (LINEAR, FULL):
                raise bad_key(config, "layer_types", f"{kind!r} is neither {LINEAR!r} nor {FULL!r}")
        return list(given)

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """Nowhere."""
        return (None,) * integer(config, "num_hidden_layers")

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """As `DecoderCard.describe`, with states where layers are gated delta nets."""
        model, filled = super().describe(config), cls.filled(config)
        kept = cls.delta(filled).spec
        kinds = zip(cls.types(filled), model.kv_specs, strict=True)
        return msgspec.structs.replace(
            model, kv_specs=tuple(kept if kind == LINEAR else attends for kind, attends in kinds)
        )

    @classmethod
    def num_experts(cls, config: Mapping[str, Any]) -> int:
        """0: all layers are dense."""
        return integer(config, "num_experts", low=0)

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """As `ExpertsCard.form`; weights add up to 1 where the config is silent."""
        return super().form(cls.filled(config))

    @classmethod
    def sparse(cls, config: Mapping[str, Any]) -> list[bool]:
        """As `Qwen3Moe.sparse`; none where there are no experts."""
        return [one and cls.num_experts(config) > 0 for one in super().sparse(config)]

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Raises as `describe`."""
        flag(config, "attention_bias", False)
        return super().more_unsupported(config) if any(cls.sparse(config)) else []

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        sizes = {key: integer(config, key, 16) for key in ("linear_num_key_heads", "shared_expert_intermediate_size")}
        return super()._unsupported_parts(config, tp) or unsupported_ranks(cls.describe(config), tp, **sizes)


class Qwen3NextMTP(Qwen3Next):
    """Qwen3NextMTP, of a Qwen3NextForCausalLM's own config and files: its layer for further tokens, which attends."""

    body = "engine_models.qwen_next:Qwen3NextMTPModel"

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """Of one layer."""
        alone = {**config, "num_hidden_layers": 1, "layer_types": [FULL]}
        return msgspec.structs.replace(super().describe(alone), config=dict(config))
