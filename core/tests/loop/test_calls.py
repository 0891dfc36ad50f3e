"""What frontends call by name: the core's own, what parts add, and workers' methods; and a core in virtual time."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import pytest
from paged_worker import PagedWorker
from test_assemble import REGISTRY, core_start

from engine.frontend.assemble import InProcessClient
from engine.loop.assemble import assemble_core
from engine.loop.engine_core import EngineCore
from engine.loop.process import _answer
from engine.plugin import Registry
from engine.process import wire
from engine.types.errors import ConfigError, EngineError
from engine.types.messages import Call, ToCore
from engine.types.params import SamplingParams
from engine.types.request import EngineRequest, FinishReason


class Answers(PagedWorker):
    """A worker that is asked."""

    def told(self, name: str, numbers: list[int]) -> dict[str, Any]:
        return {name: sum(numbers)}

    def refuses(self) -> None:
        raise ConfigError("ask a worker", "it does not want to", "ask another")


def made(**how: Any) -> EngineCore:
    start = msgspec.structs.replace(core_start(), worker_class="test_calls:Answers")
    return assemble_core(start, Registry(REGISTRY), **how)


def test_calls_have_arguments_and_parts_add_theirs() -> None:
    core = made()
    core.calls["scaled"] = lambda number, by=2: number * by
    assert core.call("scaled", 3) == 6 and core.call("scaled", 3, 5) == 15
    assert core.call("worker.told", "sum", [1, 2]) == [{"sum": 3}]
    assert InProcessClient(core).call("scaled", 4).result() == 8
    sent = wire.decoder(ToCore).decode(wire.encode(Call(7, "worker.told", 1, ["sum", [4, 5]])))
    assert isinstance(sent, Call) and sent.client == 1
    assert _answer(core, sent.call_id, sent.method, sent.args).value == [{"sum": 9}]
    assert _answer(core, 8, "stats", []).error == ""
    core.shutdown()


@pytest.mark.parametrize(
    ("method", "says"),
    [
        ("stat", "did you mean 'stats'"),
        ("shutdown", "no call 'shutdown'"),
        ("worker.execute", "no call"),
        ("worker._drafts", "no call"),
        ("worker.flies", "no such method"),
        ("worker.refuses", "does not want to"),
        ("worker.start_profile", "no such method"),
    ],
)
def test_what_cannot_be_called(method: str, says: str) -> None:
    core = made()
    with pytest.raises(EngineError, match=says):
        core.call(method)
    assert says.replace("'", "") in _answer(core, 1, method, []).error.replace("'", "")
    assert "TypeError" in _answer(core, 2, "stats", ["more"]).error
    core.shutdown()


class VirtualClock:
    """Time that passes where somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_core_in_virtual_time() -> None:
    """A request waits, is computed and runs out of time by the core's clock; none of it takes real time."""
    clock = VirtualClock()
    began, core = time.monotonic(), made(clock=clock)
    params = SamplingParams(temperature=0, max_tokens=50, seed=0)
    core.add_request(EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=params, timeout=3600.0))
    clock.sleep(60)
    outputs = []
    while core.has_work():
        outputs += core.step().outputs
        clock.sleep(600)
    assert time.monotonic() - began < 60
    first = next(output for output in outputs if output.queue_time is not None)
    assert first.queue_time == 60 and first.prefill_time is not None and first.prefill_time % 600 == 0
    assert outputs[-1].finish_reason is FinishReason.ERROR and outputs[-1].error is not None
    assert 3 <= sum(len(output.new_token_ids) for output in outputs) < 50
    core.shutdown()
