"""The cards of T5 and mT5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine_kit.model_config import flag, integer
from engine_models.encoder_decoder_card import EncoderDecoderCard


class T5(EncoderDecoderCard):
    """T5ForConditionalGeneration (Raffel et al. 2020): T5, T5 1.1, Flan-T5, ByT5."""

    body = "engine_models.t5:T5Model"
    operations = frozenset((*EncoderDecoderCard.operations, "relu", "gelu_mul"))
    defaults: ClassVar[Mapping[str, Any]] = {
        "vocab_size": 32128,
        "d_model": 512,
        "d_kv": 64,
        "d_ff": 2048,
        "num_layers": 6,
        "num_heads": 8,
        "relative_attention_num_buckets": 32,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "relu",
        "n_positions": 512,
        "pad_token_id": 0,
        "eos_token_id": 1,
    }
    heads = "num_heads"
    encoder_layers = "num_layers"
    decoder_layers = "num_decoder_layers"
    positions = "n_positions"
    activation = "feed_forward_proj"
    activations: ClassVar[Mapping[str, str]] = {"relu": "relu", "gated-gelu": "gelu_tanh", "gated-silu": "silu"}
    start = "pad_token_id"

    @classmethod
    def filled(cls, config: Mapping[str, Any]) -> dict[str, Any]:
        """With as many layers in the decoder as in the encoder, where it does not say."""
        filled = super().filled(config)
        return {"num_decoder_layers": filled["num_layers"], **filled}

    @classmethod
    def head_size(cls, config: dict[str, Any]) -> int:
        """The config's own."""
        return integer(config, "d_kv")

    @classmethod
    def scaled(cls, config: Mapping[str, Any]) -> bool:
        """Whether hidden states are scaled before the head: where, as the first T5 has it, it is the embedding. Newer
        transformers say so by a key of its own."""
        filled = cls.filled(config)
        return flag(filled, "scale_decoder_outputs", flag(filled, "tie_word_embeddings", True))

    @classmethod
    def features(cls, config: dict[str, Any]) -> dict[str, Any]:
        """Scores have a bias for the distance of the key."""
        return {"attention_features": ("relative_bias",)}

    @classmethod
    def widths(cls, config: dict[str, Any]) -> dict[str, int]:
        """By key, sizes that ranks divide."""
        return {"d_ff": integer(config, "d_ff")}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Buckets that cannot be halved; what newer transformers write beside `feed_forward_proj`, and is another."""
        reasons, kind = [], str(config["feed_forward_proj"])
        derived = {"dense_act_fn": "gelu_new" if kind == "gated-gelu" else kind.partition("-")[2] or kind}
        for key, value in (derived | {"is_gated_act": kind.startswith("gated-")}).items():
            if config.get(key, value) != value:
                reasons.append(f"the config sets {key} to {config[key]!r}, which is not that of {kind!r}")
        buckets = integer(config, "relative_attention_num_buckets")
        farthest = integer(config, "relative_attention_max_distance")
        if buckets % 4 or farthest <= buckets // 2:
            reasons.append(f"relative_attention_num_buckets {buckets} with relative_attention_max_distance {farthest}")
        return reasons


class MT5(T5):
    """MT5ForConditionalGeneration (Xue et al. 2021)."""

    body = "engine_models.t5:MT5Model"
    defaults: ClassVar[Mapping[str, Any]] = {
        **T5.defaults,
        "vocab_size": 250112,
        "d_ff": 1024,
        "num_layers": 8,
        "num_heads": 6,
        "feed_forward_proj": "gated-gelu",
    }

    @classmethod
    def scaled(cls, config: Mapping[str, Any]) -> bool:
        """None is."""
        return False
