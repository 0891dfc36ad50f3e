"""The cards of the Llama family: one for each architecture, with what transformers' own class of it reads."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.interfaces.model import ModelCard, ModelNeed
from engine.interfaces.ops import MODEL_OPERATIONS
from engine.types.errors import EngineError
from engine.types.model import ModelDescription
from engine.types.pooling import PoolerConfig
from engine_kit.model_config import (
    describe_decoder,
    integer,
    layer_windows,
    read_rope,
    unsupported_ranks,
    unsupported_rope,
)
from engine_kit.pooled_decoders import Classifier, Embedder, Reward

_SILU = ("silu", "swish")

_FOREIGN = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "query_pre_attn_scalar": None,
    "attention_multiplier": None,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "logits_scaling": 1.0,
    "logit_scale": 1.0,
    "clip_qkv": None,
    "attn_temperature_tuning": False,
    "num_local_experts": None,
    "num_experts": None,
}
"""Keys of related architectures that change the computation, with the value that changes nothing. transformers'
classes for the Llama family ignore them; a config that sets one means another model."""


class _Family(ModelCard):
    """What the four have in common."""

    framework = "torch"
    takes_embeds = True
    quantized = frozenset({"linear", "head", "embedding"})
    default_head_dim: ClassVar[int | None] = None

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """Each layer's sliding window; None: it sees everything."""
        return (None,) * integer(config, "num_hidden_layers")

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        return describe_decoder(config, windows=cls.windows(config), default_head_dim=cls.default_head_dim)

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        config = need.config
        reasons = []
        if config.get("hidden_act", "silu") not in _SILU:
            reasons.append(f"hidden_act {config['hidden_act']!r} is not 'silu'")
        for key, neutral in _FOREIGN.items():
            if config.get(key, neutral) not in (None, neutral):
                reasons.append(f"the config sets {key} to {config[key]!r}, which this architecture does not have")
        try:
            reasons.extend(unsupported_rope(config) or cls._unsupported_parts(config, need.parallel.tp))
        except EngineError as error:
            reasons.append(str(error))
        return reasons

    @classmethod
    def _unsupported_parts(cls, config: dict[str, Any], tp: int) -> list[str]:
        model = cls.describe(config)
        head_size = model.kv_specs[0].head_size
        rotated = read_rope(config, head_size).rotary_dim
        inner = integer(config, "intermediate_size")
        reasons = [*cls.more_unsupported(config), *unsupported_ranks(model, tp, intermediate_size=inner)]
        if rotated != head_size:
            reasons.append(f"{rotated} of {head_size} elements would be rotated, this architecture rotates whole heads")
        return reasons

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Reasons of the one architecture."""
        return []


class Llama(_Family):
    """LlamaForCausalLM: biases by `attention_bias` and `mlp_bias`, full attention in every layer."""

    body = "engine_reference.models.llama:LlamaModel"

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Layer types are not Llama's."""
        return _other_layer_types(config, "full_attention")


class Mistral(_Family):
    """MistralForCausalLM: no biases, one sliding window for every layer (4096 where the config is silent)."""

    body = "engine_reference.models.llama:MistralModel"

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """`sliding_window`; null is full attention."""
        window = integer(config, "sliding_window", 4096) if config.get("sliding_window", 4096) is not None else None
        return (window,) * integer(config, "num_hidden_layers")

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Layer types are Ministral's."""
        kind = "full_attention" if config.get("sliding_window", 4096) is None else "sliding_attention"
        return _other_layer_types(config, kind)


class Qwen2(_Family):
    """Qwen2ForCausalLM: biases of queries, keys and values; a sliding window in the layers that the config names."""

    body = "engine_reference.models.llama:Qwen2Model"

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """By `layer_types`, or `use_sliding_window` and `max_window_layers`."""
        return layer_windows(config, default_window=4096)


class Qwen3(Qwen2):
    """Qwen3ForCausalLM: norms of each head's queries and keys, heads of 128, biases by `attention_bias`."""

    body = "engine_reference.models.llama:Qwen3Model"
    default_head_dim = 128


def _other_layer_types(config: dict[str, Any], kind: str) -> list[str]:
    types = config.get("layer_types")
    if not types or all(name == kind for name in types):
        return []
    return [f"layer_types names other layers than {kind!r}, which this architecture does not have"]


class LlamaEmbedder(Embedder, Llama):
    """LlamaModel."""


class MistralEmbedder(Embedder, Mistral):
    """MistralModel."""


class Qwen2Embedder(Embedder, Qwen2):
    """Qwen2Model."""


class Qwen3Embedder(Embedder, Qwen3):
    """Qwen3Model."""


class LlamaClassifier(Classifier, Llama):
    """LlamaForSequenceClassification."""


class MistralClassifier(Classifier, Mistral):
    """MistralForSequenceClassification."""


class Qwen2Classifier(Classifier, Qwen2):
    """Qwen2ForSequenceClassification."""


class Qwen3Classifier(Classifier, Qwen3):
    """Qwen3ForSequenceClassification."""


class Qwen2Reward(Reward, Qwen2):
    """Qwen2ForRewardModel (Qwen2.5-Math-RM, 2024): one number, which is not bounded."""

    body = "engine_reference.models.llama:Qwen2RewardModel"
    operations = frozenset((*MODEL_OPERATIONS, "relu"))


class Qwen2ProcessReward(Qwen2Reward):
    """Qwen2ForProcessRewardModel (Qwen2.5-Math-PRM, 2025): of each step, whether it is wrong (0) or right (1)."""

    pooler = PoolerConfig(num_labels=2, token_labels=True)
