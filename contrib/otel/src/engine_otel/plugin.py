"""The hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.plugin import hookimpl
from engine_otel.options import TracingOptions

if TYPE_CHECKING:
    from engine.types.hooks import EngineInfo, RequestSummary
    from engine_otel.spans import SpanWriter


class Tracing:
    """Writes a span for each sequence that ends. Without an endpoint it implements no hook, and costs nothing."""

    Options = TracingOptions

    def __init__(self, options: TracingOptions) -> None:
        self._options = options
        self._writer: SpanWriter | None = None
        if options.endpoint is None:
            silent: dict[str, Any] = dict.fromkeys(("engine_started", "request_finished", "engine_stopping"))
            vars(self).update(silent)

    @hookimpl
    def engine_started(self, info: EngineInfo) -> None:
        """Open the way to the collector; nothing is sent yet."""
        from engine_otel.spans import SpanWriter

        self._writer = SpanWriter(self._options, info)

    @hookimpl
    def request_finished(self, summary: RequestSummary) -> None:
        """Queue the spans; a thread of OpenTelemetry's own sends them."""
        if self._writer is not None:
            self._writer.write(summary)

    @hookimpl
    def engine_stopping(self) -> None:
        """Send what is left."""
        writer = self._writer
        self._writer = None
        if writer is not None:
            writer.close()
