"""A tiny random Whisper with a tokenizer of bytes, sounds, and what transformers writes of them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, WhisperConfig, WhisperForConditionalGeneration

from engine_models.log_mel import RATE, log_mel
from engine_sdk.conformance.model.small import quiet

END, START, EN, DE, TRANSLATE, TRANSCRIBE, LM, PREVIOUS, NO_SPEECH, NO_TIMESTAMPS = range(256, 266)
FIRST = NO_TIMESTAMPS + 1
VOCAB = FIRST + 1501
LENGTH = 40
SPECIAL = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev",
           "nospeech", "notimestamps")  # fmt: skip
GENERATION = {
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
    "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE},
    "is_multilingual": True,
    "suppress_tokens": [5, 17, 40, NO_SPEECH, START, PREVIOUS, LM, EN, DE, TRANSLATE, TRANSCRIBE],
    "begin_suppress_tokens": [220, END],
    "max_initial_timestamp_index": 50,
    "prev_sot_token_id": PREVIOUS,
}


def sound(seconds: float, seed: int = 1) -> np.ndarray:
    """A rising tone in noise."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).normal(size=time.size)
    return (0.3 * np.sin(2 * np.pi * (200 + 90 * seed * time) * time) + 0.02 * noise).astype(np.float32)


def file_of(samples: np.ndarray, rate: int = RATE, kind: str = "WAV", **more: Any) -> bytes:
    """A file of this kind."""
    written = io.BytesIO()
    soundfile.write(written, samples, rate, format=kind, **more)
    return written.getvalue()


def make(folder: Path) -> WhisperForConditionalGeneration:
    """Save it; the model."""
    torch.manual_seed(3)
    config = WhisperConfig(
        vocab_size=VOCAB, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_target_positions=LENGTH, init_std=0.3,
        decoder_start_token_id=START, bos_token_id=END, eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(f"<|{name}|>", special=True) for name in SPECIAL])
    backend.add_tokens([AddedToken(f"<|{step * 0.02:.2f}|>") for step in range(1501)])
    with quiet(), torch.no_grad():
        model = WhisperForConditionalGeneration(config).eval()
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(std=0.3)
        for name, value in GENERATION.items():
            setattr(model.generation_config, name, value)
        model.generation_config.max_length = LENGTH
        model.save_pretrained(folder)
        PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>").save_pretrained(folder)
    return model


def written(model: WhisperForConditionalGeneration, samples: np.ndarray, timestamps: bool, task: str) -> list[int]:
    """What transformers' own loop writes of a short sound in English, greedily; without what the decoder began with."""
    features = torch.from_numpy(log_mel(samples).T[None].copy())
    with quiet(), torch.no_grad():
        found = model.generate(
            features, language="en", task=task, return_timestamps=timestamps, do_sample=False,
            force_unique_generate_call=True,
        )  # fmt: skip
    ids = found[0].tolist()
    begin = [START, EN, TRANSCRIBE if task == "transcribe" else TRANSLATE, *([] if timestamps else [NO_TIMESTAMPS])]
    ids = ids[len(begin) :] if ids[: len(begin)] == begin else ids
    return ids[: ids.index(END)] if END in ids else ids
