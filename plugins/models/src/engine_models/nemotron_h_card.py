"""The card of Nemotron-H and Nemotron 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import bad_key, flag, integer, number, unsupported_ranks
from engine_models.experts_card import GroupsCard
from engine_models.hybrid_card import HybridCard
from engine_moe.ops_moe.card import OPERATIONS
from engine_states.forms import Mamba2Form

MIXER, ATTENTION, DENSE, SPARSE = "linear_attention", "full_attention", "mlp", "moe"
_LETTERS = {"M": MIXER, "*": ATTENTION, "-": DENSE, "E": SPARSE}
_OLD = {"mamba": MIXER, "attention": ATTENTION}
_KEYS = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_min": "time_step_min",
}
"""What some configs call a key -> what it is called here."""


class NemotronH(HybridCard):
    """NemotronHForCausalLM (NVIDIA 2025, 2026): every layer is one block behind one norm: Mamba-2's mixer, attention
    without positions, a feed-forward block, or routed experts without gates."""

    body = "engine_models.nemotron_h:NemotronHModel"
    operations = HybridCard.operations | OPERATIONS | {"relu"}
    quantized = HybridCard.quantized | {"expert"}
    activation = "mlp_hidden_act"
    activations: ClassVar[Mapping[str, str]] = {"relu2": "relu2", "relu": "relu"}
    default_head_dim = 128
    foreign: ClassVar[Mapping[str, Any]] = {
        "mamba_hidden_act": "silu",
        "attention_bias": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
    }
    routing = GroupsCard
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_key_value_heads": 8,
        "intermediate_size": 21504,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    }

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """There are as many layers as have a type."""
        renamed = {_KEYS.get(key, key): value for key, value in config.items()}
        return {**super().filled(renamed), "num_hidden_layers": len(cls.types(config))}

    @classmethod
    def types(cls, config: Mapping[str, Any]) -> list[str]:
        """Each layer's, by `layers_block_type`, else by the letters of `hybrid_override_pattern`."""
        key, names = "layers_block_type", {**_OLD, **{name: name for name in _LETTERS.values()}}
        if config.get(key) is None:
            key, names = "hybrid_override_pattern", _LETTERS
        given = config.get(key)
        if not isinstance(given, (list, tuple, str)) or not given:
            raise bad_key(config, key, f"it is {given!r}, which names no type for each layer")
        for kind in given:
            if kind not in names:
                raise bad_key(config, key, f"{kind!r} is none of {', '.join(names)}")
        return [names[kind] for kind in given]

    @classmethod
    def mixer(cls, config: Mapping[str, Any]) -> Mamba2Form:
        """Of every layer that has one."""
        heads, groups = integer(config, "mamba_num_heads", 128), integer(config, "n_groups", 8)
        if heads % groups:
            raise bad_key(config, "n_groups", f"{heads} heads do not stand in {groups} groups of one size")
        return Mamba2Form(
            hidden_size=integer(config, "hidden_size"),
            heads=heads,
            head_size=integer(config, "mamba_head_dim", 64),
            groups=groups,
            state=integer(config, "ssm_state_size", 128),
            kernel=integer(config, "conv_kernel", 4, low=2),
            eps=number(config, "layer_norm_epsilon", 1e-5),
            dt_limit=(number(config, "time_step_min", 0.001), float("inf")),
            bias=flag(config, "use_bias", False),
            conv_bias=flag(config, "use_conv_bias", True),
        )

    @classmethod
    def mixes(cls, config: Mapping[str, Any]) -> list[bool]:
        """By their types."""
        return [kind == MIXER for kind in cls.types(config)]

    @classmethod
    def attends(cls, config: Mapping[str, Any]) -> list[bool]:
        """By their types."""
        return [kind == ATTENTION for kind in cls.types(config)]

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Routing that makes no sense."""
        if config.get("moe_latent_size") is not None:
            integer(config, "moe_latent_size")
        return cls.routing.more_unsupported(config) if SPARSE in cls.types(config) else []

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        reasons = super()._unsupported_parts(config, tp)
        if reasons or SPARSE not in cls.types(config):
            return reasons
        keys = ("moe_intermediate_size", "moe_shared_expert_intermediate_size")
        return unsupported_ranks(cls.describe(config), tp, **{key: integer(config, key) for key in keys})
