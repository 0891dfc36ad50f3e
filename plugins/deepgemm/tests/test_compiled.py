"""The kernel compiled for GPUs that are not there."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from compiled import Case, compile_all

from engine_deepgemm.rows import LARGEST, LEAST_SCALE, _quantize_groups_kernel

SIGNATURE = {
    "x": "*bf16", "codes": "*u8", "scales": "*fp32", "rows": "i32", "columns": "i32", "row_stride": "i32",
    "width": "i32", "scale_row_stride": "i32", "scale_group_stride": "i32",
}  # fmt: skip


@pytest.mark.slow
def test_no_register_is_spilled() -> None:
    """With scales of any size for Hopper, and powers of two for Blackwell."""
    cases = [
        Case(
            _quantize_groups_kernel,
            SIGNATURE,
            {"ROWS": 8, "POWER": power, "LARGEST": LARGEST, "LEAST_SCALE": LEAST_SCALE},
            target,
            multiples_of_16=("columns", "row_stride", "width"),
        )
        for target, power in (("sm_90", False), ("sm_100", True))
    ]
    for use in compile_all(cases):
        assert use.spilled == 0
        assert "e4m3x2" in use.assembly or "E4M3" in use.assembly
