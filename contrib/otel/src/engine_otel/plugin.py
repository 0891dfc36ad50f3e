"""The hooks, and the plugin's options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engine.plugin import hookimpl

if TYPE_CHECKING:
    from engine.types.hooks import EngineInfo, RequestSummary
    from engine_otel.spans import SpanWriter


class TracingOptions(BaseModel):
    """Set as `--hooks.otel.NAME VALUE`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    endpoint: str | None = Field(
        default=None,
        description="where the collector takes OTLP over HTTP, e.g. http://localhost:4318; none: no traces",
    )
    service_name: Annotated[str, Field(min_length=1)] = Field(
        default="engine", description="the resource's service.name"
    )
    sample_ratio: Annotated[float, Field(ge=0, le=1)] = Field(
        default=1.0,
        description="part of the traces that begin here; what comes with a traceparent is as its sender says",
    )
    headers: dict[str, str] = Field(default_factory=dict, description="sent with each export", repr=False)
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] = Field(
        default=5.0, description="seconds that an export may take, and that the end of the engine waits for the last"
    )

    @field_validator("endpoint")
    @classmethod
    def _is_http(cls, value: str | None) -> str | None:
        if value and not value.startswith(("http://", "https://")):
            raise ValueError("it is no http:// or https:// address")
        return value or None


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
