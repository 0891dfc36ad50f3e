"""What becomes of keys and values that the cache stores."""

from __future__ import annotations

import triton
import triton.language as tl

from engine_cuda.interpreter_shim import to_e4m3


@triton.jit
def stored(keys, values, DTYPE: tl.constexpr):
    """Keys [n, P] and values [n, C] in the cache's type; what 8 bits cannot hold becomes the largest that they can
    (e4m3: 448).

    A vector of values that are not all finite is stored as zeros, and its key as NaN: the attention multiplies values
    that a query does not see by 0, and 0 * NaN is NaN, but their scores it overwrites. Who sees the key still gets NaN.
    """
    if DTYPE.is_fp8():
        # In codes, whose seven lower bits are all set in a NaN: Triton's interpreter makes no NaN of 8 bits.
        if values.dtype != DTYPE:
            keys = to_e4m3(tl.clamp(keys.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL))
            values = to_e4m3(tl.clamp(values.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL))
        else:
            keys, values = keys.to(tl.uint8, bitcast=True), values.to(tl.uint8, bitcast=True)
        broken = tl.max(((values & 127) == 127).to(tl.int32), 1)[:, None] > 0
        keys = tl.where(broken, 127, keys).to(tl.uint8).to(DTYPE, bitcast=True)
        values = tl.where(broken, 0, values).to(tl.uint8).to(DTYPE, bitcast=True)
    else:
        keys, values = keys.to(DTYPE).to(tl.float32), values.to(DTYPE).to(tl.float32)
        broken = tl.max(((tl.abs(values) < float("inf")) == 0).to(tl.int32), 1)[:, None] > 0
        keys, values = tl.where(broken, float("nan"), keys).to(DTYPE), tl.where(broken, 0.0, values).to(DTYPE)
    return keys, values
