"""How large the kernel's tiles are: one table, by queries of a tile, element and GPU, reasoned and not searched for.

With DeepSeek's sizes a cached vector is 576 elements, 1152 bytes in 16 bits, and serves two products. A tile of 32
vectors is 36 KB, and one more is under way while it is computed with. What a program keeps in registers is its mean:
[queries, 512] in float32, 32 KB for 16 queries and half of a multiprocessor's registers for 64.

- Few heads (16 on a rank): a decode waits for memory, at 30 operations a byte. 16 queries are the least that tensor
  cores take; two programs of a multiprocessor have some 70 KB under way between them.
- 64 heads and more, and prompts: at 128 heads a decode has 240 operations a byte, close to what an H100 computes in the
  time (295). There, 64 queries are what a warp group's product takes (wgmma), two warp groups halve the 512 columns,
  and tiles of 64 vectors, twice in 227 KB of shared memory beside the queries, rescale the mean seldom.
- Elsewhere (163 KB on sm_80, 99 KB on sm_86 and sm_89, 64 KB on gfx942) 32 queries do.

That they compile for their GPUs without spilled registers is tested; that they are the fastest is not, for want of one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Target = Literal["hopper", "nvidia", "rocm", "interpreter"]
"""hopper: sm_90; nvidia: any other of theirs; rocm: AMD's."""


class LatentTiles(NamedTuple):
    """One launch's form.

    Args:
        queries: pairs of token and head in a program.
        vectors: in a tile; a power of two.
        warps, stages: of a program; tiles under way.
        per_processor: programs that a multiprocessor runs at once.
    """

    queries: int
    vectors: int
    warps: int
    stages: int
    per_processor: int


def target_of(capability: tuple[int, int] | None) -> Target:
    """capability: NVIDIA's compute capability; None for AMD."""
    if capability is None:
        return "rocm"
    return "hopper" if capability[0] == 9 else "nvidia"


def tiles_of(pairs: int, dtype_bytes: int, kv_bytes: int, target: Target) -> LatentTiles:
    """The form for rows of so many pairs of token and head.

    Args:
        pairs: of one row, where rows are alike; many for prompts.
        dtype_bytes, kv_bytes: of an element of queries, and of the cache.
    """
    if target == "interpreter":
        return LatentTiles(16 if pairs <= 16 else 32, 16, 4, 1, 2)
    if dtype_bytes == 4:  # without tensor cores, for comparisons
        return LatentTiles(16, 16, 4, 1, 1)
    if target == "rocm":
        return LatentTiles(16, 16, 4, 1, 2) if pairs <= 16 else LatentTiles(32, 16, 8, 1, 1)
    if pairs <= 16 and target == "hopper":
        return LatentTiles(16, 32, 4, 3, 2)
    if pairs <= 16:
        return LatentTiles(16, 16 if kv_bytes == 1 else 32, 4, 2, 2)
    if pairs <= 32 or target != "hopper" or kv_bytes == 1:  # widening fp8 takes registers
        return LatentTiles(32, 16 if kv_bytes == 1 else 32, 8, 2, 1)
    return LatentTiles(64, 64, 8, 3, 1)
