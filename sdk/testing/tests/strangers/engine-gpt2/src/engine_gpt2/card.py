"""The card of GPT-2, as a stranger wrote it from the documentation. It imports nothing heavy."""

from __future__ import annotations

from typing import Any

from engine.interfaces.model import ModelCard, ModelFeature, ModelNeed
from engine.types.errors import EngineError
from engine.types.model import KVSpec, ModelDescription
from engine_kit.model_config import architecture, bad_key, integer, stored_dtype, token_ids, unsupported_ranks

ACTIVATIONS = {"gelu": False, "gelu_new": True, "gelu_pytorch_tanh": True}
"""activation_function -> whether it is gelu's approximation by tanh."""


def inner_size(config: dict[str, Any]) -> int:
    """Of the feed-forward block."""
    return integer(config, "n_inner", 4 * integer(config, "n_embd"))


class GPT2Card(ModelCard):
    """GPT2LMHeadModel (Radford et al. 2019): learned positions, norms before each block, matrices stored turned."""

    framework = "torch"
    priority = 1  # before the driver of this architecture in engine-models
    quantized = frozenset({"linear", "head"})
    body = "engine_gpt2.body:GPT2"

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """What config.json says, in the engine's words."""
        layers, heads, size = (integer(config, key) for key in ("n_layer", "n_head", "n_embd"))
        if size % heads:
            raise bad_key(config, "n_embd", f"{size} is no multiple of n_head = {heads}")
        bos = token_ids(config, "bos_token_id")
        return ModelDescription(
            architecture=architecture(config),
            dtype=stored_dtype(config),
            vocab_size=integer(config, "vocab_size"),
            hidden_size=size,
            num_layers=layers,
            num_q_heads=heads,
            max_model_len=integer(config, "n_positions"),
            kv_specs=(KVSpec(kind="full", num_kv_heads=heads, head_size=size // heads),) * layers,
            eos_token_ids=token_ids(config, "eos_token_id"),
            bos_token_id=bos[0] if bos else None,
            config=dict(config),
        )

    @classmethod
    def unsupported_features(cls) -> frozenset[ModelFeature]:
        """The body builds all layers on every rank."""
        return frozenset({"stages"})

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """What this config asks for that the body does not have."""
        config, reasons = need.config, []
        if config.get("activation_function", "gelu_new") not in ACTIVATIONS:
            reasons.append(f"activation_function {config['activation_function']!r} is none of {', '.join(ACTIVATIONS)}")
        if config.get("add_cross_attention"):
            reasons.append("the config sets add_cross_attention, which it does not have")
        try:
            reasons += unsupported_ranks(cls.describe(config), need.parallel.tp, n_inner=inner_size(config))
        except EngineError as error:
            reasons.append(str(error))
        return reasons
