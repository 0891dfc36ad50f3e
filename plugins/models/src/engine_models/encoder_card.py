"""The cards of encoders that embed and classify: what they have in common, and GTE, Nomic, JinaBERT and ModernBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import msgspec

from engine.interfaces.model import ModelCard, ModelFeature, ModelNeed
from engine.interfaces.ops import MODEL_OPERATIONS
from engine.types.errors import EngineError
from engine.types.model import KVSpec, ModelDescription
from engine.types.pooling import PoolingType
from engine_kit.model_config import (
    architecture,
    bad_key,
    classifier,
    embedder,
    head_dim,
    integer,
    number,
    read_rope,
    rope_parameters,
    stored_dtype,
    unsupported_ranks,
    unsupported_rope,
)
from engine_models.decoder_card import GELU, SILU, windows_by_type
from engine_models.rope_by_type import rope_of


class EncoderCard(ModelCard):
    """Base of encoders' cards. All that follows `filled` gets the config with transformers' keys.

    Attributes:
        defaults: of the architecture's config class.
        activation: the key of the activation; `activations`: its values, and what the body's layers call them.
        foreign: keys that change the computation in a way that the body does not have: with the values that do not.
        pooling_type: of embeddings, where no file says another.
        classifies: it has a classification head.
        rotary: its places are rotary.
    """

    framework = "torch"
    quantized = frozenset({"linear"})
    operations = frozenset((*MODEL_OPERATIONS, "gelu_mul"))
    defaults: ClassVar[Mapping[str, Any]] = {}
    activation: ClassVar[str] = "hidden_act"
    activations: ClassVar[Mapping[str, str]] = GELU
    foreign: ClassVar[Mapping[str, Any]] = {}
    pooling_type: ClassVar[PoolingType] = "cls"
    classifies: ClassVar[bool] = False
    rotary: ClassVar[bool] = True

    if TYPE_CHECKING:  # mypy takes a class that nobody may make objects of for a function, without class methods

        def __new__(cls) -> Self: ...

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """The config with what it leaves out, in transformers' words. Raises CheckpointError."""
        return {**cls.defaults, **config}

    @classmethod
    def act(cls, config: Mapping[str, Any]) -> Any:
        """What the body's layers call the config's activation."""
        return cls.activations[config.get(cls.activation, next(iter(cls.activations)))]

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """How many tokens each layer's tokens see to each side, themselves included; None: all."""
        return (None,) * integer(config, "num_hidden_layers")

    @classmethod
    def ropes(cls, config: dict[str, Any]) -> list[dict[str, Any]]:
        """The config for each set of rotary parameters that the model has."""
        return [config] if cls.rotary else []

    @classmethod
    def pooled_by(cls, config: dict[str, Any]) -> PoolingType:
        """How, where no file says another."""
        return cls.pooling_type

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        given, config = config, cls.filled(config)
        heads, size = integer(config, "num_attention_heads"), head_dim({**config, "head_dim": None})
        kind, make = cls.pooled_by(config), classifier if cls.classifies else embedder
        return ModelDescription(
            architecture=architecture(config),
            dtype=stored_dtype(config),
            vocab_size=integer(config, "vocab_size"),
            hidden_size=integer(config, "hidden_size"),
            num_layers=integer(config, "num_hidden_layers"),
            num_q_heads=heads,
            max_model_len=integer(config, "max_position_embeddings"),
            kv_specs=tuple(
                KVSpec(kind="encoder", num_kv_heads=heads, head_size=size, sliding_window=window)
                for window in cls.windows(config)
            ),
            attention_features=() if cls.rotary else ("alibi",),
            config=dict(given),
            generates=False,
            pooler=make(config, kind),
            num_token_types=integer(config, "type_vocab_size", 0, low=0),
        )

    @classmethod
    def unsupported_features(cls) -> frozenset[ModelFeature]:
        """It is small: all of its layers are on every rank."""
        return frozenset({"stages"})

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """The config's features that the body does not have."""
        try:
            config = cls.filled(need.config)
        except EngineError as error:
            return [str(error)]
        reasons = []
        given = config.get(cls.activation, next(iter(cls.activations)))
        if not isinstance(given, str) or given not in cls.activations:
            reasons.append(f"{cls.activation} {given!r} is none of {', '.join(cls.activations)}")
        for key, neutral in cls.foreign.items():
            if config.get(key, neutral) not in (None, neutral):
                reasons.append(f"the config sets {key} to {config[key]!r}, which the model's body does not have")
        try:
            model = cls.describe(need.config)
            inner, size = integer(config, "intermediate_size"), model.kv_specs[0].head_size
            if config.get("head_dim") not in (None, size):
                reasons.append(f"head_dim {config['head_dim']!r} is not hidden_size / num_attention_heads = {size}")
            reasons += [reason for rope in cls.ropes(config) for reason in unsupported_rope(rope)]
            if not reasons and any(read_rope(rope, size).rotary_dim != size for rope in cls.ropes(config)):
                reasons.append(f"a part of {size} elements would be rotated, this architecture rotates whole heads")
            reasons += unsupported_ranks(model, need.parallel.tp, intermediate_size=inner)
        except EngineError as error:
            reasons.append(str(error))
        return reasons


