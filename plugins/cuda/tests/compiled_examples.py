"""Kernels that `test_compiled.py` compiles."""

import triton
import triton.language as tl


@triton.jit
def product(x, y, out, inner, SIZE: tl.constexpr):
    """out = x @ y, of SIZE rows and columns."""
    place = tl.arange(0, SIZE)
    total = tl.zeros((SIZE, SIZE), tl.float32)
    for start in range(0, inner, SIZE):
        left = tl.load(x + place[:, None] * inner + (start + place)[None])
        right = tl.load(y + (start + place)[:, None] * SIZE + place[None])
        total = tl.dot(left, right, total)
    tl.store(out + place[:, None] * SIZE + place[None], total)


@triton.jit
def wrong(x, SIZE: tl.constexpr):
    """Does not compile: the shapes do not match."""
    tl.store(x + tl.arange(0, SIZE), tl.arange(0, 2 * SIZE))
