"""Several engine cores as one, against cores that a test plays: start, routing, deaths, calls, shutdown."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.interfaces.router import RankLoad
from engine.types.errors import ConfigError, ContractError, EngineDeadError, EngineError, RankDeadError
from engine.types.kv import PageMap
from engine.types.outputs import CoreOutputs
from engine.types.request import FinishReason
from engine_parallel import client as module
from engine_parallel import restarts
from engine_parallel.client import dp_starts

from .played import GONE, House, Played, Scripted, ended, house, played_starts, requests, stats, token


@pytest.fixture(autouse=True, scope="module")
def _played() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "dp_starts", played_starts)
        patch.setattr(restarts, "FIRST_PAUSE", 0.01)
        yield


def least(ranks: Sequence[RankLoad]) -> int:
    return min(ranks, key=lambda rank: 4 * rank.num_waiting + rank.num_running).rank


# -- start -------------------------------------------------------------------------------------------------------------
def test_one_failed_start_ends_all_and_is_told() -> None:
    failing = [Played(0, slow=True), Played(1, error=ConfigError("load", "no such file"))]
    made = House(3, first=failing)
    began = time.monotonic()
    with pytest.raises(ConfigError, match="no such file"):
        made.client.wait_ready()
    assert time.monotonic() - began < 5
    assert all(core.left.is_set() for core in made.cores)


def test_a_router_that_cannot_be_built_ends_all() -> None:
    made = House(2, router=ConfigError("build the router", "no"))
    with pytest.raises(ConfigError):
        made.client.wait_ready()
    assert not made.client.alive() and made.client.states() == []


def test_the_smallest_and_the_slowest_stand_for_all() -> None:
    worker = house(3).client.worker
    assert worker.num_pages == 10 and worker.load_seconds == 2


def test_threads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine import EngineArgs
    from engine.frontend.launch import launch

    monkeypatch.setattr(module, "processors", lambda: 7)
    start = launch(EngineArgs(model="tiny")).start
    workers = [one.worker for one in dp_starts(start, 3)]
    assert [(w.data_parallel_rank, w.data_parallel_size, w.num_threads) for w in workers] == [
        (0, 3, 2), (1, 3, 2), (2, 3, 2),
    ]  # fmt: skip
    assert dp_starts(start, 9)[8].worker.num_threads == 1


# -- routing -----------------------------------------------------------------------------------------------------------
def test_requests_and_aborts_find_their_core() -> None:
    several = house(3)
    for i in range(6):
        several.client.add(requests(f"r{i}"))
    assert [core.added for core in several.cores] == [["r0", "r3"], ["r1", "r4"], ["r2", "r5"]]
    several.client.abort(["r4", "r0", "unknown", "r4"])
    assert [core.aborted for core in several.cores] == [["r0"], ["r4"], []]
    assert several.client.has_work()
    several.client.shutdown()
    assert all(core.left.is_set() for core in several.cores)


def test_what_was_sent_counts_before_the_core_tells() -> None:
    several = house(2, router=Scripted(least))
    for i in range(7):
        several.client.add(requests(str(i)))
    assert sorted(len(core.added) for core in several.cores) == [3, 4]
    several.client.add(requests("a#0", "a#1", "a#2"))
    assert {len(core.added) for core in several.cores} == {4, 6}, "siblings stay together"
    assert several.router.seen[-1] == [(0, 0, 4, 0.0), (1, 0, 3, 0.0)]
    several.cores[0].say(stats=stats(num_running=3, pages_used=5, pages_total=20))
    assert several.client.receive(0).outputs == []
    several.client.add(requests("b"))
    assert several.router.seen[-1][0] == (0, 3, 1, 0.25), "one is on its way"


@pytest.mark.parametrize("answer", [7, -1, "0", True, ValueError("broken")])
def test_a_router_that_errs_is_named_and_ends_the_request_alone(answer: object) -> None:
    several = house(2, router=Scripted(answer))
    with pytest.raises(ContractError, match=r"'turns' for router, of engine-turns 1\.2") as caught:
        several.client.add(requests("a"))
    assert caught.value.point == "router" and not several.client.has_work()


def test_a_core_that_is_stopped_gets_nothing_until_it_goes_on() -> None:
    several = house(3)
    several.cores[1].answers = False
    for i in range(4):
        several.client.add(requests(f"r{i}"))
    assert [len(core.added) for core in several.cores] == [2, 0, 2]
    several.cores[0].answers = False
    several.client.add(requests("one is no choice"))
    assert len(several.cores[2].added) == 3 and len(several.router.seen) == 4
    several.cores[2].answers = False
    for i in range(3):
        several.client.add(requests(f"s{i}"))
    assert len(several.cores[1].added) == 1, "where all are stopped, all wait"
    assert several.living == [0, 1, 2] and not several.client.responds()


# -- deaths ------------------------------------------------------------------------------------------------------------
def test_a_core_that_dies_takes_its_own_with_it() -> None:
    several = house(2)
    front = several.client
    for i in range(4):
        front.add(requests(f"r{i}"))
    several.cores[1].die(EngineDeadError("the engine core's process ended while running", "signal 9", "start it again"))
    lost, other = front.receive(1).outputs
    assert (lost.request_id, other.request_id, lost.finish_reason) == ("r1", "r3", FinishReason.ERROR)
    assert lost.error is not None and lost.error[0] == RankDeadError.code
    assert "rank 1" in lost.error[1] and "signal 9" in lost.error[2] and "start it again" not in "".join(lost.error)
    assert several.router.died == [1]
    several.cores[1].say(token("r1"))  # what was still on its way
    several.cores[0].say(token("r0"))
    assert [output.request_id for output in front.receive(1).outputs] == ["r0"]
    assert several.cores[1].left.wait(5), "what the process has left is freed"
    count = len(several.router.seen)
    for i in range(3):
        front.add(requests(f"n{i}"))
    assert len(several.cores[1].added) == 2 and len(several.router.seen) == count, "one core is no choice"
    several.cores[0].die()
    with pytest.raises(EngineDeadError, match="gone"):
        front.receive(1)
    assert not front.has_work()
    with pytest.raises(EngineDeadError):
        front.add(requests("late"))
    front.shutdown()


def test_of_cores_that_step_together_the_first_that_dies_ends_all() -> None:
    several = house(3, together=True)
    front = several.client
    for i in range(3):
        front.add(requests(f"r{i}"))
    question = front.call("stats")
    several.cores[1].die(EngineDeadError("the engine core's process ended while running", "signal 9"))
    with pytest.raises(EngineDeadError, match="signal 9"):
        front.receive(1)
    assert isinstance(question.exception(0), EngineDeadError)
    assert several.living == [] and not front.responds()
    assert all(state.error is not None and "signal 9" in str(state.error) for state in front.states())
    assert all(several.cores[rank].left.is_set() for rank in (0, 2)), "what of them lives is ended"
    with pytest.raises(EngineDeadError, match="no engine core lives"):
        front.add(requests("n"))
    front.shutdown()


def test_an_executor_that_fails_is_a_core_that_dies() -> None:
    """The core says so with its last outputs, before its process ends; another output in them is heard all the same."""
    several = house(2)
    for i in range(6):
        several.client.add(requests(f"r{i}"))
    dead = EngineDeadError("compute a step", "RuntimeError: no", "start again")
    several.cores[0].say(token("r0", FinishReason.STOP), token("r2", FinishReason.ERROR, dead))
    done, *lost = several.client.receive(1).outputs
    assert (done.request_id, done.finish_reason) == ("r0", FinishReason.STOP)
    assert [output.request_id for output in lost] == ["r2", "r4"], "also those of which it did not tell"
    assert {output.error[0] for output in lost if output.error} == {RankDeadError.code}
    several.cores[0].die(dead)
    several.cores[1].say(token("r1"))
    assert [output.request_id for output in several.client.receive(1).outputs] == ["r1"]
    several.cores[1].say(token("r1", FinishReason.ERROR, dead))
    assert several.client.receive(1).outputs[0].error == dead.parts, "the last one's last words stand"
    several.client.shutdown()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_dead_core_is_started_again_as_often_as_asked() -> None:
    several = house(2, restarts=2)
    front = several.client
    several.cores[1].say(token("x"), stats=stats(num_running=2, generation_tokens=7, step_id=5))
    for life in range(3):
        assert several.living == [0, 1] and front.states()[1].error is None
        front.add(requests(f"a{life}"))
        front.add(requests(f"b{life}"))
        dying = several.cores[1]
        assert dying.added[-1][1:] == str(life)
        dying.die()
        while not any(output.error for output in front.receive(5).outputs):
            pass
        assert several.living == [0] and front.states()[1].error is GONE and dying.left.wait(5)
        if life < 2:
            until(lambda: front.receive(0.01) is not None and several.living == [0, 1])
            assert several.cores[1] is not dying and not several.cores[1].left.is_set()
    time.sleep(0.1)
    assert front.receive(0.01).outputs == [] and several.living == [0], "none is left"
    merged = front.last_stats
    assert merged is not None and merged.generation_tokens == 7 and merged.num_running == 0
    front.shutdown()


def test_counters_go_on_after_a_restart() -> None:
    several = house(2, restarts=1)
    front = several.client
    several.cores[1].say(token("x"), stats=stats(generation_tokens=7, num_running=3))
    front.receive(1)
    several.cores[1].die()
    until(lambda: front.receive(0.01) is not None and len(several.lives[1]) == 2 and several.living == [0, 1])
    several.cores[1].say(token("x"), stats=stats(generation_tokens=2, num_running=1, pages_total=9))
    until(lambda: bool(front.receive(0.01).outputs))
    state = front.states()[1].stats
    assert state is not None and (state.generation_tokens, state.num_running, state.pages_total) == (9, 1, 9)
    several.cores[0].answers = False
    assert [one.stopped for one in front.states()] == [True, False]
    front.shutdown()


@pytest.mark.parametrize("slow", [False, True])
def test_a_shutdown_ends_a_restart(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for its time, or for the model."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.01 if slow else 60.0)
    several = house(2, restarts=5)
    several.slow_next = True
    several.cores[1].die()
    several.client.receive(0.2)
    began = time.monotonic()
    several.client.shutdown()
    assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("close-")]


def test_a_stop_does_not_wait_for_a_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another machine may take its time to start a process, which then is not wanted any more."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.0)
    asked, allowed = threading.Event(), threading.Event()
    core = Played(1)

    def connect() -> Any:
        asked.set()
        assert allowed.wait(10)
        return core

    one = restarts.Restarts(connect, 1)
    starting = threading.Thread(target=one.start)
    starting.start()
    try:
        assert asked.wait(10)
        stopping = threading.Thread(target=one.stop)
        stopping.start()
        stopping.join(5)
        assert not stopping.is_alive()
    finally:
        allowed.set()
        starting.join(10)
    assert not starting.is_alive() and core.left.is_set()


async def test_heard_in_a_loop() -> None:
    """The same news, deaths and returns, as they come."""
    several = house(2, restarts=1)
    heard: list[CoreOutputs] = []
    deaths: list[EngineError] = []
    several.client.listen(asyncio.get_running_loop(), heard.extend, deaths.append)
    for i in range(4):
        several.client.add(requests(f"r{i}"))
    dying = several.cores[1]
    several.cores[0].say(token("r0"))
    dying.die()
    dying.say(token("r1"))
    assert [[output.request_id for output in news.outputs] for news in heard] == [["r0"], ["r1", "r3"]]
    async with asyncio.timeout(10):
        while several.living != [0, 1]:
            await asyncio.sleep(0.01)
    several.cores[1].say(token("x"))
    assert heard[-1].outputs[0].request_id == "x" and not deaths
    several.cores[1].die()
    several.cores[0].die()
    several.cores[0].die()
    assert deaths == [GONE]
    await asyncio.to_thread(several.client.shutdown)


@settings(deadline=None)
@given(st.integers(2, 5), st.randoms(use_true_random=False))
def test_any_order_of_events(size: int, draw: random.Random) -> None:
    """Against a plain dict of who is where."""
    several = house(size, router=Scripted(least))
    front = several.client
    model: dict[str, int] = {}
    living, count = set(range(size)), 0
    for _ in range(40):
        event = draw.choice(["place", "place", "place", "end", "abort", "die"])
        some = draw.sample(sorted(model), min(len(model), draw.randint(0, 3)))
        if event == "place" and living:
            names = [f"r{count}#{i}" for i in range(draw.randint(1, 3))]
            count += 1
            before = {state.dp_rank: 4 * state.num_waiting + state.num_running for state in front.states()}
            front.add(requests(*names))
            (chosen,) = (i for i in living if names[0] in several.cores[i].unfinished)
            assert before[chosen] == min(before[i] for i in living)
            model |= dict.fromkeys(names, chosen)
        elif event == "end":
            for dp_rank in living:
                there = [name for name in some if model[name] == dp_rank]
                several.cores[dp_rank].say(*ended(*there, "unknown"), stats=stats(num_running=draw.randint(0, 5)))
                assert front.receive(0).outputs[:-1] == ended(*there)
            model = {name: dp_rank for name, dp_rank in model.items() if name not in some}
        elif event == "abort":
            front.abort(some)
            model = {name: dp_rank for name, dp_rank in model.items() if name not in some}
        elif event == "die" and len(living) > 1 and draw.random() < 0.3:
            dp_rank = draw.choice(sorted(living))
            living.discard(dp_rank)
            several.cores[dp_rank].die()
            lost = [output.request_id for output in front.receive(0).outputs]
            assert lost == [name for name, at in model.items() if at == dp_rank]
            model = {name: at for name, at in model.items() if at != dp_rank}
        assert front.has_work() == bool(model) and set(several.living) == living
        for state in front.states():
            assert state.num_running + state.num_waiting == sum(at == state.dp_rank for at in model.values())
            assert state.num_running >= 0 and state.num_waiting >= 0
    front.shutdown()


# -- calls -------------------------------------------------------------------------------------------------------------
def test_calls_go_to_all_and_are_merged() -> None:
    several = house(2)
    front, (one, two) = several.client, several.cores

    def asked(method: str) -> Future[Any]:
        answer = front.call(method)
        assert one.calls[-1][0] == two.calls[-1][0] == method and not answer.done()
        return answer

    answer = asked("stats")
    one.answer(stats(num_running=2, step_id=9, prefix_hits=4))
    two.answer(stats(num_running=3, step_id=7, prefix_hits=5))
    merged = answer.result()
    assert (merged["num_running"], merged["step_id"], merged["prefix_hits"]) == (5, 9, 9)
    answer = asked("reset_prefix_cache")
    one.answer(), two.answer()
    assert answer.result() is None and several.router.resets == 1
    answer = asked("page_maps")
    (
        two.answer([PageMap(holders=b"\2", cached=b"\1", retained=b"\0")]),
        one.answer([PageMap(holders=b"\0", cached=b"\1", retained=b"\1")]),
    )
    maps = msgspec.convert(answer.result(), list[PageMap])
    assert [(told.holders, told.cached) for told in maps] == [(b"\0", b"\1"), (b"\2", b"\1")]
    answer = asked("check_integrity")
    one.answer(), two.answer(error="AssertionError: a page is lost")
    with pytest.raises(EngineError, match="rank 1.*a page is lost"):
        answer.result()


def test_a_core_that_dies_answers_no_call() -> None:
    several = house(2)
    several.client.add(requests("r0"))
    answer, later = several.client.call("stats"), several.client.call("check_integrity")
    several.cores[0].die()
    several.cores[1].calls[0][1].set_result(msgspec.to_builtins(stats(num_running=3)))
    assert [output.request_id for output in several.client.receive(1).outputs] == ["r0"]
    assert answer.result(0)["num_running"] == 3
    several.cores[1].die()
    with pytest.raises(EngineDeadError):
        several.client.receive(1)
    assert later.exception(0) is GONE
    several.client.shutdown()


def test_waiting_ends_with_the_time() -> None:
    several = house(2)
    assert several.client.receive(0.01).outputs == [] and not several.client.has_work()
