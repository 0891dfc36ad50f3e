"""What data sheets promise, and when a measurement is void because the machine does not come near it."""

from __future__ import annotations

from typing import NamedTuple


class Sheet(NamedTuple):
    """A GPU's own figures.

    Args:
        gb_s: 10^9 bytes a second of its memory.
        tflop_s: 10^12 operations a second in bfloat16 with float32 sums, without sparsity.
        fp8_tflop_s: the same in 8 bits; None where the GPU has no such products.
    """

    gb_s: float
    tflop_s: float
    fp8_tflop_s: float | None


SHEETS: tuple[tuple[str, Sheet], ...] = (
    # The first that is part of the device's name counts: variants stand before what their names contain.
    ("H100 NVL", Sheet(3938, 835, 1671)),
    ("H100 PCIe", Sheet(2039, 756, 1513)),
    ("H100", Sheet(3350, 989, 1979)),
    ("GH200", Sheet(4000, 989, 1979)),
    ("H200 NVL", Sheet(4800, 835, 1671)),
    ("H200", Sheet(4800, 989, 1979)),
    ("H20", Sheet(4000, 148, 296)),
    ("B200", Sheet(8000, 2250, 4500)),
    ("A100-PCIE-40GB", Sheet(1555, 312, None)),
    ("A100-SXM4-40GB", Sheet(1555, 312, None)),
    ("A100", Sheet(2039, 312, None)),
    ("L40S", Sheet(864, 362, 733)),
    ("L4", Sheet(300, 121, 242)),
    ("RTX 4090", Sheet(1008, 165, 330)),
    ("MI300X", Sheet(5300, 1307, 2615)),
)

VOID_GB_S = 0.85
"""Of the data sheet: a reader that only reads reaches more on a GPU that nobody else uses."""
VOID_TFLOP_S = 0.65
"""Of the data sheet. Matrix products of cuBLAS show 65 to 80 % of it on an H100 or H200, whose clock falls under their
load; 85 % was never seen, so that it would declare every run void."""


def sheet_of(device: str) -> Sheet | None:
    """The data sheet of a device by torch's name for it; None for one that is not listed."""
    return next((sheet for name, sheet in SHEETS if name in device), None)


def why_void(device: str, gb_s: float, tflop_s: float) -> list[str]:
    """Why shares of these two measured figures mean nothing; empty where they do."""
    sheet = sheet_of(device)
    if sheet is None:
        return [f"the data sheet of {device} is not known here: add it to tests/gpu/sheets.py"]
    found = []
    for what, unit, measured, promised, least in (
        ("reading", "GB/s", gb_s, sheet.gb_s, VOID_GB_S),
        ("a bf16 matrix product", "TFLOP/s", tflop_s, sheet.tflop_s, VOID_TFLOP_S),
    ):
        if measured < least * promised:
            found.append(
                f"{what} reached {measured:,.0f} {unit}, under {least:.0%} of the data sheet's {promised:,.0f}"
            )
    return found
