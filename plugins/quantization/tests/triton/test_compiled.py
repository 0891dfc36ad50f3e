"""The kernel compiled for GPUs that are not there."""

from __future__ import annotations

import pytest

pytest.importorskip("engine_cuda", reason="engine-cuda is not installed")
pytest.importorskip("triton", reason="triton is not installed")

from compiled import Case, compile_all

from engine_quantization.triton_kernels import _codes_kernel

SIGNATURE = {
    "x": "*bf16", "codes": "*u8", "scales": "*fp16", "zeros": "*u8", "values": "*fp32", "bias": "*bf16", "out": "*bf16",
    "rows": "i32", "outputs": "i32", "inputs": "i32", "x_stride": "i32", "row_bytes": "i32", "groups": "i32",
    "group_size": "i32",
}  # fmt: skip
WHOLE = ("outputs", "inputs", "x_stride", "row_bytes", "group_size")


def case(target: str, *, bits: int, table: bool, rows: int) -> Case:
    """As `codes_linear` launches it."""
    few = rows <= 16
    constexprs = {
        "BITS": bits, "TABLE": table, "BIAS": True, "WIDE": False, "BM": 16 if few else 64, "BN": 32 if few else 64,
        "BK": 64,
    }  # fmt: skip
    return Case(_codes_kernel, SIGNATURE, constexprs, target, multiples_of_16=WHOLE)


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_no_register_is_spilled(target: str) -> None:
    """Of whole numbers and of tables, in 4 and 8 bits, for a decode and a prompt."""
    cases = [case(target, bits=b, table=t, rows=r) for b in (4, 8) for t in (False, True) for r in (1, 64)]
    for given, use in zip(cases, compile_all(cases), strict=True):
        assert use.spilled == 0, given.constexprs
        assert use.shared <= 160 << 10
        assert "mma" in use.assembly, "tensor cores are not used"