class Gte(EncoderCard):
    """GteModel, and NewModel (gte-*-v1.5 and gte-multilingual-base, Zhang et al. 2024)."""

    body = "engine_models.encoders:GteModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "type_vocab_size": 1,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 8192,
        "hidden_act": "gelu",
    }
    foreign: ClassVar[Mapping[str, Any]] = {
        "position_embedding_type": "rope",
        "layer_norm_type": "layer_norm",
        "logn_attention_scale": False,
        "logn_attention_clip1": False,
        "pack_qkv": True,
    }
    theta: ClassVar[float] = 160_000.0

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Rotary parameters of kind "ntk" in the words of "linear": theta times the factor, and all angles divided by
        factor ** (2 / head_size)."""
        config = super().filled(config)
        rope = rope_parameters(config)
        rope.setdefault("rope_theta", cls.theta)
        if rope["rope_type"] == "ntk":
            factor = number(rope, "factor")
            if rope.get("mixed_b") is not None:
                raise bad_key(config, "rope_scaling", "mixed_b is set, which the model's body does not have")
            theta, size = number(rope, "rope_theta"), head_dim({**config, "head_dim": None})
            rope = {"rope_type": "linear", "rope_theta": theta * factor, "factor": factor ** (2 / size)}
        return {**config, "rope_scaling": None, "rope_parameters": rope}


class GteClassifier(Gte):
    """GteForSequenceClassification, and NewForSequenceClassification (gte-multilingual-reranker-base)."""

    body = "engine_models.encoders:GteForClassification"
    classifies = True


_NOMIC = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
    "rotary_emb_fraction": "partial_rotary_factor",
}
"""The keys of the first files -> transformers'."""


class Nomic(EncoderCard):
    """NomicBertModel (nomic-embed-text v1 and v1.5, Nussbaum et al. 2024)."""

    body = "engine_models.encoders:NomicBertModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "max_position_embeddings": 2048,
    }
    activations: ClassVar[Mapping[str, str]] = {**SILU, "swiglu": "silu"}
    foreign: ClassVar[Mapping[str, Any]] = {
        "prenorm": False,
        "causal": False,
        "parallel_block": False,
        "use_rms_norm": False,
        "qkv_proj_bias": False,
        "mlp_fc1_bias": False,
        "mlp_fc2_bias": False,
        "rotary_emb_interleaved": False,
        "rotary_emb_scale_base": None,
        "num_experts": 0,
    }
    pooling_type = "mean"

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """No more positions than it was trained with: beyond them its first code stretches rotary angles, by the length
        of each prompt."""
        named = {new: config[old] for old, new in _NOMIC.items() if config.get(old) is not None}
        config = {**super().filled(config), **named}
        if "n_embd" in config:
            config["hidden_act"] = config.get("activation_function", "swiglu")
            if config.get("max_trained_positions", 2048) is not None:
                trained = integer(config, "max_trained_positions", 2048)
                config["max_position_embeddings"] = min(integer(config, "max_position_embeddings"), trained)
        rope = rope_parameters(config)
        rope.setdefault("rope_theta", 1000.0)
        return {**config, "rope_scaling": None, "rope_parameters": rope}


