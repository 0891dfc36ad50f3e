"""How large the kernels' tiles are: one table, by head size, element and GPU, reasoned and not searched for.

A search (autotune) would launch and wait, which a step that is captured must not, and would choose otherwise from run
to run. What is known of the machine decides instead:

- A decode waits for memory. Some 32 KB of keys and values a tile and three tiles in flight keep two programs of a
  multiprocessor far ahead of what the memory delivers (on an H100, about 30 KB in flight for each).
- A prefill waits for the tensor cores and for exponentials: 128 rows are two warp groups' products on Hopper, and long
  tiles of keys rescale the output seldom. Registers and shared memory are the limit.

That they compile without spilled registers is tested; that they are the fastest is not, for want of a GPU.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Target = Literal["hopper", "ampere", "small", "rocm", "interpreter"]
"""GPUs told apart by shared memory of a program: 227 KB (sm_90, sm_100), 163 KB (sm_80), 99 KB (sm_86, sm_89, sm_120),
64 KB (gfx942)."""


class Tiles(NamedTuple):
    """One kernel's launch.

    Args:
        rows: of queries times heads in a program.
        most_rows: as many at most, where one query's heads or a few queries are more than `rows`; beyond it several
            programs share the heads.
        keys: in a tile; a power of two.
        warps, stages: of a program; tiles in flight.
        least: tiles of a chunk, at least: shorter ones are not worth the putting together.
        most: chunks of a unit, at most: one program puts them together.
        per_processor: programs that a multiprocessor runs at once.
    """

    rows: int
    most_rows: int
    keys: int
    warps: int
    stages: int
    least: int
    most: int
    per_processor: int


def target_of(capability: tuple[int, int] | None) -> Target:
    """capability: NVIDIA's compute capability; None for AMD."""
    if capability is None:
        return "rocm"
    if capability[0] in (9, 10):
        return "hopper"
    return "ampere" if capability in ((8, 0), (8, 7)) else "small"


def decode_tiles(width: int, dtype_bytes: int, kv_bytes: int, target: Target) -> Tiles:
    """For rows of few tokens.

    Args:
        width: the head size, up to a power of two.
        dtype_bytes, kv_bytes: of an element of queries, and of the cache.
    """
    if target == "interpreter":
        return Tiles(rows=16, most_rows=64, keys=16, warps=4, stages=1, least=1, most=64, per_processor=2)
    keys = 16384 // (width * kv_bytes)  # 16 KB of keys and as many of values
    if dtype_bytes == 4:  # products of float32 go through registers
        keys = min(keys, 4096 // width)
    if target == "rocm":
        keys //= 2
    keys = min(128, max(16, keys))
    stages = 3 if target == "hopper" else 2
    most_rows = 64 if dtype_bytes < 4 else 16
    return Tiles(16, most_rows, keys, warps=4, stages=stages, least=max(1, 128 // keys), most=128, per_processor=2)


def prefill_tiles(width: int, dtype_bytes: int, kv_bytes: int, target: Target, more: bool = False) -> Tiles:
    """For rows of many tokens; the arguments are `decode_tiles`'.

    more: scores are capped, sloped or in a window, for which a program needs registers too.
    """
    if target == "interpreter":
        return Tiles(rows=32, most_rows=32, keys=32, warps=4, stages=1, least=2, most=16, per_processor=2)
    if dtype_bytes == 4:  # without tensor cores, for comparisons
        return Tiles(rows=32, most_rows=32, keys=16, warps=4, stages=1, least=32, most=16, per_processor=2)
    size = 0 if width <= 64 else 1 if width <= 128 else 2
    rows, keys, warps, stages = {
        "hopper": ((128, 64 if more else 128, 8, 3), (128, 64, 8, 3), (128, 32, 8, 3)),
        "ampere": ((128, 64, 8, 2), (128, 32 if more else 64, 8, 2), (64, 32, 8, 2)),
        "small": ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 2)),
        "rocm": ((128, 64, 4, 1), (128, 64, 4, 1), (64, 16, 4, 1)),
    }[target][size]
    return Tiles(rows, rows, keys, warps, stages, least=512 // keys, most=16, per_processor=1)
