"""The dtypes that the native module knows, by the numbers that it knows them by (native/kernels.h)."""

from __future__ import annotations

from types import MappingProxyType

import torch

DTYPES = MappingProxyType(
    {
        dtype: number
        for number, dtype in enumerate(
            (
                torch.float64, torch.float32, torch.bfloat16, torch.float16,
                torch.int64, torch.int32, torch.int8, torch.uint8,
            )
        )
    }
)  # fmt: skip
CACHE_DTYPES = MappingProxyType({**DTYPES, torch.float8_e4m3fn: len(DTYPES)})
"""With what caches alone may hold."""
