"""Sums over ranks by kernels that read each other's memory: one shot and two shots.

One shot: a program puts its part of the rank's tensor into memory that the others see, signals, waits for its like on
every other rank, and adds up all of their parts. Two shots: it adds up its rank's share of them alone, shows that,
waits again, and takes the other shares. The first reads (ranks - 1) times the tensor and waits once, the second reads
it twice and waits twice. Sums are made in float32 in order of rank, so that all ranks get the same bits.

A program works with its like on the other ranks alone: they have flags, a counter, slots and rounds of their own.
Slots are double. What a rank writes in a round was last read by others two rounds ago, and they have signalled since;
its share of a sum was read in the round before, and they have signalled since. So a round needs no signal at its end.
Counters live on the device and only grow: a captured launch is right however often it is replayed.

The algorithms are those of NVIDIA's and vLLM's custom all-reduce kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

_WAIT: tl.constexpr = tl.constexpr(
    """
    {
        .reg .b64 flag;
        .reg .pred early;
    again:
        ld.acquire.sys.global.b64 flag, [$1];
        setp.lt.s64 early, flag, $2;
        @early bra again;
        mov.b64 $0, flag;
    }
    """
)
"""Each thread waits for a flag of its own: a loop around a sum over threads would exchange numbers between threads
that may have left it at different times."""


@triton.jit
def _wait(flags, value, INTERPRETED: tl.constexpr):
    """Wait until every flag [WORLD] is at least `value`, and see with them all that was written before they were."""
    if INTERPRETED:
        while tl.min(tl.atomic_add(flags, tl.zeros_like(value), sem="acquire", scope="sys") - value, 0) < 0:
            pass
    else:
        tl.inline_asm_elementwise(_WAIT, "=l,l,l", [flags, value], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _meet(
    peers, block, value, RANK: tl.constexpr, WORLD: tl.constexpr, MOST_RANKS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Tell this program's like on all ranks that it has come to `value`, and wait until all of them have."""
    ranks = tl.arange(0, WORLD)
    theirs = (tl.load(peers + ranks) + (block * MOST_RANKS + RANK) * 8).to(tl.pointer_type(tl.int64))
    own = (tl.load(peers + RANK) + (block * MOST_RANKS + ranks) * 8).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()  # what other threads of the program wrote is there before one of them signals
    values = tl.zeros([WORLD], tl.int64) + value
    tl.atomic_xchg(theirs, values, sem="release", scope="sys")
    _wait(own, values, INTERPRETED)
    tl.debug_barrier()


@triton.jit
def one_shot_kernel(
    x, out, peers, count, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    STATE: tl.constexpr, DATA: tl.constexpr, MOST_RANKS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """x [count] -> out [count], which may be x. peers: int64 [WORLD], where each rank's memory is mapped here."""
    block = tl.program_id(0)
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    own = tl.load(peers + RANK)
    counter = (own + STATE + block * 8).to(tl.pointer_type(tl.int64))
    value = tl.load(counter)
    offsets = tl.arange(0, BLOCK)
    for start in range(block * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + offsets
        slot = DATA + (block * 2 + (value // 2) % 2) * SLOT
        mine = tl.multiple_of((own + slot).to(kind), 16)
        tl.store(mine + offsets, tl.load(x + at, mask=at < count), mask=at < count)
        value += 2
        _meet(peers, block, value, RANK, WORLD, MOST_RANKS, INTERPRETED)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            part = tl.multiple_of((tl.load(peers + rank) + slot).to(kind), 16)
            total += tl.load(part + offsets, mask=at < count, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(x.dtype.element_ty), mask=at < count)
    tl.store(counter, value)


@triton.jit
def two_shot_kernel(
    x, out, peers, count, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    STATE: tl.constexpr, DATA: tl.constexpr, MOST_RANKS: tl.constexpr, INTERPRETED: tl.constexpr,
    RESULTS: tl.constexpr, SEGMENT: tl.constexpr,
):  # fmt: skip
    """As `one_shot_kernel`. In a round a program takes WORLD * BLOCK elements, of which BLOCK are its rank's share."""
    block = tl.program_id(0)
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    own = tl.load(peers + RANK)
    counter = (own + STATE + block * 8).to(tl.pointer_type(tl.int64))
    value = tl.load(counter)
    offsets = tl.arange(0, BLOCK)
    result = RESULTS + block * SEGMENT
    for start in range(block * BLOCK * WORLD, count, tl.num_programs(0) * BLOCK * WORLD):
        slot = DATA + (block * 2 + (value // 2) % 2) * SLOT
        mine = tl.multiple_of((own + slot).to(kind), 16)
        for rank in tl.static_range(WORLD):
            at = start + rank * BLOCK + offsets
            tl.store(mine + rank * BLOCK + offsets, tl.load(x + at, mask=at < count), mask=at < count)
        _meet(peers, block, value + 1, RANK, WORLD, MOST_RANKS, INTERPRETED)
        at = start + RANK * BLOCK + offsets
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            part = tl.multiple_of((tl.load(peers + rank) + slot).to(kind), 16)
            total += tl.load(part + RANK * BLOCK + offsets, mask=at < count, other=0.0).to(tl.float32)
        share = total.to(x.dtype.element_ty)
        tl.store(tl.multiple_of((own + result).to(kind), 16) + offsets, share, mask=at < count)
        tl.store(out + at, share, mask=at < count)
        value += 2
        _meet(peers, block, value, RANK, WORLD, MOST_RANKS, INTERPRETED)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                at = start + rank * BLOCK + offsets
                part = tl.multiple_of((tl.load(peers + rank) + result).to(kind), 16)
                tl.store(out + at, tl.load(part + offsets, mask=at < count), mask=at < count)
    tl.store(counter, value)
