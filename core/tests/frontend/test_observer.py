"""What an observer is told of requests, by a clock that the test holds."""

from __future__ import annotations

from types import ModuleType

import pytest

from engine.frontend.input_processor import InputProcessor
from engine.frontend.output_processor import OutputProcessor
from engine.types.errors import EngineDeadError, EngineError
from engine.types.outputs import CoreOutput
from engine.types.params import SamplingParams


class Front:
    """What is told of requests whose core the test plays, at times that the test tells."""

    def __init__(self, doubles: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self._now)
        self.doubles = doubles
        tokenizer = doubles.CharTokenizer()
        self.inputs = InputProcessor(tokenizer, doubles.description(), 64)
        self.outputs = OutputProcessor(tokenizer)
        self.observer = self.outputs.observer = doubles.Recorder()

    def add(self, when: float, name: str, prompt: int, n: int = 1, max_tokens: int | None = 16) -> None:
        self._now = when
        params = SamplingParams(n=n, max_tokens=max_tokens, stop=["\x04"])
        self.outputs.add(self.inputs.process(name, [5] * prompt, params))

    def step(self, when: float, *news: CoreOutput) -> None:
        self._now = when
        self.outputs.process(news, self.doubles.Client())

    def abort(self, when: float, error: EngineError | None, *names: str) -> None:
        self._now = when
        self.outputs.abort(names, error)


def test_the_life_of_requests(doubles: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(doubles, monkeypatch)
    told = front.observer
    front.add(100.0, "a", 10, n=2)
    front.add(101.0, "b", 7, max_tokens=None)
    first = {"queue_time": 0.5, "prefill_time": 0.25}
    front.step(102.0, CoreOutput(request_id="a#0", new_token_ids=[1], **first))
    front.step(
        102.5,
        CoreOutput(request_id="a#0", new_token_ids=[2]),
        CoreOutput(request_id="a#1", new_token_ids=[1], **first),
        CoreOutput(request_id="stranger", new_token_ids=[1]),
    )
    front.step(103.5, CoreOutput(request_id="a#0", new_token_ids=[3, 4]))  # 4 is a stop string
    front.step(103.5, CoreOutput(request_id="a#0", new_token_ids=[5]))
    front.step(104.0, CoreOutput(request_id="b"))
    front.abort(110.0, None, "a", "stranger")
    front.abort(111.0, EngineDeadError("a", "b"), "a", "b")
    assert told.arrivals == ["a", "b"]
    assert told.first == [2.0, 2.5]
    assert told.later == [(0.5, 1), (0.5, 2)]  # one alone, two that came together after a second
    ends = [(one.request_id, reason, seconds, one.num_tokens) for one, reason, seconds in told.ends]
    assert ends == [("a#0", "stop", 3.5, 4), ("a#1", "abort", 10.0, 1), ("b", "error", 10.0, 0)]
    stopped = told.ends[0][0]
    assert (stopped.queue_time, stopped.prefill_time) == (0.5, 0.25)
    assert (stopped.first_token, stopped.last_token) == (102.0, 103.5)
