"""Whisper: features beside transformers' extractor, and greedy tokens of sounds through the whole engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import VOCAB_SIZE, tokenizer
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

from engine import LLM, SamplingParams
from engine.types.errors import InvalidRequestError
from engine_models.log_mel import RATE, log_mel
from engine_sdk.conformance.model.small import quiet

TOKENS = 6
POSITIONS = 1500


def sound(seconds: float, seed: int) -> np.ndarray:
    """A rising tone in noise."""
    time = np.arange(int(seconds * RATE)) / RATE
    noise = np.random.default_rng(seed).normal(size=time.size)
    return (0.3 * np.sin(2 * np.pi * (200 + 90 * seed * time) * time) + 0.02 * noise).astype(np.float32)


@pytest.mark.parametrize(("seconds", "bins"), [(1.3, 80), (30.0, 128), (31.7, 80), (0.0, 80)])
def test_features(seconds: float, bins: int) -> None:
    """As transformers computes them: shorter and longer than the encoder reads, and silence."""
    given = sound(seconds, 3)
    extractor = WhisperFeatureExtractor(feature_size=bins)
    expected = extractor(given if len(given) else np.zeros(1, np.float32), sampling_rate=RATE, return_tensors="np")
    np.testing.assert_allclose(log_mel(given, bins), expected.input_features[0].T, atol=2e-4)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros(9, np.int16), r"int16 \[9\]"),
        (np.zeros((9, 2), np.float32), r"float32 \[9, 2\]"),
        (np.array([0.1, np.nan]), "no numbers"),
        (np.array([0.1, np.inf]), "infinite"),
    ],
)
def test_what_is_no_sound(given: np.ndarray, said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        log_mel(given)


def make(folder: Path, features: list[np.ndarray], start: list[int]) -> list[list[int]]:
    """Save a tiny random Whisper; give its likeliest tokens, one after the other, behind a beginning."""
    torch.manual_seed(0)
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE, d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=24, max_target_positions=40, init_std=0.3,
        max_source_positions=POSITIONS, decoder_start_token_id=2, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        begin_suppress_tokens=None, suppress_tokens=None,
    )  # fmt: skip
    with quiet(), torch.no_grad():
        model = WhisperForConditionalGeneration(config).eval()
        for name, tensor in model.named_parameters():
            if name.endswith("bias"):
                tensor.normal_(std=0.3)
        model.save_pretrained(folder)
        tokenizer().save_pretrained(folder)
        answers = []
        for one in features:
            ids = list(start)
            for _ in range(TOKENS):
                given: Any = {"input_features": torch.from_numpy(one.T[None].copy())}
                ids.append(int(model(**given, decoder_input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
            answers.append(ids[len(start) :])
        return answers


def test_sounds(tmp_path: Path) -> None:
    """Two sounds, one of them twice, with a decoder's prompt; what is no features is refused."""
    features, start = [log_mel(sound(seconds, seed)) for seed, seconds in ((1, 2.0), (2, 30.0))], [2, 9, 17]
    answers = make(tmp_path, features, start)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    llm = LLM(model=str(tmp_path), dtype="float32", max_num_seqs=2, num_kv_pages=20)
    try:
        asked = [{"encoder_prompt": one, "decoder_prompt": start} for one in (*features, features[0])]
        found = [output.outputs[0].token_ids for output in llm.generate(asked, params, use_tqdm=False)]
        assert found == [*answers, answers[0]]
        for given, said in (
            ("text", "features, no text"),
            (features[0][:, :79], r"shape \[3000, 79\]"),
            (features[0][:3], r"shape \[3, 80\]"),
            (features[0] * np.nan, "finite"),
        ):
            with pytest.raises(InvalidRequestError, match=said):
                llm.generate([{"encoder_prompt": given}], params, use_tqdm=False)
    finally:
        llm.shutdown()
