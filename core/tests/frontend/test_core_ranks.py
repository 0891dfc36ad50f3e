"""Several engine cores as one, against processes that a test plays: start, deaths, calls, shutdown."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from engine.frontend import core_ranks, restarts
from engine.frontend.core_ranks import CoreRanks
from engine.frontend.rank_starts import rank_starts
from engine.frontend.ranks_client import RanksClient
from engine.interfaces.router import RankLoad
from engine.types.errors import ConfigError, ContractError, EngineDeadError, EngineError, RankDeadError
from engine.types.kv import PageMap
from engine.types.messages import Abort, Add, Call, Outputs, Reply, ToCore
from engine.types.outputs import CoreOutput, CoreOutputs, StepStats
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest, FinishReason
from engine.types.start import Choice, WorkerReady


class Played:
    """A core's process without a process."""

    def __init__(self, start: Any) -> None:
        self.start, self.sent, self.left = start, [], threading.Event()  # type: ignore[var-annotated]
        self.frozen = False
        self.pid = 1000 + start.rank

    def wait_ready(self) -> WorkerReady:
        if self.start.error is not None:
            raise self.start.error
        if self.start.slow:
            assert self.left.wait(10), "nobody ended the wait"
            raise EngineDeadError("start", "it was shut down while it started")
        return WorkerReady(
            num_pages=10 + self.start.rank,
            weight_bytes=5,
            cache_bytes=0,
            num_parameters=7,
            load_seconds=self.start.rank,
        )

    def listen(self, on_message: Callable[[Any], None], on_death: Callable[[EngineError], None]) -> None:
        self.say, self.die = on_message, on_death

    def send(self, message: ToCore) -> None:
        assert not self.left.is_set(), "the sockets are gone"
        self.sent.append(message)

    def alive(self) -> bool:
        return not self.left.is_set()

    def stopped(self) -> bool:
        return self.frozen

    def ask_to_stop(self) -> None:
        self.left.set()

    def shutdown(self) -> None:
        self.left.set()


class Start:
    def __init__(self, rank: int, error: EngineError | None = None, slow: bool = False) -> None:
        self.rank, self.error, self.slow = rank, error, slow
        router = Choice(point="router", driver="turns", distribution="engine-turns", version="1.2", value="turns:Card")
        self.worker = SimpleNamespace(choices=(router,))


class Turns:
    """A router that takes turns."""

    def __init__(self) -> None:
        self.turn, self.resets = -1, 0

    def route(self, requests: Sequence[EngineRequest], ranks: Sequence[RankLoad]) -> int:
        self.turn += 1
        return ranks[self.turn % len(ranks)].rank

    def rank_died(self, rank: int) -> None: ...

    def cache_reset(self) -> None:
        self.resets += 1


@pytest.fixture(autouse=True)
def _played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_ranks, "CoreProcess", Played)
    monkeypatch.setattr(restarts, "CoreProcess", Played)
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.01)


def ranks(count: int, restarts: int = 0) -> tuple[CoreRanks, list[Any], Turns]:
    router = Turns()
    starts: Any = [Start(rank) for rank in range(count)]
    several = CoreRanks(starts, lambda _: router if count > 1 else None, restarts)
    return several, several._cores, router


def client(count: int, restarts: int = 0) -> tuple[RanksClient, list[Any], Turns]:
    several, cores, router = ranks(count, restarts)
    return RanksClient(several), cores, router


def request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=[1], params=SamplingParams())


def token(name: str, finish: FinishReason | None = None, error: EngineError | None = None) -> CoreOutput:
    parts = None if error is None else error.parts
    return CoreOutput(request_id=name, new_token_ids=[] if error else [5], finish_reason=finish, error=parts)


def said(*outputs: CoreOutput) -> Outputs:
    return Outputs(CoreOutputs(outputs=list(outputs)))


def stats(**fields: int) -> StepStats:
    return StepStats(**(dict.fromkeys(StepStats.__struct_fields__, 0) | {"hook_failures": ()} | fields))


def test_requests_and_aborts_find_their_rank() -> None:
    front, cores, _ = client(3)
    assert front.worker.num_pages == 10 and front.worker.load_seconds == 2
    for i in range(6):
        front.add([request(f"r{i}")])
    assert [[r.request_id for m in core.sent for r in m.requests] for core in cores] == [
        ["r0", "r3"], ["r1", "r4"], ["r2", "r5"],
    ]  # fmt: skip
    front.abort(["r4", "r0", "unknown"])
    assert [core.sent[-1] for core in cores[:2]] == [Abort(["r0"]), Abort(["r4"])]
    assert isinstance(cores[2].sent[-1], Add) and front.has_work()
    front.shutdown()
    assert all(core.left.is_set() for core in cores)


def test_a_router_that_errs_is_named() -> None:
    front, _, router = client(2)
    router.route = lambda requests, ranks: 7  # type: ignore[method-assign]
    with pytest.raises(ContractError, match=r"named 7.*'turns' for router, of engine-turns 1\.2"):
        front.add([request("r")])


