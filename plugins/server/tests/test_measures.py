"""Histograms against prometheus_client's own; what is counted of requests."""

from __future__ import annotations

from typing import Any, cast

import prometheus_client
from hypothesis import given
from hypothesis import strategies as st

from engine.embedding import RequestState, SequenceState
from engine.types.outputs import StepStats
from engine.types.params import SamplingParams
from engine_server.metrics.measures import REQUEST_SECONDS, Histogram, Measures


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


def sequence(index: int, *times: float, **fields: Any) -> SequenceState:
    """One of a request's: its first and last token came at these times."""
    made = SequenceState(f"a#{index}", index, SamplingParams(detokenize=False), [5] * 10, cast("Any", None), None)
    for name, value in fields.items():
        setattr(made, name, value)
    if times:
        made.first_token, made.last_token = times
    return made


def test_what_is_counted_of_requests() -> None:
    m = Measures(2048)
    a = RequestState("a", None, [5] * 10, SamplingParams(n=2, max_tokens=16), [], arrived=100.0)
    b = RequestState("b", None, [5] * 7, SamplingParams(max_tokens=None), [], arrived=101.0)
    for request in (a, b):
        m.arrived(request)
    for step in (stats(10), stats(3), None, stats(1), stats(0)):
        m.stepped(step)
    m.first_token(2.0)
    m.first_token(2.5)
    m.next_tokens(0.5, 1)
    m.next_tokens(0.5, 2)
    m.retried()
    waited = {"queue_time": 0.5, "prefill_time": 0.25}
    m.ended(a, sequence(0, 102.0, 103.5, num_tokens=4, **waited), "stop", 103.5)
    m.ended(a, sequence(1, 102.5, 102.5, num_tokens=1, **waited), "abort", 110.0)
    m.ended(b, sequence(0), "error", 111.0)

    assert values(m.params_n) == (2, 3)
    assert values(m.time_to_first_token) == (2, 4.5)
    assert values(m.inter_token_latency) == (3, 1.5)
    assert m.inter_token_latency.counts[m.inter_token_latency.bounds.index(0.5)] == 3
    assert values(m.request_time_per_output_token) == (1, 1.5 / 3)
    assert values(m.e2e_latency) == (3, 3.5 + 10.0 + 10.0)
    assert values(m.queue_time) == (2, 1.0) and values(m.prefill_time) == (2, 0.5)
    assert values(m.decode_time) == (2, 1.5) and values(m.inference_time) == (2, 2.0)
    assert values(m.step_tokens) == (3, 14)
    assert values(m.prompt_tokens) == (3, 27) and values(m.generation_tokens) == (3, 5)
    assert values(m.params_max_tokens) == (2, 32)
    assert m.finished == {"stop": 1, "abort": 1, "error": 1, "length": 0} and m.retries == 1


def test_token_buckets_reach_the_models_length() -> None:
    assert Measures(2048).prompt_tokens.bounds == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)
    assert Measures(1).prompt_tokens.bounds == (1,)
