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

from engine_cuda.interpreter_shim import wait_for


@triton.jit
def _meet(peers, block, value, RANK: tl.constexpr, WORLD: tl.constexpr, MOST_RANKS: tl.constexpr):
    """Tell this program's like on all ranks that it has come to `value`, and wait until all of them have."""
    ranks = tl.arange(0, WORLD)
    theirs = (tl.load(peers + ranks) + (block * MOST_RANKS + RANK) * 8).to(tl.pointer_type(tl.int64))
    own = (tl.load(peers + RANK) + (block * MOST_RANKS + ranks) * 8).to(tl.pointer_type(tl.int64))
    tl.debug_barrier()  # what other threads of the program wrote is there before one of them signals
    values = tl.zeros([WORLD], tl.int64) + value
    tl.atomic_xchg(theirs, values, sem="release", scope="sys")
    wait_for(own, values)
    tl.debug_barrier()


@triton.jit
def one_shot_kernel(
    x, out, peers, count, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    STATE: tl.constexpr, DATA: tl.constexpr, MOST_RANKS: tl.constexpr,
):  # fmt: skip
    """x [count] -> out [count], which may be x. peers: int64 [WORLD], where each rank's memory is mapped here."""
    block = tl.program_id(0)
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    own = tl.load(peers + RANK)
    counter = (own + STATE + block * 8).to(tl.pointer_type(tl.int64))
    value = tl.load(counter)
    offs = tl.arange(0, BLOCK)
    for start in range(block * BLOCK, count, tl.num_programs(0) * BLOCK):
        offs_n = start + offs
        mask = offs_n < count
        slot = DATA + (block * 2 + (value // 2) % 2) * SLOT
        mine = tl.multiple_of((own + slot).to(kind), 16)
        tl.store(mine + offs, tl.load(x + offs_n, mask=mask), mask=mask)
        value += 2
        _meet(peers, block, value, RANK, WORLD, MOST_RANKS)
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            part = tl.multiple_of((tl.load(peers + rank) + slot).to(kind), 16)
            total += tl.load(part + offs, mask=mask, other=0.0).to(tl.float32)
        tl.store(out + offs_n, total.to(x.dtype.element_ty), mask=mask)
    tl.store(counter, value)


@triton.jit
def two_shot_kernel(
    x, out, peers, count, RANK: tl.constexpr, WORLD: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    STATE: tl.constexpr, DATA: tl.constexpr, MOST_RANKS: tl.constexpr, RESULTS: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """As `one_shot_kernel`. In a round a program takes WORLD * BLOCK elements, of which BLOCK are its rank's share."""
    block = tl.program_id(0)
    kind: tl.constexpr = tl.pointer_type(x.dtype.element_ty)
    own = tl.load(peers + RANK)
    counter = (own + STATE + block * 8).to(tl.pointer_type(tl.int64))
    value = tl.load(counter)
    offs = tl.arange(0, BLOCK)
    result = RESULTS + block * SEGMENT
    for start in range(block * BLOCK * WORLD, count, tl.num_programs(0) * BLOCK * WORLD):
        slot = DATA + (block * 2 + (value // 2) % 2) * SLOT
        mine = tl.multiple_of((own + slot).to(kind), 16)
        for rank in tl.static_range(WORLD):
            offs_n = start + rank * BLOCK + offs
            mask = offs_n < count
            tl.store(mine + rank * BLOCK + offs, tl.load(x + offs_n, mask=mask), mask=mask)
        _meet(peers, block, value + 1, RANK, WORLD, MOST_RANKS)
        offs_n = start + RANK * BLOCK + offs
        mask = offs_n < count
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(WORLD):
            part = tl.multiple_of((tl.load(peers + rank) + slot).to(kind), 16)
            total += tl.load(part + RANK * BLOCK + offs, mask=mask, other=0.0).to(tl.float32)
        share = total.to(x.dtype.element_ty)
        tl.store(tl.multiple_of((own + result).to(kind), 16) + offs, share, mask=mask)
        tl.store(out + offs_n, share, mask=mask)
        value += 2
        _meet(peers, block, value, RANK, WORLD, MOST_RANKS)
        for rank in tl.static_range(WORLD):
            if rank != RANK:
                offs_n = start + rank * BLOCK + offs
                mask = offs_n < count
                part = tl.multiple_of((tl.load(peers + rank) + result).to(kind), 16)
                tl.store(out + offs_n, tl.load(part + offs, mask=mask), mask=mask)
    tl.store(counter, value)
