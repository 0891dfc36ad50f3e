"""A hook plugin that sends OpenTelemetry traces. OpenTelemetry itself is imported when there is an endpoint."""

from engine_otel.options import TracingOptions
from engine_otel.plugin import Tracing

__all__ = ["Tracing", "TracingOptions"]
