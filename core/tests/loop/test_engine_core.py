"""The step loop: steps in flight, errors, hooks, starvation."""

from __future__ import annotations

import inspect
import queue
from dataclasses import replace
from typing import Any

import pytest
from cores import LAYOUTS, make_core
from paged_worker import alone
from schedules import Outcome, Planned, Schedule, Settings, run_schedule

from engine.loop import process
from engine.loop.engine_core import EngineCore
from engine.types.errors import ContractError, EngineDeadError, InvalidRequestError
from engine.types.messages import Add, FromCore, ToCore
from engine.types.outputs import StepStats
from engine.types.params import SamplingParams
from engine.types.start import Choice


def settings(**changes: Any) -> Settings:
    plain = Settings(
        num_pages=100,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=64,
        in_flight=2,
        enable_prefix_caching=True,
    )
    return replace(plain, **changes)


def planned(request_id: str, prompt: tuple[int, ...] = (1, 2, 3), max_tokens: int = 12, **changes: Any) -> Planned:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, seed=0)
    return Planned(request_id=request_id, prompt=prompt, params=params, **changes)


def expected(core: EngineCore, request: Planned) -> list[int]:
    return alone(core.scheduler.kv.layout, list(request.prompt), request.params, [], 64)[0]


@pytest.mark.parametrize(("in_flight", "hold"), [(1, True), (2, True), (3, True), (2, False)])
def test_steps_in_flight_feed_placeholders_and_give_the_same_tokens(in_flight: int, hold: bool) -> None:
    core, executor = make_core(LAYOUTS["full and sliding"], settings(in_flight=in_flight, hold=hold))
    requests = tuple(planned(f"r{i}", (i, 5, i, 5, 1)) for i in range(6))
    outcomes = run_schedule(core, Schedule(settings=settings(), requests=requests))
    for request in requests:
        assert outcomes[request.request_id].tokens == expected(core, request)
    if in_flight == 1 or not hold:
        assert executor.num_placeholders == 0 and executor.most_in_flight == 1
    else:
        assert executor.num_placeholders > 30 and executor.most_in_flight == in_flight


def test_an_executor_that_is_done_at_once_gives_each_steps_tokens_in_the_same_call() -> None:
    core, _ = make_core(LAYOUTS["full"], settings(hold=False))
    core.add_request(planned("a", max_tokens=3).to_request())
    for _ in range(3):
        (output,) = core.step().outputs
        assert len(output.new_token_ids) == 1
    assert not core.has_work() and core.step().outputs == []


def test_the_step_loop_fits_on_one_screen() -> None:
    methods = (EngineCore.step, EngineCore._take_finished, EngineCore._take_oldest)
    assert sum(len(inspect.getsource(method).splitlines()) for method in methods) < 55


def test_a_duplicate_id_is_refused_and_the_first_goes_on() -> None:
    core, _ = make_core(LAYOUTS["full"], settings())
    request = planned("a")
    core.add_request(request.to_request())
    with pytest.raises(InvalidRequestError):
        core.add_request(request.to_request())
    outcome = Outcome()
    while core.has_work():
        for output in core.step().outputs:
            outcome.take(output)
    assert outcome.tokens == expected(core, request)
    core.add_request(request.to_request())  # the id is free again


def test_aborts_are_told_and_unknown_ids_ignored() -> None:
    core, _ = make_core(LAYOUTS["full"], settings(max_num_seqs=1))
    core.add_request(planned("running").to_request())
    core.add_request(planned("waiting").to_request())
    core.step()
    core.abort(["running", "waiting", "unknown"])
    core.abort(["running"])
    ends = {}
    while core.has_work():
        ends |= {output.request_id: str(output.finish_reason) for output in core.step().outputs}
        core.check_integrity()
    assert ends == {"running": "abort", "waiting": "abort"}


@pytest.mark.parametrize("point", ["evictor", "executor"])
def test_the_driver_that_breaks_its_contract_is_named(point: str) -> None:
    core, executor = make_core(LAYOUTS["full"], settings())
    core._choices = [Choice(point=point, driver="moon", distribution="engine-moon", version="1.2", value="moon:Card")]

    def fail(*args: object) -> None:
        raise ContractError("a step", "it gave nothing", "another", point=point)

    executor.execute = fail  # type: ignore[method-assign]
    core.add_request(planned("a").to_request())
    (output,) = core.step().outputs
    assert output.error is not None
    assert f"it gave nothing (driver 'moon' for {point}, of engine-moon 1.2)" in output.error[2]
    assert ("with executor moon" in output.error[1]) == (point == "executor")


