"""Vectors as bytes, in the number formats that vLLM's clients may ask for (its `embed_dtype` and `endianness`)."""

from __future__ import annotations

import functools
import sys
from typing import Literal

import numpy as np

EmbedDType = Literal["float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"]
Endianness = Literal["native", "little", "big"]


def vector_bytes(vector: np.ndarray, dtype: EmbedDType, endianness: Endianness) -> bytes:
    """The numbers of an array of any shape in order, each rounded to the nearest one (of two, to the even one).

    What is too large becomes infinite; in `fp8_e4m3`, which has no infinity, the largest number, 448 (Micikevicius et
    al. 2022, "FP8 formats for deep learning"). So it does in torch.
    """
    codes = _codes(vector, dtype)
    order = sys.byteorder if endianness == "native" else endianness
    return codes.astype(codes.dtype.newbyteorder("<" if order == "little" else ">"), copy=False).tobytes()


def _codes(vector: np.ndarray, dtype: EmbedDType) -> np.ndarray:
    if dtype == "fp8_e4m3":
        return _rounded(vector, 4, 3, 0x7E)
    if dtype == "fp8_e5m2":
        return _rounded(vector, 5, 2, 0x7C)
    with np.errstate(over="ignore"):
        if dtype == "float16":
            return vector.astype(np.float16)
        single = vector.astype(np.float32)
    return _bfloat16(single) if dtype == "bfloat16" else single


def _bfloat16(single: np.ndarray) -> np.ndarray:
    """The upper halves of the numbers' bits, rounded."""
    bits = single.view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return np.where(np.isnan(single), 0x7FC0, rounded >> np.uint32(16)).astype(np.uint16)


def _rounded(vector: np.ndarray, exponent_bits: int, mantissa_bits: int, last: int) -> np.ndarray:
    """The codes of 8-bit numbers; `last` is that of the largest magnitude."""
    single = vector.astype(np.float32).astype(np.float64)
    middles = _middles(exponent_bits, mantissa_bits, last)
    below = np.searchsorted(middles, np.abs(single), side="left")
    halfway = (below < last) & (np.abs(single) == middles[np.minimum(below, last - 1)])
    codes = np.where(halfway, below + (below & 1), below)
    codes = np.where(np.isnan(single), 0x7F, codes)
    return (codes | np.where(np.signbit(single), 0x80, 0)).astype(np.uint8)


@functools.cache
def _middles(exponent_bits: int, mantissa_bits: int, last: int) -> np.ndarray:
    """The numbers halfway between neighbouring magnitudes."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    exponents, fractions = np.divmod(np.arange(last + 1), steps)
    magnitudes = np.ldexp(
        np.where(exponents > 0, steps, 0) + fractions, np.maximum(exponents, 1) - bias - mantissa_bits
    )
    return (magnitudes[1:] + magnitudes[:-1]) / 2