def test_one_failed_start_ends_all_and_is_told() -> None:
    starts = [Start(0, slow=True), Start(1, error=ConfigError("load", "no such file")), Start(2)]
    several = CoreRanks(starts, lambda _: Turns())  # type: ignore[arg-type]
    began = time.monotonic()
    with pytest.raises(ConfigError, match="no such file"):
        RanksClient(several)
    assert time.monotonic() - began < 5
    assert all(core.left.is_set() for core in several._cores)


def test_a_router_that_cannot_be_built_ends_all() -> None:
    def broken(_: object) -> Any:
        raise ConfigError("build the router", "no")

    several = CoreRanks([Start(0), Start(1)], broken)  # type: ignore[list-item]
    with pytest.raises(ConfigError):
        several.wait_ready()
    assert not several.alive() and several.states() == []


def test_a_process_that_dies_takes_its_own_with_it() -> None:
    front, cores, _ = client(2)
    for i in range(4):
        front.add([request(f"r{i}")])
    cores[1].die(EngineDeadError("the engine core's process ended while running", "signal 9", "start it again"))
    (lost, other) = front.receive(1).outputs
    assert (lost.request_id, other.request_id, lost.finish_reason) == ("r1", "r3", FinishReason.ERROR)
    assert lost.error is not None and lost.error[0] == RankDeadError.code
    assert "rank 1" in lost.error[1] and "signal 9" in lost.error[2] and "start it again" not in "".join(lost.error)
    cores[1].say(said(token("r1")))  # what was still on its way
    cores[0].say(said(token("r0")))
    assert [output.request_id for output in front.receive(1).outputs] == ["r0"]
    assert cores[1].left.wait(5), "what the process has left is freed"
    for i in range(3):
        front.add([request(f"n{i}")])
    assert len(cores[1].sent) == 2
    cores[0].die(EngineDeadError("the core", "gone"))
    with pytest.raises(EngineDeadError, match="gone"):
        front.receive(1)
    assert not front.has_work()
    with pytest.raises(EngineDeadError):
        front.add([request("late")])
    front.shutdown()


def test_an_executor_that_fails_is_a_rank_that_dies() -> None:
    """The core says so with its last outputs, before its process ends; another output in them is heard all the same."""
    front, cores, _ = client(2)
    for i in range(6):
        front.add([request(f"r{i}")])
    dead = EngineDeadError("compute a step", "RuntimeError: no", "start again")
    cores[0].say(said(token("r0", FinishReason.STOP), token("r2", FinishReason.ERROR, dead)))
    done, *lost = front.receive(1).outputs
    assert (done.request_id, done.finish_reason) == ("r0", FinishReason.STOP)
    assert [output.request_id for output in lost] == ["r2", "r4"], "also those of which it did not tell"
    assert {output.error[0] for output in lost if output.error} == {RankDeadError.code}
    cores[0].die(dead)
    cores[1].say(said(token("r1")))
    assert [output.request_id for output in front.receive(1).outputs] == ["r1"]


def test_the_last_ranks_last_words_stand() -> None:
    front, cores, _ = client(1)
    front.add([request("r0")])
    dead = EngineDeadError("compute a step", "RuntimeError: no", "start again")
    cores[0].say(said(token("r0", FinishReason.ERROR, dead)))
    assert front.receive(1).outputs[0].error == dead.parts
    cores[0].die(dead)
    with pytest.raises(EngineDeadError, match="RuntimeError"):
        front.receive(1)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_a_dead_rank_is_started_again_as_often_as_asked() -> None:
    front, cores, _ = client(2, restarts=2)
    several, old = front._ranks, cores[1]
    told = stats(num_running=2, generation_tokens=7, step_id=5)
    old.say(Outputs(CoreOutputs(outputs=[token("x")], stats=told)))
    for life in range(3):
        assert several.living == (0, 1)
        front.add([request(f"a{life}")])
        front.add([request(f"b{life}")])
        dying: Any = several._cores[1]
        assert dying.sent[-1].requests[0].request_id[1:] == str(life)
        dying.die(EngineDeadError("the core", "gone"))
        while not any(output.error for output in front.receive(5).outputs):
            pass
        assert several.living == (0,) and dying.left.wait(5)
        if life < 2:
            until(lambda: front.receive(0.01) is not None and several.living == (0, 1))
            assert several._cores[1] is not dying and not several._cores[1].left.is_set()
            dying.say(said(token(f"a{life}")))  # of a life that is over; nobody listens to its thread any more
    time.sleep(0.1)
    assert front.receive(0.01).outputs == [] and several.living == (0,), "none is left"
    merged = several.stats()
    assert merged is not None and merged.generation_tokens == 7 and merged.num_running == 0
    front.shutdown()


