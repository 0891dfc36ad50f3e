"""From a request's summary to spans, named after OpenTelemetry's semantic conventions for generative AI."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.context.context import Context

    from engine.types.hooks import EngineInfo, RequestSummary
    from engine_otel.options import TracingOptions

SCOPE = "engine_otel"
_TRACES = "/v1/traces"
_OPERATIONS = {"chat/completions": "chat", "embeddings": "embeddings"}
"""By the end of the path; every other request completes a text."""


class SpanWriter:
    """Makes spans and hands them to OpenTelemetry's batch processor, which sends them from a thread of its own. What a
    collector that is away would have got is dropped, when its queue is full.

    Args:
        options: the plugin's; the endpoint is there.
        info: the engine.
    """

    def __init__(self, options: TracingOptions, info: EngineInfo) -> None:
        assert options.endpoint is not None
        exporter = OTLPSpanExporter(
            endpoint=traces_url(options.endpoint), headers=dict(options.headers), timeout=options.timeout
        )
        resource = Resource.create({SERVICE_NAME: options.service_name, "engine.model.architecture": info.architecture})
        # A provider of our own, not the program's global one: an engine in a program leaves that to the program.
        self._provider = TracerProvider(
            sampler=ParentBased(TraceIdRatioBased(options.sample_ratio)), resource=resource, shutdown_on_exit=True
        )
        self._processor = BatchSpanProcessor(exporter, export_timeout_millis=options.timeout * 1000)
        self._provider.add_span_processor(self._processor)
        self._tracer: Tracer = self._provider.get_tracer(SCOPE)
        self._parents = TraceContextTextMapPropagator()
        self._timeout = options.timeout

    def write(self, summary: RequestSummary) -> None:
        """One span for the sequence, and within it one for each of queue, prefill and decode that it came to."""
        operation = _operation(summary)
        span = self._tracer.start_span(
            f"{operation} {summary.model}",
            context=self._parents.extract({} if summary.http is None else summary.http.headers),
            kind=SpanKind.SERVER,
            start_time=_nanoseconds(summary.arrival_time),
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "engine",
                "gen_ai.request.model": summary.model,
                "gen_ai.response.model": summary.model,
                "gen_ai.response.id": summary.request_id,
                "gen_ai.response.finish_reasons": (summary.finish_reason,),
                "gen_ai.usage.input_tokens": summary.prompt_tokens,
                "gen_ai.usage.output_tokens": summary.output_tokens,
                "gen_ai.usage.cache_read.input_tokens": summary.cached_tokens,
                "engine.sequence.index": summary.index,
            },
        )
        if summary.first_token_seconds is not None:
            span.set_attribute("engine.time_to_first_token", summary.first_token_seconds)
            self._phases(summary, summary.arrival_time + summary.first_token_seconds, set_span_in_context(span))
        if summary.finish_reason == "error":
            span.set_attribute("error.type", summary.error_code or "_OTHER")
            span.set_status(Status(StatusCode.ERROR, summary.error_code))
        span.end(_nanoseconds(summary.arrival_time + summary.total_seconds))

    def close(self) -> None:
        """Send what is left, for as long as an export may take; then nothing more."""
        self._provider.force_flush(int(self._timeout * 1000))
        self._provider.shutdown()

    def _phases(self, summary: RequestSummary, first_token: float, parent: Context) -> None:
        prefill = first_token - (summary.prefill_seconds or 0.0)
        for name, begin, end in (
            ("queue", prefill - (summary.queue_seconds or 0.0), prefill),
            ("prefill", prefill, first_token),
            ("decode", first_token, first_token + summary.decode_seconds),
        ):
            span = self._tracer.start_span(name, context=parent, start_time=_nanoseconds(begin))
            span.end(_nanoseconds(end))


def traces_url(endpoint: str) -> str:
    """Where traces go: to the path that the endpoint names, or to OTLP's own where it names none."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _TRACES


def _operation(summary: RequestSummary) -> str:
    path = "" if summary.http is None else summary.http.path
    return next((name for end, name in _OPERATIONS.items() if path.endswith(end)), "text_completion")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
