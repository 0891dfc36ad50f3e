"""The card of Mixtral, as a stranger wrote it from the documentation. It imports nothing heavy."""

from __future__ import annotations

from typing import Any

from engine.interfaces.model import ModelCard, ModelNeed
from engine.types.errors import EngineError
from engine.types.model import ModelDescription
from engine_kit.model_config import describe_decoder, integer, read_rope, unsupported_ranks, unsupported_rope


def experts(config: dict[str, Any]) -> tuple[int, int]:
    """(how many experts a layer has, how many of them a token goes to)."""
    return integer(config, "num_local_experts", 8), integer(config, "num_experts_per_tok", 2)


class MixtralCard(ModelCard):
    """MixtralForCausalLM (Jiang et al. 2024): a decoder whose feed-forward blocks are mixtures of experts."""

    priority = 1  # before the driver of this architecture in engine-models
    framework = "torch"
    quantized = frozenset({"linear", "head"})
    captured_by = frozenset()  # each expert looks for its tokens, in plain torch
    body = "engine_mixtral.body:Mixtral"

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """What config.json says, in the engine's words."""
        window = None if config.get("sliding_window") is None else integer(config, "sliding_window")
        return describe_decoder(config, windows=(window,) * integer(config, "num_hidden_layers"))

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """What this config asks for that the body does not have."""
        config, reasons = need.config, []
        if config.get("hidden_act", "silu") not in ("silu", "swish"):
            reasons.append(f"hidden_act {config['hidden_act']!r} is not 'silu'")
        try:
            total, chosen = experts(config)
            if chosen > total:
                reasons.append(f"num_experts_per_tok is {chosen}, of {total} experts")
            reasons += unsupported_rope(config)
            if not reasons:
                model, inner = cls.describe(config), integer(config, "intermediate_size")
                reasons += unsupported_ranks(model, need.parallel.tp, intermediate_size=inner)
                if read_rope(config, model.kv_specs[0].head_size).rotary_dim != model.kv_specs[0].head_size:
                    reasons.append("the config rotates a part of each head, and the body whole heads")
        except EngineError as error:
            reasons.append(str(error))
        return reasons
