"""The card of Whisper."""

from __future__ import annotations

from typing import Any, ClassVar

from engine.types.model import EncoderForm
from engine_kit.model_config import integer
from engine_models.bart_card import Bart

STRIDE = 2
"""Frames of log-mel features for each of the encoder's tokens."""


class Whisper(Bart):
    """WhisperForConditionalGeneration (Radford et al. 2022): its encoder reads log-mel features of sound."""

    body = "engine_models.whisper:WhisperModel"
    positions = "max_target_positions"
    defaults: ClassVar[dict[str, Any]] = {
        "vocab_size": 51865,
        "num_mel_bins": 80,
        "d_model": 384,
        "activation_function": "gelu",
        "encoder_layers": 4,
        "encoder_ffn_dim": 1536,
        "encoder_attention_heads": 6,
        "max_source_positions": 1500,
        "decoder_layers": 4,
        "decoder_ffn_dim": 1536,
        "decoder_attention_heads": 6,
        "max_target_positions": 448,
        "decoder_start_token_id": 50257,
        "eos_token_id": 50256,
        "bos_token_id": 50256,
    }
    foreign: ClassVar[dict[str, Any]] = {"tie_word_embeddings": True, "scale_embedding": False}

    @classmethod
    def encoder(cls, config: dict[str, Any]) -> EncoderForm:
        """Frames of features."""
        return EncoderForm(
            max_tokens=integer(config, "max_source_positions"),
            features=integer(config, "num_mel_bins"),
            stride=STRIDE,
            decoder_prompt=cls.beginning(config),
        )
