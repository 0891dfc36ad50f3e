"""Whether torch multiplies matrices of fp8 here with a scale for each row: on a processor, torch 2.11's does not."""

from __future__ import annotations

from functools import cache

import pytest
import torch


@cache
def scales_of_rows() -> bool:
    """On the device that tests are run on."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    ones = torch.ones(16, 16, device=device).to(torch.float8_e4m3fn)
    scales = torch.ones(16, 1, device=device)
    try:
        torch._scaled_mm(ones, ones.T, scale_a=scales, scale_b=scales.T, out_dtype=torch.bfloat16)
    except RuntimeError:
        return torch.cuda.is_available()  # there, whatever is wrong has to be seen
    return True


needs_scales_of_rows = pytest.mark.skipif(
    not scales_of_rows(),
    reason=f"the product of fp8 on a processor takes one scale for all rows in torch {torch.__version__}",
)
