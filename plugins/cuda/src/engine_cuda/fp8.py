"""Numbers of 8 bits (e4m3) made in kernels.

TRAP: Triton's interpreter casts float32 to e4m3 wrongly: halves away from zero instead of to even, nothing of what is
below 2**-6, no saturation, no NaN. So interpreted kernels count in whole numbers what the hardware does in one step.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def to_e4m3(values, INTERPRETED: tl.constexpr):
    """float32 -> the codes of e4m3 as uint8: the nearest number, half to even, at most 448 in size; NaN stays NaN.

    INTERPRETED: whether the kernel runs in Triton's interpreter, `engine_cuda.interpreter.interpreted()`.
    """
    if INTERPRETED:
        bits = values.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        # 3 of 23 bits behind the point are kept, and the exponent's zero is 7 instead of 127.
        normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
        # Added to 1.5 * 2**23, a float32 is rounded to a whole number of steps of 2**-9, in the lowest bits.
        small = (tl.abs(values) * 512.0 + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
        code = tl.where(size < (121 << 23), small, tl.minimum(normal, 0x7E))
        code = tl.where(size > 0x7F800000, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
    return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