@pytest.mark.parametrize("where", ["execute", "result"])
def test_an_error_of_the_executor_ends_the_engine(where: str) -> None:
    core, executor = make_core(LAYOUTS["full"], settings(max_num_seqs=1))
    core.add_request(planned("running").to_request())
    core.add_request(planned("waiting").to_request())
    core.step()

    def fail(*args: object) -> None:
        raise RuntimeError("the device fell off the bus")

    if where == "execute":
        executor.execute = fail  # type: ignore[method-assign]
    else:
        executor.taken = fail  # type: ignore[method-assign]
    outputs = core.step().outputs
    assert {output.request_id for output in outputs} == {"running", "waiting"}
    for output in outputs:
        assert output.error is not None and output.error[0] == "engine_dead" and "fell off the bus" in output.error[2]
    assert not core.has_work()
    with pytest.raises(EngineDeadError, match="fell off the bus"):
        core.add_request(planned("late").to_request())
    with pytest.raises(EngineDeadError):
        core.step()
    core.shutdown()
    assert executor.worker.stopped


class Given:
    """A parent that says these messages."""

    def __init__(self, *messages: ToCore) -> None:
        self.messages = list(messages)
        self.inbox = None
        self.outbox: queue.SimpleQueue[FromCore] = queue.SimpleQueue()
        self.send = self.outbox.put

    def receive(self, timeout: float, awake: float = 0.0) -> ToCore | None:
        return self.messages.pop(0) if self.messages else None


def test_an_idle_core_looks_after_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker's death between requests ends the step loop; what was refused by then is told."""
    core, executor = make_core(LAYOUTS["full"], settings())
    core.check_health()

    def dead() -> None:
        raise EngineDeadError("reach the workers", "rank 1 of 2 ended by signal 9")

    executor.check_health = dead  # type: ignore[method-assign]
    monkeypatch.setattr(process, "HEALTH_SECONDS", 0.05)
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        process.step_loop(core, Given())
    parent = Given(Add([planned("late").to_request()]))
    with pytest.raises(EngineDeadError, match="rank 1 of 2"):
        process.step_loop(core, parent)
    (refused,) = parent.outbox.get_nowait().outputs
    assert refused.error[0] == "engine_dead"


def test_statistics_and_the_hook() -> None:
    core, _ = make_core(LAYOUTS["full"], settings(hold=False))
    heard: list[StepStats] = []

    class Relay:
        failures = ()
        step_done = staticmethod(lambda stats: heard.append(stats))

    core._hooks = Relay()  # type: ignore[assignment]
    core.add_request(planned("a", tuple(range(9)), max_tokens=2).to_request())
    first = core.step().stats
    assert first is not None
    assert (first.step_id, first.num_running, first.num_tokens, first.pages_used) == (1, 1, 9, 3)
    core.step()
    assert [(stats.step_id, stats.num_tokens, stats.num_running) for stats in heard] == [(1, 9, 1), (2, 1, 0)]
    assert core.stats().pages_total == 99 and core.stats().prefix_queries == 9


def test_no_request_starves() -> None:
    """Short requests arrive at each step, for ever; a long prompt in their midst still ends, soon after its turn."""
    core, _ = make_core(LAYOUTS["full"], settings(num_pages=16, max_num_seqs=3, max_num_batched_tokens=6))
    core.add_request(planned("s-0", max_tokens=6).to_request())
    core.add_request(planned("long", tuple(i % 13 for i in range(40)), max_tokens=16).to_request())
    for i in range(1, 400):
        core.add_request(planned(f"s-{i}", (i % 13, i % 7), max_tokens=6).to_request())
        if any(output.request_id == "long" and output.finish_reason for output in core.step().outputs):
            break
    else:
        raise AssertionError("the long request starves")
    core.abort(list(core.scheduler.requests))
    while core.has_work():
        core.step()
    core.check_integrity()


def test_ten_thousand_aborts_at_once() -> None:
    core, _ = make_core(LAYOUTS["full"], settings())
    for i in range(10_000):
        core.add_request(planned(f"r{i}", (i % 13, 1, 2)).to_request())
    core.step()
    core.abort([f"r{i}" for i in range(10_000)])
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
    assert sum(output.finish_reason is not None for output in outputs) == 10_000
    core.check_integrity()


def test_an_idle_core_finds_out_that_a_page_is_lost() -> None:
    core, _ = make_core(LAYOUTS["full"], settings())
    core.check_idle()  # there was nothing to do yet
    core.add_request(planned("a").to_request())
    core.step()
    core.check_idle()  # it is not idle
    while core.has_work():
        core.step()
    core.check_idle()
    core.scheduler.kv.pool.num_free -= 1
    core.check_idle()  # it has looked since it last worked
    core.add_request(planned("b").to_request())
    while core.has_work():
        core.step()
    with pytest.raises(EngineDeadError, match="AssertionError"):
        core.check_idle()
    with pytest.raises(EngineDeadError):
        core.add_request(planned("c").to_request())
