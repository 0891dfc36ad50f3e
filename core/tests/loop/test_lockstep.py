"""Engine cores in lockstep, each in a thread of the test's process, with the real star between them: every request gets
what it gets alone, all cores launch the same steps, nobody waits for ever, and nothing is said while all sleep."""

from __future__ import annotations

import select
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import drafting
import pytest
from cores import LAYOUTS, make_core
from hypothesis import event, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Outcome, Planned, Schedule, Settings, examples, run_schedule, schedules

from engine.loop.engine_core import EngineCore
from engine.types.errors import EngineDeadError
from engine.types.params import SamplingParams
from engine.types.plan import StepPlan
from engine_parallel.lockstep import Star

SECONDS = 20
"""Nothing here takes a tenth of that; who waits so long waits for ever."""

ROOMY = Settings(
    num_pages=200, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=40, in_flight=2,
    enable_prefix_caching=False, hold=False,
)  # fmt: skip


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


def run_all(several: Sequence[Schedule], layout: str) -> list[EngineCore]:
    """A core for each schedule. They end when all have."""
    size = len(several)
    meeting, done = Meeting(size), [False] * size

    def work(rank: int, star: Star) -> EngineCore:
        schedule = several[rank]
        core, _ = make_core(LAYOUTS[layout], schedule.settings)
        core.lockstep = star
        meeting.join(core, rank)
        outcomes = run_schedule(core, schedule)
        done[rank] = True
        serve(core, star, lambda: all(done))
        for request in schedule.requests:
            check_outcome(core, request, outcomes[request.request_id])
        return core

    cores = together(size, work)
    first, *others = ([step[:2] for step in steps] for steps in meeting.steps)
    assert all(other == first for other in others)
    if not any(core.scheduler.connectors.members for core in cores):  # their own steps count, too
        assert all(steps == meeting.steps[0] for steps in meeting.steps)
    event(f"steps in which somebody idled: {any(not core.scheduler.requests for core in cores)}")
    return cores


DRAFTERS = ("", "", *drafting.KINDS)
two_or_three = st.integers(2, 3).flatmap(
    lambda size: st.lists(
        st.booleans().flatmap(lambda crowded: schedules(VOCAB, max_requests=5, crowded=crowded, drafters=DRAFTERS)),
        min_size=size,
        max_size=size,
    )
)


@given(several=two_or_three, layout=st.sampled_from(["full", "all kinds"]), idle=st.booleans())
@hypothesis_settings(max_examples=examples(12), deadline=None)
def test_every_request_gets_the_tokens_that_it_gets_alone(several: list[Schedule], layout: str, idle: bool) -> None:
    if idle:
        several[0] = Schedule(settings=several[0].settings, requests=())
    run_all(several, layout)


def asking(count: int, tokens: int = 4) -> tuple[Planned, ...]:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, seed=0)
    return tuple(Planned(request_id=f"r{i}", prompt=(i + 1, 2), params=params) for i in range(count))


def asleep(core: EngineCore, star: Star) -> None:
    """Step until there is nothing to do."""
    until = time.monotonic() + SECONDS
    while core.has_work() and time.monotonic() < until:
        core.step()
    assert not core.has_work() and not star.awake


def test_nothing_is_said_while_all_sleep_and_one_wakes_all() -> None:
    """Whoever gets the request: rank 0, which wakes the others, or another, which wakes rank 0 first."""
    size, told, messages = 3, threading.Barrier(3), [[0] * 3 for _ in range(6)]

    def work(rank: int, star: Star) -> int:
        core, _ = make_core(LAYOUTS["full"], ROOMY)
        core.lockstep = star
        files = select.poll()
        for file in star.files:
            files.register(file, select.POLLIN)
        for wave in range(3):
            told.wait(SECONDS)
            if rank == wave:
                core.add_request(asking(1)[0].to_request())
            else:
                assert files.poll(1000 * SECONDS), "nobody woke it"
                assert core.has_work()
            asleep(core, star)
            messages[2 * wave][rank] = star.messages
            told.wait(SECONDS)
            time.sleep(0.02)  # in which something could be said; whatever the machine does, nothing may be
            assert not core.has_work()
            messages[2 * wave + 1][rank] = star.messages
            told.wait(SECONDS)
        return int(core.scheduler.last_step)

    steps = together(size, work)
    assert steps[0] == steps[1] == steps[2] > 0
    for wave in range(3):
        assert messages[2 * wave] == messages[2 * wave + 1]
    assert min(messages[0]) > 0


@pytest.mark.parametrize("dies", [0, 1])
@pytest.mark.parametrize("when", ["asleep", "at work"])
def test_the_death_of_one_is_told_to_all_others(dies: int, when: str) -> None:
    began: list[float] = []
    at_work = threading.Barrier(3)

    def work(rank: int, star: Star) -> str:
        core, _ = make_core(LAYOUTS["full"], ROOMY)
        core.lockstep = star
        for request in asking(1, tokens=30 if when == "at work" else 2):
            core.add_request(request.to_request())
        if when == "asleep":
            asleep(core, star)
        else:
            for _ in range(5):
                core.step()
        at_work.wait(SECONDS)
        if rank == dies:
            began.append(time.monotonic())
            star.close()
            return ""
        files = select.poll()
        for file in star.files:
            files.register(file, select.POLLIN)
        if when == "asleep":
            assert files.poll(1000 * SECONDS), "its descriptors tell of it"
        outputs = []
        with pytest.raises(EngineDeadError) as caught:
            while True:
                assert core.has_work()
                outputs += core.step().outputs
        if when == "at work":
            assert outputs[-1].error is not None
        assert time.monotonic() - began[0] < 2
        return str(caught.value)

    told = together(3, work)
    for rank in range(3):
        assert rank == dies or f"in step with data-parallel rank {dies} of 3" in told[rank]


def test_one_that_says_nothing_ends_the_others() -> None:
    meet = threading.Barrier(2)

    def work(rank: int, star: Star) -> str:
        if rank:
            meet.wait(SECONDS)
            return ""
        with pytest.raises(EngineDeadError, match="has not said for 0.1 s"):
            while star.agree(1, True) is None:
                pass
        meet.wait(SECONDS)
        return ""

    together(2, work, answer=0.1)


def test_cores_that_are_stopped_wind_down_together() -> None:
    """Requests end, nobody takes the others for dead, and it takes no longer than a step."""
    size = 3

    def work(rank: int, star: Star) -> EngineCore:
        core, _ = make_core(LAYOUTS["full"], ROOMY)
        core.lockstep = star
        for request in asking(1 if rank else 0, tokens=30):
            core.add_request(request.to_request())
        for _ in range(5):
            core.step()
        core.wind_down(SECONDS)
        assert not core.scheduler.requests and core._dead is None
        return core

    together(size, work)
