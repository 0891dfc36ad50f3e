"""Mixed load for a while, with clients that leave, crawl, and send nonsense. Memory stays, no page or process is left,
and every answer is that of a quiet server.

A few seconds by default; half an hour with `make soak` (`SOAK_SECONDS=1800`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time

import psutil
import pytest

from tests.serving.conftest import Server

from .crowd import KINDS, Crowd, quiet_answers, quiet_refusals
from .requests import good_requests

MIB = 2**20
SHORT = 5.0
LONG = float(os.environ.get("SOAK_SECONDS", "1800"))
PER_MINUTE = 1.0
"""MiB that the processes may grow a minute, in the mean over the second half, beyond the slack."""
SLACK = 48.0
"""MiB that allocators may keep, however short the run."""
DRIVERS = 4
"""The grammar drivers there are: each may keep a process in which it compiles."""
FLAGS = (
    "--dtype", "float64", "--max-num-seqs", "16", "--num-kv-pages", "220", "--write-timeout", "20",
    "--response-store-size", "1MiB", "--grammar.cache_size", "8", "--kv-canary",
)  # fmt: skip


Sample = dict[int, float]
"""MiB of each process, by its id: the server's first, then its children's, the core and its compilers."""


def processes(server: Server) -> list[psutil.Process]:
    own = psutil.Process(server.process.pid)
    return [own, *own.children(recursive=True)]


def resident(server: Server) -> Sample:
    """What they hold now."""
    sizes = {}
    for process in processes(server):
        with contextlib.suppress(psutil.NoSuchProcess):  # a compiler that was ended meanwhile
            sizes[process.pid] = process.memory_info().rss / MIB
    return sizes


def compiles(process: psutil.Process) -> bool:
    """Whether it is one in which a grammar driver compiles; they stay, for what comes next."""
    return "engine_kit.compiling.child" in process.cmdline()


def growth(samples: list[Sample]) -> float:
    """MiB between the middle of the run and its end: medians of a sixth of it each, of the processes that are there in
    all of them. A driver's compiler may be started meanwhile, or another in its place."""
    part = max(1, len(samples) // 6)
    middle, end = samples[len(samples) // 2 :][:part], samples[-part:]
    stay = set.intersection(*(set(sample) for sample in middle + end))
    sums = [[sum(sample[pid] for pid in stay) for sample in some] for some in (middle, end)]
    return statistics.median(sums[1]) - statistics.median(sums[0])


@pytest.mark.parametrize("seconds", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)], ids=["short", "long"])
def test_mixed_load(seconds: float) -> None:
    server = Server("tiny", *FLAGS)
    try:
        requests = good_requests()
        answers = asyncio.run(quiet_answers(server.address, requests))
        asyncio.run(quiet_refusals(server.address))
        before = server.until_idle()
        own, files = [p for p in processes(server) if not compiles(p)], psutil.Process(server.process.pid).num_fds()
        samples = [resident(server)]
        crowd = Crowd(server.address, answers, seed=int(seconds), longest=300 if seconds == SHORT else 900)
        began = time.monotonic()

        async def sample() -> None:
            while time.monotonic() - began < seconds and not crowd.wrong:
                await asyncio.sleep(min(1.0, seconds / 24))
                samples.append(resident(server))

        async def run() -> None:
            await asyncio.gather(crowd.run(lambda: time.monotonic() - began < seconds), sample())

        asyncio.run(run())
        assert not crowd.wrong, crowd.wrong
        assert set(crowd.done) == set(KINDS), f"{crowd.done}: the run was too short for every kind"
        after = server.until_idle()
        few = samples[:: max(1, len(samples) // 30)]
        shown = f"MiB {' '.join('+'.join(f'{size:.0f}' for size in s.values()) for s in few)}; {dict(crowd.done)}"
        print(f"\n{len(samples)} samples in {seconds:.0f} s: {shown}; preempted {after['num_preemptions_total']:.0f}")
        assert growth(samples) < SLACK + PER_MINUTE * seconds / 120, shown
        assert after["kv_pages_used"] == before["kv_pages_used"] == 0
        assert psutil.Process(server.process.pid).num_fds() <= files + 4
        assert [p for p in processes(server) if not compiles(p)] == own, "a process is left"
        compilers = [p for p in processes(server) if compiles(p)]
        spent = [sum(p.cpu_times()[:2]) for p in compilers]
        time.sleep(0.5)
        busy = [sum(p.cpu_times()[:2]) - before for p, before in zip(compilers, spent, strict=True)]
        assert len(compilers) <= DRIVERS and max(busy, default=0) < 0.2, "a compiler works for nobody"
        again = asyncio.run(quiet_answers(server.address, requests[::5]))
        assert again.items() <= answers.items(), "what is cached now changes no answer"
    finally:
        assert server.stop() == 0, "".join(server.lines)
    assert not [line for line in server.lines if "Traceback" in line or "ERROR" in line], "".join(server.lines)
