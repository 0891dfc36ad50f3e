"""An OTLP/HTTP collector on loopback, which reads the protobuf with OpenTelemetry's own definitions."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Takes exports, and remembers them."""

    def __init__(self) -> None:
        self.exports: list[ExportTraceServiceRequest] = []
        self.requests: list[tuple[str, dict[str, str]]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    data = gzip.decompress(data)
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.requests.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                collector.exports.append(ExportTraceServiceRequest.FromString(data))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for export in self.exports
            for resource in export.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def wait(self, count: int, seconds: float = 30) -> list[Span]:
        deadline = time.monotonic() + seconds
        while len(self.spans) < count:
            assert time.monotonic() < deadline, f"{len(self.spans)} of {count} spans came"
            time.sleep(0.02)
        return self.spans


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.server.shutdown()
    made.server.server_close()


def values(span: Any) -> dict[str, Any]:
    """The attributes of a span or a resource as plain values."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {entry.key: plain(entry.value) for entry in span.attributes}


@pytest.fixture(name="values")
def _values():  # type: ignore[no-untyped-def]
    return values
