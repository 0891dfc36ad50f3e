"""Summaries become the spans that a real collector reads."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from pydantic import ValidationError

from engine.plugin import HookRelay, Registry
from engine.plugin.candidate import Candidate
from engine.types.hooks import EngineInfo, HTTPOrigin, RequestSummary
from engine_otel.options import TracingOptions
from engine_otel.spans import traces_url

INFO = EngineInfo(
    model="m", architecture="A", dtype="float32", device="cpu", max_model_len=8, max_num_seqs=1, num_ranks=1
)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
ME = Candidate("hooks.frontend", "otel", 0, "engine-otel", "0.1.0", "engine_otel:Tracing")


def relay(**options):
    return HookRelay("frontend", Registry([ME]), options={"otel": options} if options else {})


def summary(**changes):
    told = {
        "request_id": "r",
        "index": 0,
        "model": "m",
        "arrival_time": 1000.0,
        "queue_seconds": 0.5,
        "prefill_seconds": 1.0,
        "first_token_seconds": 2.0,
        "decode_seconds": 3.0,
        "total_seconds": 6.0,
        "prompt_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 7,
        "finish_reason": "stop",
    }
    return RequestSummary(**{**told, **changes})


def run(collector, *summaries, **options):
    hooks = relay(endpoint=collector.endpoint, **options)
    hooks.engine_started(info=INFO)
    for one in summaries:
        hooks.request_finished(summary=one)
    hooks.engine_stopping()
    assert not hooks.failures
    return collector.spans


def test_without_an_endpoint_nobody_listens():
    hooks = relay()
    assert [c.name for c in hooks.plugins] == ["otel"]
    assert hooks.engine_started is hooks.request_finished is hooks.engine_stopping is None


def test_importing_the_plugin_is_light():
    code = "import engine_otel, sys; print([m for m in sys.modules if m.startswith(('opentelemetry', 'requests'))])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_a_request_and_its_phases(collector, values):
    spans = {span.name: span for span in run(collector, summary())}
    assert set(spans) == {"text_completion m", "queue", "prefill", "decode"}
    root = spans.pop("text_completion m")
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (1000 * 10**9, 1006 * 10**9)
    assert root.kind == Span.SPAN_KIND_SERVER and root.parent_span_id == b""
    times = {name: (s.start_time_unix_nano / 1e9, s.end_time_unix_nano / 1e9) for name, s in spans.items()}
    assert times == {"queue": (1000.5, 1001.0), "prefill": (1001.0, 1002.0), "decode": (1002.0, 1005.0)}
    assert {(s.parent_span_id, s.trace_id) for s in spans.values()} == {(root.span_id, root.trace_id)}
    assert values(root) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "engine",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.response.id": "r",
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 7,
        "gen_ai.usage.cache_read.input_tokens": 4,
        "engine.sequence.index": 0,
        "engine.time_to_first_token": 2.0,
    }
    resource = values(collector.exports[0].resource_spans[0].resource)
    assert resource["service.name"] == "engine" and resource["engine.model.architecture"] == "A"
    assert collector.requests[0][0] == "/v1/traces"


def test_an_error_before_the_first_token(collector, values):
    never = {"queue_seconds": None, "prefill_seconds": None, "first_token_seconds": None, "decode_seconds": 0.0}
    [span] = run(collector, summary(**never, finish_reason="error", error_code="request_timeout", output_tokens=0))
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert values(span)["error.type"] == "request_timeout"


@pytest.mark.parametrize(("flag", "count"), [("01", 4), ("00", 0)])
def test_the_parent_decides_whatever_the_ratio(collector, flag, count):
    headers = {"traceparent": f"00-{TRACE}-{SPAN}-{flag}", "tracestate": "a=b"}
    http = HTTPOrigin(method="POST", path="/v1/chat/completions", headers=headers)
    spans = run(collector, summary(http=http), sample_ratio=0 if count else 1)
    assert len(spans) == count
    if count:
        [root] = [span for span in spans if span.name == "chat m"]
        assert (root.trace_id.hex(), root.parent_span_id.hex(), root.trace_state) == (TRACE, SPAN, "a=b")


def test_sampling_service_and_headers(collector, values):
    options = {"service_name": "tales", "headers": {"x-tenant": "a"}}
    many = [summary(request_id=str(i)) for i in range(400)]
    spans = run(collector, *many, sample_ratio=0.5, **options)
    assert 100 < len(spans) / 4 < 300
    assert values(collector.exports[0].resource_spans[0].resource)["service.name"] == "tales"
    assert collector.requests[0][1]["x-tenant"] == "a"


def test_a_collector_that_is_away_holds_nobody_up():
    hooks = relay(endpoint="http://127.0.0.1:9", timeout=0.5)
    hooks.engine_started(info=INFO)
    began = time.monotonic()
    for _ in range(100):
        hooks.request_finished(summary=summary())
    assert time.monotonic() - began < 2
    hooks.engine_stopping()
    assert time.monotonic() - began < 15


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otlp/v1/traces", "https://a/otlp/v1/traces"),
    ],
)
def test_the_path(endpoint, url):
    assert traces_url(endpoint) == url


@pytest.mark.parametrize("bad", [{"endpoint": "localhost:4318"}, {"sample_ratio": 2}, {"timeout": 0}, {"other": 1}])
def test_bad_options(bad):
    with pytest.raises(ValidationError):
        TracingOptions(**bad)
