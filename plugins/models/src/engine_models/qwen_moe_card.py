"""The cards of Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import bad_key, flag, integer, layer_windows
from engine_models.experts_card import ExpertsCard


class Qwen3Moe(ExpertsCard):
    """Qwen3MoeForCausalLM (2025): norms of each head's queries and keys; some layers may be dense."""

    body = "engine_models.qwen_moe:Qwen3MoeModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_key_value_heads": 4,
    }

    @classmethod
    def num_experts(cls, config: Mapping[str, Any]) -> int:
        """transformers 5 writes `num_local_experts`, which goes before the default of `num_experts`."""
        return integer(config, "num_local_experts", integer(config, "num_experts"))

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """One window for all layers, where `use_sliding_window` says so."""
        window = None
        if flag(config, "use_sliding_window", False) and config.get("sliding_window", 4096) is not None:
            window = integer(config, "sliding_window", 4096)
        return (window,) * integer(config, "num_hidden_layers")

    @classmethod
    def sparse(cls, config: Mapping[str, Any]) -> list[bool]:
        """Whether each layer has routed experts: by `mlp_only_layers` and `decoder_sparse_step`."""
        plain, step = config.get("mlp_only_layers") or [], integer(config, "decoder_sparse_step", 1)
        if not isinstance(plain, (list, tuple)) or not all(isinstance(one, int) for one in plain):
            raise bad_key(config, "mlp_only_layers", f"it is {plain!r:.80}, not a list of layers")
        layers = range(integer(config, "num_hidden_layers"))
        if beyond := [one for one in plain if one not in layers]:
            raise bad_key(config, "mlp_only_layers", f"of {len(layers)} layers none has the number {beyond[0]}")
        return [index not in plain and (index + 1) % step == 0 for index in layers]

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Raises CheckpointError as `sparse`."""
        cls.sparse(config)
        return super().more_unsupported(config)


class Qwen2Moe(Qwen3Moe):
    """Qwen2MoeForCausalLM (2024): biases of queries, keys and values, and a shared expert behind a gate."""

    body = "engine_models.qwen_moe:Qwen2MoeModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    }

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """By `layer_types`; a config that has none and asks for windows leaves open which layers have one."""
        if config.get("layer_types") is None and flag(config, "use_sliding_window", False):
            raise bad_key(config, "layer_types", "it is missing, and use_sliding_window asks for it")
        return layer_windows(config, default_window=4096)

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """The shared expert has a size, too."""
        integer(config, "shared_expert_intermediate_size")
        return super().more_unsupported(config)
