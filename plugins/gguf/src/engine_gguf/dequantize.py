"""What ggml's blocks stand for, in plain torch: the published formulas (ggml-quants.c), one function a type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch

from engine_kit.ggml_blocks import TYPES

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_ROWS = 1 << 22
"""Weights that are worked out at once."""


def dequantize(stored: torch.Tensor, kind: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[..., blocks, bytes] of a type of blocks, or plain [..., I] -> [..., I] in `dtype`, by way of float32."""
    form = TYPES[kind]
    if form.plain:
        return stored.to(dtype)
    rows, wide = stored.flatten(0, -3), torch.float64 if dtype == torch.float64 else torch.float32
    inputs = stored.shape[-2] * form.inputs
    out = torch.empty((len(rows), inputs), dtype=dtype, device=stored.device)
    some = max(1, _ROWS // max(1, inputs))
    for start in range(0, len(rows), some):
        blocks = rows[start : start + some].flatten(0, 1)
        out[start : start + some] = _BLOCKS[kind](blocks, wide).reshape(-1, inputs)
    return out.view(*stored.shape[:-2], inputs)


def _half(b: torch.Tensor, at: int, wide: torch.dtype) -> torch.Tensor:
    """The float16 at a byte of each block -> [n, 1]."""
    return b[:, at : at + 2].contiguous().view(torch.float16).to(wide)


def _fields(b: torch.Tensor, run: int, shifts: tuple[int, ...], mask: int) -> torch.Tensor:
    """Fields of bytes [n, m]: of each run of bytes all that lie at the first shift, then those at the next."""
    by = torch.tensor(shifts, dtype=torch.uint8, device=b.device).view(1, 1, -1, 1)
    return ((b.reshape(len(b), -1, 1, run) >> by) & mask).flatten(1)


def _fifth(b: torch.Tensor) -> torch.Tensor:
    """The upper bits [n, 32] of 4 bytes."""
    by = torch.arange(8, dtype=torch.uint8, device=b.device)
    return ((b.unsqueeze(2) >> by) & 1).flatten(1) << 4


def _q4_0(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return _half(b, 0, wide) * (_fields(b[:, 2:], 16, (0, 4), 15).to(wide) - 8)


def _q4_1(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return _half(b, 0, wide) * _fields(b[:, 4:], 16, (0, 4), 15).to(wide) + _half(b, 2, wide)


def _q5_0(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return _half(b, 0, wide) * ((_fields(b[:, 6:], 16, (0, 4), 15) | _fifth(b[:, 2:6])).to(wide) - 16)


def _q5_1(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    codes = (_fields(b[:, 8:], 16, (0, 4), 15) | _fifth(b[:, 4:8])).to(wide)
    return _half(b, 0, wide) * codes + _half(b, 2, wide)


def _q8_0(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return _half(b, 0, wide) * b[:, 2:].contiguous().view(torch.int8).to(wide)


def _grouped(codes: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, wide: torch.dtype) -> torch.Tensor:
    """Codes [n, 256] by the scales [n, groups], less the minima."""
    groups = codes.to(wide).view(len(codes), scales.shape[1], -1) * scales.unsqueeze(2)
    return groups if minima is None else groups - minima.unsqueeze(2)


def _q2_k(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    scales, minima = _half(b, 80, wide) * (b[:, :16] & 15), _half(b, 82, wide) * (b[:, :16] >> 4)
    return _grouped(_fields(b[:, 16:80], 32, (0, 2, 4, 6), 3), scales, minima, wide)


def _q3_k(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    upper = _fields(b[:, :32], 32, tuple(range(8)), 1)
    codes = (_fields(b[:, 32:96], 32, (0, 2, 4, 6), 3) | upper << 2).to(wide) - 4
    low, high = _fields(b[:, 96:104], 8, (0, 4), 15), _fields(b[:, 104:108], 4, (0, 2, 4, 6), 3)
    return _grouped(codes, _half(b, 108, wide) * ((low | high << 4).to(wide) - 32), None, wide)


def _scales_and_minima(b: torch.Tensor, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Of Q4_K and Q5_K, by their first 16 bytes: 8 numbers of 6 bits each."""
    first, second, third = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 2) & 48)), dim=1)
    minima = torch.cat((second & 63, (third >> 4) | ((second >> 2) & 48)), dim=1)
    return _half(b, 0, wide) * scales, _half(b, 2, wide) * minima


def _q4_k(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return _grouped(_fields(b[:, 16:], 32, (0, 4), 15), *_scales_and_minima(b, wide), wide)


def _q5_k(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    codes = _fields(b[:, 48:], 32, (0, 4), 15) | _fields(b[:, 16:48], 32, tuple(range(8)), 1) << 4
    return _grouped(codes, *_scales_and_minima(b, wide), wide)


def _q6_k(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    codes = _fields(b[:, :128], 64, (0, 4), 15) | _fields(b[:, 128:192], 32, (0, 2, 4, 6), 3) << 4
    scales = _half(b, 208, wide) * b[:, 192:208].contiguous().view(torch.int8)
    return _grouped(codes.to(wide) - 32, scales, None, wide)


def _iq4(codes: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return torch.tensor(_IQ4, dtype=wide, device=codes.device)[codes.long()]


def _iq4_nl(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    return _half(b, 0, wide) * _iq4(_fields(b[:, 2:], 16, (0, 4), 15), wide)


def _iq4_xs(b: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    low, high = _fields(b[:, 4:8], 1, (0, 4), 15), _fields(b[:, 2:4], 1, (0, 2, 4, 6), 3)
    scales = _half(b, 0, wide) * ((low | high << 4).to(wide) - 32)
    return _grouped(_iq4(_fields(b[:, 8:], 16, (0, 4), 15), wide), scales, None, wide)


_BLOCKS: Mapping[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = MappingProxyType(
    {
        "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q8_0": _q8_0, "Q2_K": _q2_k, "Q3_K": _q3_k,
        "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "IQ4_XS": _iq4_xs,
    }
)  # fmt: skip
