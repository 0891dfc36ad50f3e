"""The cards of DeepSeek's decoders with latent attention, V2 and V3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from engine.interfaces.model import ModelCard, ModelNeed
from engine.interfaces.ops import MODEL_OPERATIONS
from engine.types.errors import EngineError
from engine.types.model import KVSpec, ModelDescription
from engine_kit.model_config import (
    describe_decoder,
    flag,
    integer,
    kv_heads,
    read_rope,
    unsupported_ranks,
    unsupported_rope,
)
from engine_kit.routing import RouteForm
from engine_models.experts_card import ExpertsCard, GroupsCard
from engine_moe.ops_moe.card import OPERATIONS

_SILU = ("silu", "swish")


class V2Experts(ExpertsCard):
    """DeepSeek-V2's routing: a softmax, whose groups are open by their best expert."""

    count = GroupsCard.count

    @classmethod
    def form(cls, config: Mapping[str, Any]) -> RouteForm:
        """By `topk_method`. Its weights are scaled, not renormalised: as in transformers, `norm_topk_prob` is nothing
        to it."""
        form = GroupsCard.form(config)
        grouped = config.get("topk_method") == "group_limited_greedy"
        groups, top_groups = (form.groups, form.top_groups) if grouped else (1, 1)
        return RouteForm(form.top_k, scale=form.scale, groups=groups, top_groups=top_groups)


class DeepseekCard(ModelCard):
    """What they have in common. Sizes that config.json does not name are transformers' own.

    Attributes:
        defaults: of routing.
        routing: how experts are chosen.
        mlp_bias: whether dense blocks may have biases.
        served: keys of routing, with the values that the body has.
    """

    framework = "torch"
    takes_embeds = True
    operations = frozenset((*MODEL_OPERATIONS, "linear_heads")) | OPERATIONS
    quantized = frozenset({"linear", "head", "expert"})
    defaults: ClassVar[Mapping[str, Any]]
    routing: ClassVar[type[ExpertsCard]]
    mlp_bias: ClassVar[bool] = False
    served: ClassVar[Mapping[str, tuple[str, ...]]]

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with what it leaves out."""
        return {**cls.defaults, **config}

    @classmethod
    def sparse(cls, config: Mapping[str, Any]) -> range:
        """The layers that have routed experts. null for `n_routed_experts` is none, as in DeepSeek's own code."""
        given, layers, config = config, cls._layers(config), cls.filled(config)
        if not given.get("n_routed_experts", given.get("num_local_experts", config["n_routed_experts"])):
            return range(0)
        return range(max(integer(config, "first_k_dense_replace", low=0), layers.start), layers.stop)

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        rope_size = integer(config, "qk_rope_head_dim", 64)
        spec = KVSpec(
            kind="mla",
            num_kv_heads=1,
            head_size=integer(config, "kv_lora_rank", 512) + rope_size,
            rope_size=rope_size,
        )
        plain = describe_decoder({**config, "head_dim": rope_size})  # what is rotated: other heads are not stored
        return msgspec.structs.replace(plain, kv_specs=(spec,) * plain.num_layers, config=dict(config))

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        config = need.config
        reasons = []
        if config.get("hidden_act", "silu") not in _SILU:
            reasons.append(f"hidden_act {config['hidden_act']!r} is not 'silu'")
        try:
            reasons.extend(cls._experts(config, 1 if need.parallel.ep else need.parallel.tp))
            reasons.extend(unsupported_rope(config) or cls._unsupported_parts(config, need.parallel.tp))
        except EngineError as error:
            reasons.append(str(error))
        return reasons

    @classmethod
    def _experts(cls, config: Mapping[str, Any], tp: int) -> list[str]:
        """What of the routing is not served; raises as `ExpertsCard.more_unsupported`."""
        if not cls.sparse(config):
            return []
        config = cls.filled(config)
        reasons = cls.routing.more_unsupported(config)
        for key, served in cls.served.items():
            if config.get(key) not in (None, *served):
                reasons.append(f"{key} {config[key]!r} is none of {', '.join(served)}")
        if integer(config, "moe_layer_freq", 1) != 1:
            reasons.append(f"moe_layer_freq is {config['moe_layer_freq']}, and experts in every layer are served")
        return reasons or unsupported_ranks(
            cls.describe(dict(config)), tp, moe_intermediate_size=integer(config, "moe_intermediate_size")
        )

    @classmethod
    def _layers(cls, config: Mapping[str, Any]) -> range:
        """Those that the body has."""
        return range(integer(config, "num_hidden_layers"))

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        model = cls.describe(config)
        rope_size = model.kv_specs[0].rope_size
        rotated = read_rope(config, rope_size).rotary_dim
        inner = integer(config, "intermediate_size")
        reasons = unsupported_ranks(model, tp, intermediate_size=inner)
        if rotated != rope_size:
            reasons.append(f"{rotated} of qk_rope_head_dim = {rope_size} elements would be rotated, not all of them")
        if kv_heads(config) != model.num_q_heads:
            reasons.append(
                f"num_key_value_heads is {config['num_key_value_heads']}, but every one of {model.num_q_heads} heads "
                "has keys and values of its own"
            )
        if config.get("q_lora_rank", 1536) is not None:
            integer(config, "q_lora_rank", 1536)
        for key in ("qk_nope_head_dim", "v_head_dim"):
            integer(config, key, 128)
        for key in ("attention_bias", "mlp_bias", "rope_interleave", "tie_word_embeddings"):
            flag(config, key, False)
        return reasons


class DeepseekV2(DeepseekCard):
    """DeepseekV2ForCausalLM: latent attention, rotary pairs that are neighbours."""

    body = "engine_models.deepseek:DeepseekV2Model"
    routing = V2Experts
    served: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
    }
    mlp_bias = True
    defaults: ClassVar[Mapping[str, Any]] = {
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "topk_method": "greedy",
        "first_k_dense_replace": 0,
    }


class DeepseekV3(DeepseekCard):
    """DeepseekV3ForCausalLM: latent attention, rotary pairs as `rope_interleave` says."""

    body = "engine_models.deepseek:DeepseekV3Model"
    routing = GroupsCard
    served: ClassVar[Mapping[str, tuple[str, ...]]] = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}
    defaults: ClassVar[Mapping[str, Any]] = {
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    }


class DeepseekMTP(DeepseekV3):
    """DeepSeekMTPModel, of a DeepseekV3ForCausalLM's own config and files: its layer for further tokens."""

    body = "engine_models.deepseek:DeepseekMTPModel"

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """Of one layer."""
        model = super().describe(config)
        return msgspec.structs.replace(model, num_layers=1, kv_specs=model.kv_specs[:1])

    @classmethod
    def _layers(cls, config: Mapping[str, Any]) -> range:
        behind = integer(config, "num_hidden_layers")
        return range(behind, behind + 1)
