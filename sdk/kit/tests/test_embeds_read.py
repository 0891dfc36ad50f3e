"""Embeddings in place of tokens: what is taken, what is refused, and that they give what tokens give."""

from __future__ import annotations

import base64
import contextlib
import json
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from engine.process import wire
from engine.types.embeds import BFLOAT16, PromptEmbeds
from engine.types.errors import InvalidRequestError, PromptTooLongError
from engine.types.model import KVSpec, ModelDescription
from engine.types.params import SamplingParams
from engine.types.pooling import PoolingParams
from engine_kit.prompt_embeds import embeds_of, read_text

SIZE, LONGEST = 8, 16
MODEL = ModelDescription(
    architecture="A", dtype="float32", vocab_size=9, hidden_size=SIZE, num_layers=1, num_q_heads=1, max_model_len=99,
    kv_specs=(KVSpec(kind="full", num_kv_heads=1, head_size=8),), prompt_embeds=True,
)  # fmt: skip
VECTORS = torch.randn(3, SIZE, generator=torch.Generator().manual_seed(1))
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def made(given: Any, params: Any = SamplingParams(), model: ModelDescription = MODEL) -> PromptEmbeds:  # noqa: B008
    return embeds_of(given, model, LONGEST, params)


def encoded(tensor: torch.Tensor, name: str = "x", **metadata: str) -> bytes:
    return save({name: tensor.contiguous()}, metadata or None)


def sent(content: bytes) -> PromptEmbeds:
    return read_text(base64.b64encode(content).decode(), MODEL, LONGEST)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_an_array_and_a_file_are_the_same(dtype: torch.dtype) -> None:
    tensor = VECTORS.to(dtype)
    taken = [made(tensor), made(tensor.t().contiguous().t()), sent(encoded(tensor)), sent(encoded(tensor, "y", a="b"))]
    if dtype != torch.bfloat16:
        taken.append(made(tensor.numpy()))
    assert len({one.key for one in taken}) == 1
    for one in taken:
        there = wire.decoder(PromptEmbeds).decode(wire.encode(one))
        bits = there.data.dtype.metadata == BFLOAT16.metadata
        found = torch.from_numpy(there.data.copy())
        assert torch.equal(found.view(torch.bfloat16) if bits else found, tensor)


def test_a_key_is_of_dtype_shape_and_numbers() -> None:
    others = [VECTORS, VECTORS[:2], VECTORS + 1, VECTORS.half(), VECTORS.bfloat16(), VECTORS.double()]
    assert len({made(one).key for one in others}) == len(others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_have_to_fit_the_models_dtype(dtype: torch.dtype) -> None:
    """The largest are taken; those above are infinite where the engine computes with them."""
    model = msgspec.structs.replace(MODEL, dtype=str(dtype).removeprefix("torch."))
    most = torch.finfo(dtype).max
    made(torch.full((2, SIZE), most, dtype=torch.float64), model=model)
    for above in (most * 1.01, -most * 1.01):
        with pytest.raises(InvalidRequestError, match=f"finite numbers in {model.dtype}"):
            made(torch.full((2, SIZE), above, dtype=torch.float64), model=model)
    if dtype == torch.float16:
        with pytest.raises(InvalidRequestError, match="finite numbers in float16"):
            made(torch.full((2, SIZE), 1e5, dtype=torch.bfloat16), model=model)


def test_the_callers_array_is_copied() -> None:
    array = VECTORS.numpy().copy()
    taken = made(array)
    array[:] = 0
    assert np.array_equal(taken.data, VECTORS.numpy())
    assert made(taken) is taken


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([[0.0] * SIZE], "neither a tensor nor an array"),
        (VECTORS.to(torch.int32), "torch.int32"),
        (VECTORS.to(torch.float8_e4m3fn), "float8"),
        (np.zeros((2, SIZE), np.int64), "int64"),
        (VECTORS[0], "shape"),
        (VECTORS[None], "shape"),
        (VECTORS[:0], "shape"),
        (VECTORS[:, :-1], "8 elements"),
        (VECTORS / 0, "finite"),
        (VECTORS.bfloat16() / 0, "finite"),
        (torch.full((2, SIZE), -1e39, dtype=torch.float64), "finite numbers in float32"),
    ],
)
def test_what_is_refused(given: Any, found: str) -> None:
    with pytest.raises(InvalidRequestError, match=found):
        made(given)


def test_too_many() -> None:
    assert len(made(torch.zeros(LONGEST - 1, SIZE)).data) == LONGEST - 1
    with pytest.raises(PromptTooLongError):
        made(torch.zeros(LONGEST, SIZE))
    with pytest.raises(PromptTooLongError):
        sent(encoded(torch.zeros(LONGEST, SIZE)))
    with pytest.raises(PromptTooLongError):
        sent(b"\0" * 1000 * SIZE * LONGEST)


def test_who_takes_none() -> None:
    off = msgspec.structs.replace(MODEL, prompt_embeds=False)
    with pytest.raises(InvalidRequestError, match="--enable-prompt-embeds"):
        made(VECTORS, model=off)
    with pytest.raises(InvalidRequestError, match="--enable-prompt-embeds"):
        read_text("", off, LONGEST)
    with pytest.raises(InvalidRequestError, match="pools"):
        made(VECTORS, PoolingParams())
    with pytest.raises(InvalidRequestError, match="no log probabilities"):
        made(VECTORS, SamplingParams(prompt_logprobs=0))


def header(content: bytes, **changed: Any) -> bytes:
    """The same file with other entries for its tensor."""
    size = int.from_bytes(content[:8], "little")
    entry = json.loads(content[8 : 8 + size])
    entry["x"] |= changed
    text = json.dumps(entry).encode()
    return len(text).to_bytes(8, "little") + text + content[8 + size :]


FILE = encoded(VECTORS)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"\x80\x04", b"PK\x03\x04" * 8, FILE[:-1], FILE + b"\0", FILE[:20], b"\xff" * 8 + FILE[8:],
        save({"a": VECTORS, "b": VECTORS + 1}), save({}), encoded(VECTORS.int()), encoded(VECTORS[0]),
        header(FILE, shape=[3, -8]), header(FILE, shape=[3.0, 8]), header(FILE, shape=[True, 24]),
        header(FILE, shape=[1 << 40, 1 << 40]), header(FILE, shape=None), header(FILE, data_offsets=[0, 95]),
        header(FILE, data_offsets=[1, 96]), header(FILE, data_offsets=[0]), header(FILE, dtype="F8_E4M3"),
        header(FILE, dtype=["F32"]), len(b"[]").to_bytes(8, "little") + b"[]",
        (2000).to_bytes(8, "little") + b"[" * 2000,
    ],
)  # fmt: skip
def test_files_that_are_none(content: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        sent(content)


def test_text_that_is_no_base64() -> None:
    for text in ("gAR9", "%%%%", "a", "äöü"):
        with pytest.raises(InvalidRequestError, match="prompt_embeds"):
            read_text(text, MODEL, LONGEST)


@given(st.integers(0, len(FILE) - 1), st.integers(0, 255))
def test_damaged_files(place: int, byte: int) -> None:
    """Taken, or refused by name."""
    damaged = bytearray(FILE)
    damaged[place] = byte
    with contextlib.suppress(InvalidRequestError):
        assert sent(bytes(damaged)).data.shape[1] == SIZE
