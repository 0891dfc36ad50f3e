"""Histograms against prometheus_client's own; the times of requests against a clock that the test holds."""

from __future__ import annotations

from types import ModuleType

import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.frontend.input_processor import InputProcessor
from engine.frontend.measures import REQUEST_SECONDS, Histogram, Measures
from engine.frontend.output_processor import OutputProcessor
from engine.types.errors import EngineDeadError, EngineError
from engine.types.outputs import CoreOutput, StepStats
from engine.types.params import SamplingParams


@given(st.lists(st.tuples(st.sampled_from([*REQUEST_SECONDS, 0.0, 1e9]) | st.floats(0, 1e4), st.integers(1, 3))))
def test_a_histogram_is_prometheus_own(observed: list[tuple[float, int]]) -> None:
    registry = prometheus_client.CollectorRegistry()
    oracle = prometheus_client.Histogram("h", "", buckets=REQUEST_SECONDS, registry=registry)
    ours = Histogram(REQUEST_SECONDS)
    for value, count in observed:
        ours.observe(value, count)
        for _ in range(count):
            oracle.observe(value)
    expected = {
        sample.labels["le"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "h_bucket"
    }
    assert dict(ours.buckets()) == expected
    total = sum(value * count for value, count in observed)
    assert abs(ours.sum - total) <= 1e-9 * total


class Front:
    """What was counted of requests whose core the test plays, at times that the test tells."""

    def __init__(self, doubles: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = 100.0
        monkeypatch.setattr("time.monotonic", lambda: self._now)
        tokenizer = doubles.CharTokenizer()
        self.inputs = InputProcessor(tokenizer, doubles.description(), 64)
        self.measures = Measures(2048)
        self.outputs = OutputProcessor(tokenizer, measures=self.measures)

    def add(self, when: float, name: str, prompt: int, n: int = 1, max_tokens: int | None = 16) -> None:
        self._now = when
        params = SamplingParams(n=n, max_tokens=max_tokens, stop=["\x04"])
        self.outputs.add(self.inputs.process(name, [5] * prompt, params))

    def step(self, when: float, tokens: int, *news: CoreOutput) -> None:
        self._now = when
        self.measures.stepped(stats(tokens))
        self.outputs.process(news)

    def abort(self, when: float, error: EngineError | None, *names: str) -> None:
        self._now = when
        self.outputs.abort(names, error)


def stats(num_tokens: int) -> StepStats:
    return StepStats(
        step_id=1,
        num_running=1,
        num_waiting=0,
        num_tokens=num_tokens,
        pages_used=1,
        pages_total=9,
        prefix_queries=0,
        prefix_hits=0,
        num_preemptions=0,
    )


def values(histogram: Histogram) -> tuple[int, float]:
    return sum(histogram.counts), round(histogram.sum, 6)


def test_the_life_of_requests(doubles: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(doubles, monkeypatch)
    m = front.measures
    front.add(100.0, "a", 10, n=2)
    front.add(101.0, "b", 7, max_tokens=None)
    first = {"queue_time": 0.5, "prefill_time": 0.25}
    front.step(102.0, 10, CoreOutput(request_id="a#0", new_token_ids=[1], **first))
    front.step(
        102.5,
        3,
        CoreOutput(request_id="a#0", new_token_ids=[2]),
        CoreOutput(request_id="a#1", new_token_ids=[1], **first),
        CoreOutput(request_id="stranger", new_token_ids=[1]),
    )
    front.step(103.5, 1, CoreOutput(request_id="a#0", new_token_ids=[3, 4]))  # 4 is a stop string
    front.step(103.5, 0, CoreOutput(request_id="a#0", new_token_ids=[5]))
    front.step(104.0, 0, CoreOutput(request_id="b"))
    front.abort(110.0, None, "a", "stranger")
    front.abort(111.0, EngineDeadError("a", "b"), "a", "b")

    assert values(m.params_n) == (2, 3)
    assert values(m.time_to_first_token) == (2, 2.0 + 2.5)
    assert values(m.inter_token_latency) == (3, 0.5 + 1.0)  # one alone, two that came together after a second
    assert m.inter_token_latency.counts[m.inter_token_latency.bounds.index(0.5)] == 3
    assert values(m.request_time_per_output_token) == (1, 1.5 / 3)
    assert values(m.e2e_latency) == (3, 3.5 + 10.0 + 10.0)
    assert values(m.queue_time) == (2, 1.0) and values(m.prefill_time) == (2, 0.5)
    assert values(m.decode_time) == (2, 1.5) and values(m.inference_time) == (2, 2.0)
    assert values(m.step_tokens) == (3, 14)
    assert values(m.prompt_tokens) == (3, 27) and values(m.generation_tokens) == (3, 5)
    assert values(m.params_max_tokens) == (2, 32)
    assert m.finished == {"stop": 1, "abort": 1, "error": 1, "length": 0}


def test_token_buckets_reach_the_models_length() -> None:
    assert Measures(2048).prompt_tokens.bounds == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    assert Measures(1).prompt_tokens.bounds == (1,)
