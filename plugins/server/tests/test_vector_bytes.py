"""Vectors as bytes: the numbers that torch rounds to, in each format."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_server.pooling.vector_bytes import EmbedDType, vector_bytes

FORMATS: dict[EmbedDType, tuple[torch.dtype, str]] = {
    "float32": (torch.float32, "f4"),
    "float16": (torch.float16, "i2"),
    "bfloat16": (torch.bfloat16, "i2"),
    "fp8_e4m3": (torch.float8_e4m3fn, "i1"),
    "fp8_e5m2": (torch.float8_e5m2, "i1"),
}
EDGES = [
    0.0,
    -0.0,
    1.0,
    448.0,
    464.0,
    464.1,
    -480.0,
    57344.0,
    61439.9,
    61440.0,
    65519.0,
    65520.0,
    1e30,
    2.0**-9,
    2.0**-10,
]
EDGES += [3 * 2.0**-10, 2.0**-16, 2.0**-17, 3 * 2.0**-17, 1.0625, 1.1875, -1.0625, float("inf"), float("-inf")]


def torch_bytes(vector: np.ndarray, dtype: EmbedDType) -> bytes:
    made, code = FORMATS[dtype]
    tensor = torch.from_numpy(vector).to(torch.float32).to(made)
    whole = {"i2": torch.int16, "i1": torch.uint8, "f4": torch.float32}[code]
    return tensor.view(whole).numpy().tobytes()


@pytest.mark.parametrize("dtype", FORMATS)
def test_edges(dtype: EmbedDType) -> None:
    vector = np.array(EDGES, np.float32)
    assert vector_bytes(vector, dtype, "native") == torch_bytes(vector, dtype)


@pytest.mark.parametrize("dtype", FORMATS)
@given(numbers=st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_as_torch_rounds(dtype: EmbedDType, numbers: list[float]) -> None:
    vector = np.array(numbers, np.float32)
    assert vector_bytes(vector, dtype, "native") == torch_bytes(vector, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_order_of_bytes(dtype: EmbedDType) -> None:
    matrix = np.arange(12, dtype=np.float64).reshape(3, 4) / 7
    little, big = vector_bytes(matrix, dtype, "little"), vector_bytes(matrix, dtype, "big")
    size = len(little) // 12
    assert [little[i : i + size] for i in range(0, len(little), size)] == [
        big[i : i + size][::-1] for i in range(0, len(big), size)
    ]
    assert vector_bytes(matrix, dtype, "native") == (little if sys.byteorder == "little" else big)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8_e4m3", "fp8_e5m2"])
def test_no_number_stays_none(dtype: EmbedDType) -> None:
    made, code = FORMATS[dtype]
    content = bytearray(vector_bytes(np.array([np.nan, 1.0], np.float32), dtype, "native"))
    whole = torch.frombuffer(content, dtype=torch.int16 if code == "i2" else torch.uint8)
    assert torch.isnan(whole.view(made).float()).tolist() == [True, False]
