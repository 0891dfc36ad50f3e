"""What lockstep costs: `python -m tests.benchmarks.lockstep`.

One engine core decodes, with others beside it that have nothing to do but to make each step with it, each in a process
of its own. Their workers compute nothing, so the core's own time is all of a step, and what lockstep adds is seen in
full; then the same where a step takes a device some milliseconds, behind which it hides. Prints the median of
milliseconds a step, alone and in lockstep in turns, and what lockstep adds to the processor time of the busy core's own
thread: that is the same on a busy machine, and where processes are more than processors. The bar: 8 idle cores add at
most 0.15 ms.
"""

from __future__ import annotations

import argparse
import os
import select
import statistics
import tempfile
import time
from typing import TYPE_CHECKING, Any

from engine.embedding import EngineConfig
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest
from engine_parallel.lockstep import Star
from tests.benchmarks.null_core import NullSizes, null_core

if TYPE_CHECKING:
    from engine.interfaces.executor import Executor
    from engine.loop.engine_core import EngineCore
    from engine.types.plan import StepPlan, StepResult

BAR = 0.15
SIZES = NullSizes(max_num_seqs=64, max_num_batched_tokens=1024, max_model_len=2048)


class Device:
    """An executor whose steps take so long beside the host, one after the other."""

    def __init__(self, executor: Executor, seconds: float) -> None:
        self._executor = executor
        self._seconds = seconds
        self._free = 0.0

    def execute(self, plan: StepPlan) -> Under:
        self._free = max(self._free, time.perf_counter()) + self._seconds
        return Under(self._executor.execute(plan).result(), self._free)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)


class Under:
    """A step that is done at a moment."""

    def __init__(self, result: StepResult, at: float) -> None:
        self._result = result
        self._at = at

    def done(self) -> bool:
        return time.perf_counter() >= self._at

    def result(self, timeout: float | None = None) -> StepResult:
        time.sleep(max(0.0, self._at - time.perf_counter()))
        return self._result


def milliseconds(core: EngineCore, rows: int, steps: int) -> tuple[float, float]:
    """Of a step, and of these processor time: medians of ten parts of so many steps. Requests decode, none ends."""
    params = SamplingParams(max_tokens=1500, ignore_eos=True, seed=0)
    names = [f"r{row}" for row in range(rows)]
    for row, name in enumerate(names):
        core.add_request(EngineRequest(request_id=name, prompt_token_ids=[row + 1] * 16, params=params))
    for _ in range(30):
        core.step()
    found, computed = [], []
    for _ in range(10):
        began, cpu_began = time.perf_counter(), time.thread_time()
        for _ in range(steps // 10):
            core.step()
        found.append((time.perf_counter() - began) / (steps // 10))
        computed.append((time.thread_time() - cpu_began) / (steps // 10))
    core.abort(names)
    while core.has_work():
        core.step()
    return 1000 * statistics.median(found), 1000 * statistics.median(computed)


def idle(address: str, rank: int, size: int) -> None:
    """Be a core without requests, until another leaves."""
    core = null_core(EngineConfig(), SIZES)
    star = core.lockstep = Star(address, rank, size)
    files = select.poll()
    for file in star.files:
        files.register(file, select.POLLIN)
    while star.gone() is None:
        if core.has_work():
            core.step()
        else:
            files.poll()


def measure(size: int, busy: int, rows: int, steps: int, device: float, rounds: int) -> list[float]:
    """Milliseconds of a step of core `busy`, alone and with the others, then processor time alike: medians of as many
    rounds each."""
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:
        address = f"ipc://{folder}/star"
        children = []
        for rank in range(size):
            if rank != busy:
                if (pid := os.fork()) == 0:
                    try:
                        idle(address, rank, size)
                    finally:
                        os._exit(0)
                children.append(pid)
        core = null_core(EngineConfig(), SIZES)
        if device:
            core.executor = Device(core.executor, device)
        star = Star(address, busy, size)
        found: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(rounds):
            for together in found:
                core.lockstep = star if together else None
                found[together].append(milliseconds(core, rows, steps))
        star.close()
        for pid in children:
            os.waitpid(pid, 0)
    return [statistics.median(one[of] for one in found[together]) for of in (0, 1) for together in (False, True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--idle", type=int, default=8, help="cores beside the one that decodes")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    size = 1 + options.idle
    print(f"one core with {options.rows} requests that decode, {options.idle} idle ones beside it, ms a step")
    print(f"{'the busy core':30}  {'device':>7}  {'alone':>7}  {'lockstep':>8}  {'adds':>7}   processor time: adds")
    for busy in (0, size - 1):
        for device in (0.0, 0.005):
            steps = options.steps if not device else options.steps // 4
            alone, together, own, own_together = measure(size, busy, options.rows, steps, device, options.rounds)
            name = "is rank 0, the star's middle" if busy == 0 else "is another"
            told = f"{name:30}  {1000 * device:5.1f}    {alone:7.3f}  {together:8.3f}  {together - alone:7.3f}"
            print(f"{told}  {own_together - own:22.3f}", flush=True)
    print(f"the bar is {BAR}")


if __name__ == "__main__":
    main()