def test_counters_go_on_after_a_restart() -> None:
    front, cores, _ = client(2, restarts=1)
    several = front._ranks
    cores[1].say(Outputs(CoreOutputs(outputs=[token("x")], stats=stats(generation_tokens=7, num_running=3))))
    cores[1].die(EngineDeadError("the core", "gone"))
    until(lambda: front.receive(0.01) is not None and several.living == (0,))
    until(lambda: front.receive(0.01) is not None and several.living == (0, 1))
    now = stats(generation_tokens=2, num_running=1, pages_total=9)
    several._cores[1].say(Outputs(CoreOutputs(outputs=[token("x")], stats=now)))  # type: ignore[attr-defined]
    until(lambda: bool(front.receive(0.01).outputs))
    state = several.states()[1].stats
    assert state is not None and (state.generation_tokens, state.num_running, state.pages_total) == (9, 1, 9)
    several._cores[0].frozen = True  # type: ignore[attr-defined]
    assert [one.stopped for one in several.states()] == [True, False]


@pytest.mark.parametrize("slow", [False, True])
def test_a_shutdown_ends_a_restart(slow: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it waits for its time, or for the model."""
    monkeypatch.setattr(restarts, "FIRST_PAUSE", 0.01 if slow else 60.0)
    front, cores, _ = client(2, restarts=5)
    cores[1].start.slow = True
    cores[1].die(EngineDeadError("the core", "gone"))
    front.receive(0.2)
    began = time.monotonic()
    front.shutdown()
    assert time.monotonic() - began < 5
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("close-")]


def answering(core: Any, value: Any = None, error: str = "") -> None:
    """Answer the next call, from another thread."""

    def wait() -> None:
        deadline = time.monotonic() + 10
        while not (calls := [message for message in core.sent if isinstance(message, Call)]):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        core.say(Reply(calls[-1].call_id, msgspec.to_builtins(value), error))

    threading.Thread(target=wait).start()


def test_calls_go_to_all_and_are_merged() -> None:
    front, cores, router = client(2)
    front.add([request("r0")])
    cores[0].say(said(token("r0")))  # news that come in between are kept
    answering(cores[0], stats(num_running=2, step_id=9, prefix_hits=4))
    answering(cores[1], stats(num_running=3, step_id=7, prefix_hits=5))
    merged = front.stats()
    assert (merged.num_running, merged.step_id, merged.prefix_hits) == (5, 9, 9)
    assert [output.request_id for output in front.receive(1).outputs] == ["r0"]
    for core in cores:
        core.sent.clear()
        answering(core)
    assert front.call("reset_prefix_cache") is None and router.resets
    for core, page in zip(cores, (b"\0", b"\2"), strict=True):
        core.sent.clear()
        answering(core, PageMap(holders=page, cached=b"\1"))
    maps = msgspec.convert(front.call("page_map"), list[PageMap])
    assert [(told.holders, told.cached) for told in maps] == [(b"\0", b"\1"), (b"\2", b"\1")]
    for core, error in zip(cores, ("", "AssertionError: a page is lost"), strict=True):
        core.sent.clear()
        answering(core, error=error)
    with pytest.raises(EngineError, match="rank 1.*a page is lost"):
        front.call("check_integrity")


def test_a_rank_that_dies_answers_no_call() -> None:
    front, cores, _ = client(2)
    front.add([request("r0")])
    answering(cores[1], stats(num_running=3))
    cores[0].die(EngineDeadError("the core", "gone"))
    assert front.stats().num_running == 3
    assert [output.request_id for output in front.receive(1).outputs] == ["r0"]


def test_waiting_ends_with_the_time() -> None:
    front, _, _ = client(2)
    assert front.receive(0.01).outputs == [] and not front.has_work()


def test_threads_are_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    from engine import EngineArgs
    from engine.frontend import rank_starts as module
    from engine.frontend.launch import launch

    monkeypatch.setattr(module, "_cores", lambda: 7)
    start = launch(EngineArgs(model="tiny")).start
    assert rank_starts(start, 1) == [start]
    workers = [one.worker for one in rank_starts(start, 3)]
    assert [(w.data_parallel_rank, w.data_parallel_size, w.num_threads) for w in workers] == [
        (0, 3, 2), (1, 3, 2), (2, 3, 2),
    ]  # fmt: skip
    assert rank_starts(start, 9)[8].worker.num_threads == 1


def test_a_router_without_ranks_is_refused() -> None:
    from engine import EngineArgs
    from engine.frontend.assemble import start_in_process
    from engine.frontend.launch import launch
    from engine.types.errors import UnfitDriverError

    with pytest.raises(ConfigError, match="one engine core"):
        launch(EngineArgs(model="tiny", router="least_loaded"))
    with pytest.raises(ConfigError, match="one engine core"):
        launch(EngineArgs(model="tiny", data_parallel_restarts=1))
    with pytest.raises(ConfigError, match="one engine core"):
        launch(EngineArgs(model="tiny", **{"router.kv_weight": 1}))
    with pytest.raises(UnfitDriverError, match="prefix caching is off"):
        launch(EngineArgs(model="tiny", data_parallel_size=2, router="prefix_aware", enable_prefix_caching=False))
    plan = launch(EngineArgs(model="tiny", data_parallel_size=2))
    assert plan.router is not None and plan.router.candidate.name == "least_loaded"
    with pytest.raises(ConfigError, match="data_parallel_size=2"):
        start_in_process(plan)
