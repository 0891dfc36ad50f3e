"""Engine cores in lockstep, each in a thread of the test's process, with the real star between them: every request gets
what it gets alone, all cores launch the same steps, nobody waits for ever, and nothing is said while all sleep."""

from __future__ import annotations

import select
import threading
import time
from typing import Any

import drafting
import pytest
from cores import LAYOUTS, make_core
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from lockstep_cores import SECONDS, run_together, together
from outcomes import check_outcome
from paged_worker import VOCAB
from schedules import Planned, Schedule, Settings, examples, schedules

from engine.loop import engine_core, process
from engine.loop.engine_core import EngineCore
from engine.loop.process import wind_down
from engine.types.errors import EngineDeadError
from engine.types.messages import Add
from engine.types.params import SamplingParams
from engine_parallel.lockstep import Star

ROOMY = Settings(
    num_pages=200, max_num_seqs=4, max_num_batched_tokens=32, max_model_len=40, in_flight=2,
    enable_prefix_caching=False, hold=False,
)  # fmt: skip


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
    run_together(several, lambda rank, schedule: make_core(LAYOUTS[layout], schedule.settings)[0], check_outcome)


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


class Told:
    """In the place of a core's clients and of its parent, for the loop of its process."""

    def __init__(self, requests: tuple[Planned, ...]) -> None:
        self.requests = [planned.to_request() for planned in requests]
        self.slept: list[float] = []
        self.errors: list[Any] = []
        self.inbox = self.outbox = None

    def receive(self, timeout: float, awake: float) -> Add | None:
        self.slept.append(timeout)
        return Add([self.requests.pop()], 0) if self.requests else None

    def send(self, message: Any) -> None:
        pass

    def patience(self, longest: float) -> float:
        return longest

    def known(self, client: int) -> bool:
        return True

    def own(self, client: int, request: Any) -> None:
        pass

    def catch_up(self) -> None:
        pass

    def tell(self, outputs: Any) -> None:
        self.errors += [output.error for output in outputs.outputs if output.error is not None]


@pytest.mark.parametrize("when", ["asleep", "at work"])
def test_a_core_that_dies_tells_its_own_reason_and_its_loop_ends(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left the others before, which is no reason for its death, and its process is not to sleep on that."""
    monkeypatch.setattr(engine_core, "GONE_SECONDS", 0.05)
    monkeypatch.setattr(process, "brought", lambda *_: lambda *_: told)
    told = Told(asking(1) if when == "at work" else ())

    def fail(*_: Any) -> None:
        raise ValueError("the device is odd")

    def work(rank: int, star: Star) -> EngineDeadError | None:
        core, _ = make_core(LAYOUTS["full"], ROOMY)
        core.lockstep = star
        if rank:
            while star.gone() is None:
                if core.has_work():
                    core.step()
            return star.gone()
        core.executor.check_health = core.executor.execute = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(EngineDeadError, match="the device is odd") as caught:
            process.step_loop(core, told)  # type: ignore[arg-type]
        assert star.gone() is None
        assert core.has_work(), "whoever looks again is told again, and does not sleep"
        with pytest.raises(EngineDeadError) as again:
            core.step()
        assert again.value is caught.value
        return None

    _, heard = together(2, work)
    assert "data-parallel rank 0 of 2" in str(heard)
    if when == "at work":
        assert "the device is odd" in str(told.errors) and told.slept[-1] == 0.0


def test_a_core_that_dies_while_it_winds_down_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_core, "GONE_SECONDS", 0.05)

    def fail(*_: Any) -> None:
        raise ValueError("the device is odd")

    def work(rank: int, star: Star) -> None:
        core, _ = make_core(LAYOUTS["full"], ROOMY)
        core.lockstep = star
        for request in asking(1, tokens=30):
            core.add_request(request.to_request())
        core.step()
        if rank == 0:
            core.executor.execute = fail  # type: ignore[method-assign, assignment]
            core.add_request(asking(2)[1].to_request())
            core.step()
            assert core._dead is not None
        wind_down(core, SECONDS)

    together(2, work)


@pytest.mark.parametrize("silent", [0, 1])
def test_one_that_says_nothing_ends_the_others(silent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_parallel.lockstep.ANSWER_SECONDS", 0.5)  # by which a member waits longer than rank 0
    meet = threading.Barrier(2)

    def work(rank: int, star: Star) -> str:
        if rank == silent:
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
        wind_down(core, SECONDS)
        assert not core.scheduler.requests and core._dead is None
        return core

    together(size, work)
