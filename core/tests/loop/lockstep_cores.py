"""Engine cores in lockstep, each in a thread of the test's process, with the real star between them."""

from __future__ import annotations

import select
import tempfile
import threading
from collections.abc import Callable, Sequence
from typing import Any

from schedules import Outcome, Planned, Schedule, run_schedule

from engine.loop.engine_core import EngineCore
from engine.types.plan import StepPlan
from engine_parallel.lockstep import Star

SECONDS = 20
"""Nothing here takes a tenth of that; who waits so long waits for ever."""


class Meeting:
    """In the place of a collective: all cores launch a common step together, or the test fails."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.steps: list[list[tuple[tuple[int, ...], bool, int]]] = [[] for _ in range(size)]

    def join(self, core: EngineCore, rank: int) -> None:
        """Have this core's launches meet those of the others."""
        execute = core.executor.execute

        def launch(plan: StepPlan) -> Any:
            if plan.lockstep is not None:
                assert plan.lockstep[rank] == (plan.total_tokens or plan.idle_tokens)
                assert bool(plan.num_rows) != bool(plan.idle_tokens)
                if plan.decodes:
                    assert plan.num_decodes == plan.num_rows
                self.steps[rank].append((tuple(plan.lockstep.tolist()), plan.decodes, plan.step_id))
                try:
                    self.barrier.wait(SECONDS)
                except threading.BrokenBarrierError:
                    raise AssertionError(f"rank {rank} launches step {len(self.steps[rank])} alone") from None
            else:
                assert not plan.num_rows, "a step of connectors alone"
            return execute(plan)

        core.executor.execute = launch  # type: ignore[method-assign]


def together(size: int, work: Callable[[int, Star], Any], answer: float = SECONDS) -> list[Any]:
    """work(rank, star) in a thread each; what they return, or the first error."""
    found: list[Any] = [None] * size
    errors: list[BaseException] = []
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:

        def run(rank: int) -> None:
            try:
                star = Star(f"ipc://{folder}/star", rank, size, meet=SECONDS, answer=answer)
                try:
                    found[rank] = work(rank, star)
                finally:
                    star.close()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(3 * SECONDS)
        if errors:
            raise errors[0]
        assert not any(thread.is_alive() for thread in threads), "somebody waits for ever"
    return found


def serve(core: EngineCore, star: Star, ended: Callable[[], bool]) -> None:
    """What the core's process does while nobody asks it for anything: join the steps of others, else sleep."""
    files = select.poll()
    for file in star.files:
        files.register(file, select.POLLIN)
    while not ended():
        if core.has_work():
            assert not core.step().outputs
        else:
            files.poll(5)


def run_together(
    several: Sequence[Schedule],
    make: Callable[[int, Schedule], EngineCore],
    check: Callable[[EngineCore, Planned, Outcome], None],
) -> list[EngineCore]:
    """A core for each schedule. They end when all have, and each request's outcome is checked."""
    size = len(several)
    meeting, done = Meeting(size), [False] * size
    outcomes: list[dict[str, Outcome]] = [{} for _ in several]

    def work(rank: int, star: Star) -> EngineCore:
        schedule = several[rank]
        core = make(rank, schedule)
        core.lockstep = star
        meeting.join(core, rank)
        outcomes[rank] = run_schedule(core, schedule)
        done[rank] = True
        serve(core, star, lambda: all(done))
        return core

    cores = together(size, work)
    for core, schedule, found in zip(cores, several, outcomes, strict=True):
        for request in schedule.requests:
            check(core, request, found[request.request_id])
    first, *others = ([step[:2] for step in steps] for steps in meeting.steps)
    assert all(other == first for other in others)
    if not any(core.scheduler.connectors.members for core in cores):  # their own steps count, too
        assert all(steps == meeting.steps[0] for steps in meeting.steps)
    return cores
