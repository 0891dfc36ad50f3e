"""The cards of BART and of models of its form: mBART, Marian."""

from __future__ import annotations

from typing import Any, ClassVar

from engine_kit.model_config import bad_key, integer
from engine_models.decoder_card import GELU
from engine_models.encoder_decoder_card import EncoderDecoderCard

_SIZES = {
    "vocab_size": 50265,
    "d_model": 1024,
    "max_position_embeddings": 1024,
    "scale_embedding": False,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
}


class Bart(EncoderDecoderCard):
    """BartForConditionalGeneration (Lewis et al. 2020)."""

    body = "engine_models.bart:BartModel"
    operations = frozenset((*EncoderDecoderCard.operations, "relu"))
    batch_invariant = False  # with silu, which is torch's
    defaults: ClassVar[dict[str, Any]] = {**_SIZES, "eos_token_id": 2, "bos_token_id": 0, "activation_function": "gelu"}
    activations: ClassVar[dict[str, str]] = {**GELU, "relu": "relu", "silu": "silu", "swish": "silu"}
    foreign: ClassVar[dict[str, Any]] = {"tie_word_embeddings": True}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """Stacks whose heads differ, and bad words that are no ids."""
        cls.never_drawn(config)
        ours, theirs = config[cls.heads], config["encoder_attention_heads"]
        return [] if ours == theirs else [f"the encoder has {theirs} heads and the decoder {ours}"]

    @classmethod
    def never_drawn(cls, config: dict[str, Any]) -> list[int]:
        """The ids of `bad_words_ids`, by which Marian's checkpoints keep its padding out. Raises CheckpointError for
        words of several tokens, and for what are no ids."""
        words = config.get("bad_words_ids") or []
        vocabulary = range(integer(config, "vocab_size"))
        if not isinstance(words, list) or any(
            not isinstance(word, list) or len(word) != 1 or type(word[0]) is not int or word[0] not in vocabulary
            for word in words
        ):
            raise bad_key(config, "bad_words_ids", "it is no list of words of one token each")
        return [word[0] for word in words]


class MBart(Bart):
    """MBartForConditionalGeneration (Liu et al. 2020): norms before the blocks, and behind each stack."""

    body = "engine_models.bart:MBartModel"
    start = "bos_token_id"


class Marian(Bart):
    """MarianMTModel (Junczys-Dowmunt et al. 2018): sinusoidal positions, no norm of the embedding."""

    body = "engine_models.bart:MarianModel"
    start = "pad_token_id"
    defaults: ClassVar[dict[str, Any]] = {
        **_SIZES,
        "vocab_size": 58101,
        "activation_function": "gelu",
        "eos_token_id": 0,
        "pad_token_id": 58100,
        "share_encoder_decoder_embeddings": True,
    }
    foreign: ClassVar[dict[str, Any]] = {"tie_word_embeddings": True, "share_encoder_decoder_embeddings": True}

    @classmethod
    def more_unsupported(cls, config: dict[str, Any]) -> list[str]:
        """And vocabularies that differ."""
        ours = config.get("decoder_vocab_size", config["vocab_size"])
        other = [] if ours == config["vocab_size"] else [f"decoder_vocab_size {ours} is another than vocab_size"]
        return [*super().more_unsupported(config), *other]
