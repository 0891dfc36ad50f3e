"""Whether torch multiplies matrices of fp8 here with a scale for each row: on a processor, torch 2.11's does not."""

from __future__ import annotations

from functools import cache

import pytest
import torch


@cache
def scales_of_rows() -> bool:
    """Where there is a GPU, nothing is asked of it: tests are collected before any device is started, and what that
    cannot do has to be seen."""
    if torch.cuda.is_available():
        return True
    ones = torch.ones(16, 16).to(torch.float8_e4m3fn)
    scales = torch.ones(16, 1)
    try:
        torch._scaled_mm(ones, ones.T, scale_a=scales, scale_b=scales.T, out_dtype=torch.bfloat16)
    except RuntimeError:
        return False
    return True


needs_scales_of_rows = pytest.mark.skipif(
    not scales_of_rows(),
    reason=f"the product of fp8 on a processor takes one scale for all rows in torch {torch.__version__}",
)