class JinaBert(EncoderCard):
    """JinaBertForMaskedLM and JinaBertModel (jina-embeddings-v2-small-en and -base-en, Guenther et al. 2023)."""

    body = "engine_models.encoders:JinaBertModel"
    defaults: ClassVar[Mapping[str, Any]] = {
        "type_vocab_size": 2,
        "layer_norm_eps": 1e-12,
        "feed_forward_type": "original",
        "position_embedding_type": "absolute",
    }
    rotary = False

    @classmethod
    def unsupported(cls, need: ModelNeed) -> list[str]:
        """Also other feed-forward blocks than geglu, and places that are not ALiBi's."""
        reasons, config = super().unsupported(need), cls.filled(need.config)
        for key, only in {"feed_forward_type": "geglu", "position_embedding_type": "alibi"}.items():
            if config[key] != only:
                reasons.append(f"{key} {config[key]!r} is not {only!r}")
        return reasons

    @classmethod
    def pooled_by(cls, config: dict[str, Any]) -> PoolingType:
        """By `emb_pooler`."""
        return "mean" if config.get("emb_pooler", "mean") == "mean" else "cls"


class ModernBert(EncoderCard):
    """ModernBertModel (ModernBERT-base and -large, gte-modernbert-base; Warner et al. 2024)."""

    body = "engine_models.encoders:ModernBertModel"
    activation = "hidden_activation"
    defaults: ClassVar[Mapping[str, Any]] = {
        "norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "local_attention": 128,
        "classifier_pooling": "cls",
        "classifier_activation": "gelu",
    }
    foreign: ClassVar[Mapping[str, Any]] = {"rope_scaling": None, "sliding_window": None}

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """Each `global_attn_every_n_layers`-th layer sees all, from the first on; the norms' eps by its usual name."""
        config = super().filled(config)
        if config.get("layer_types") is None:
            every = integer(config, "global_attn_every_n_layers", 3)
            kinds = ("sliding_attention", "full_attention")
            config["layer_types"] = [kinds[i % every == 0] for i in range(integer(config, "num_hidden_layers"))]
        return {**config, "layer_norm_eps": config["norm_eps"]}

    @classmethod
    def windows(cls, config: dict[str, Any]) -> tuple[int | None, ...]:
        """`local_attention` has half of its tokens on each side; beside the token itself."""
        return windows_by_type({**config, "sliding_window": integer(config, "local_attention") // 2 + 1})

    @classmethod
    def ropes(cls, config: dict[str, Any]) -> list[dict[str, Any]]:
        """Those of layers that see everything, and of layers with a window."""
        of_all = {**config, "rope_theta": config.get("global_rope_theta")}
        return [
            rope_of(of_all, "full_attention", 160_000.0),
            rope_of(config, "sliding_attention", 10_000.0, "local_rope_theta"),
        ]


class ModernBertClassifier(ModernBert):
    """ModernBertForSequenceClassification: classifies by its first token, or by the mean."""

    body = "engine_models.encoders:ModernBertForClassification"
    classifies = True

    @classmethod
    def pooled_by(cls, config: dict[str, Any]) -> PoolingType:
        """By `classifier_pooling`."""
        kind = config["classifier_pooling"]
        if kind not in ("cls", "mean"):
            raise bad_key(config, "classifier_pooling", f"{kind!r} is neither 'cls' nor 'mean'")
        return "cls" if kind == "cls" else "mean"

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        given = cls.filled(config)["classifier_activation"]
        if not isinstance(given, str) or given not in cls.activations:
            raise bad_key(config, "classifier_activation", f"{given!r} is none of {', '.join(cls.activations)}")
        return super().describe(config)


class ModernBertTokenClassifier(ModernBertClassifier):
    """ModernBertForTokenClassification: labels each token."""

    @classmethod
    def describe(cls, config: dict[str, Any]) -> ModelDescription:
        """The description; raises as `ModelCard.describe` says."""
        model = super().describe(config)
        return msgspec.structs.replace(model, pooler=msgspec.structs.replace(model.pooler, token_labels=True))
