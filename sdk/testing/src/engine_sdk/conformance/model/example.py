"""A small config that most architectures understand, and weights drawn for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any
from zlib import crc32

import numpy as np
import torch

from engine.types.model import ModelDescription

Shapes = Mapping[str, tuple[int, ...]]
"""A checkpoint's tensors: name -> shape."""

SMALL: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": 99,  # odd, so that ranks hold different numbers of rows
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-2,  # much larger than models have them, so that another eps shows
        "layer_norm_eps": 1e-2,
        "rope_theta": 100.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "tie_word_embeddings": False,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_labels": 3,
    }
)
"""config.json in Hugging Face's words; `small.small_config` puts it into an architecture's own."""
LARGEST = 4_000_000
"""Parameters of the largest model that a suite takes: it makes each some hundred times."""
FIRST_TOKEN = 3
"""Prompts are drawn from here on: padding ids have positions of their own in some models."""


def draw(shapes: Shapes, changed: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Stream float32 tensors, the same each time: no bias is 0 and no norm is 1, so that a forgotten one shows.

    changed: this one gets other numbers.
    """
    for name, shape in shapes.items():
        random = torch.Generator().manual_seed(crc32(f"{name} changed".encode() if name == changed else name.encode()))
        if name.endswith("bias"):
            tensor = torch.empty(shape).normal_(0.0, 0.3, generator=random)
        elif len(shape) == 1:
            tensor = torch.empty(shape).uniform_(0.5, 1.5, generator=random)
        else:
            tensor = torch.empty(shape).normal_(0.0, 1.2 * math.prod(shape[-1:]) ** -0.5, generator=random)
        yield name, tensor


def check_size(shapes: Shapes) -> None:
    """Raise ValueError where these make a model that is too large for a suite."""
    size = sum(math.prod(shape) for shape in shapes.values())
    if size > LARGEST:
        raise ValueError(
            f"this config makes a model of {size:,} parameters, the suite takes {LARGEST:,} at most: give it a smaller "
            "one, config = {...} or --model-config FILE"
        )


def prompt(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    random = torch.Generator().manual_seed(1000 * seed + length)
    found: list[int] = torch.randint(FIRST_TOKEN, vocab_size, (length,), generator=random).tolist()
    return found


def encoder_input(model: ModelDescription, number: int = 0) -> np.ndarray:
    """What the encoder of an encoder-decoder model reads, `engine.types.request.EncoderInput.data`: ids of 7 tokens,
    and 5 more with each number, where it reads as many; features of as many as it reads."""
    form = model.encoder
    assert form is not None
    tokens = form.max_tokens if form.features else min(7 + 5 * number, form.max_tokens)
    if not form.features:
        return np.array(prompt(tokens, model.vocab_size, 100 + number), np.int32)
    return np.random.default_rng(number).normal(size=(tokens * form.stride, form.features)).astype(np.float32)
