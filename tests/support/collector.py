"""A collector of traces: takes spans by OTLP over HTTP, as Jaeger, Tempo and Phoenix do."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Received(msgspec.Struct, kw_only=True):
    """One span.

    Attributes:
        service: That sent it.
        name: Of the span.
        kind: As OTLP numbers it.
        trace: Its trace, in hexadecimal digits.
        id: Its own.
        parent: Empty for the first one of a trace.
        links: The ids of the spans that it is linked to.
        seconds: From begin to end.
        begun: Unix seconds.
        attributes: As sent.
        error: Its status's text where it failed.
    """

    service: str
    name: str
    kind: int
    trace: str
    id: str
    parent: str
    links: list[str]
    begun: float
    seconds: float
    attributes: dict[str, Any]
    error: str | None


class TraceCollector:
    """Keeps the spans that it gets.

    Attributes:
        spans: In the order of their arrival.
        url: For `OTEL_EXPORTER_OTLP_ENDPOINT`.
    """

    def __init__(self, port: int, spans: list[Received]) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.spans = spans

    def named(self, name: str, service: str = "") -> list[Received]:
        """The spans of a name, of one service or of all."""
        return [each for each in self.spans if each.name == name and service in ("", each.service)]

    def below(self, span: Received) -> dict[str, Received]:
        """The spans whose parent is this one, by name."""
        return {each.name: each for each in self.spans if each.parent == span.id}


@contextlib.contextmanager
def collecting() -> Iterator[TraceCollector]:
    """A collector on a free port."""
    spans: list[Received] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            spans.extend(_read(ExportTraceServiceRequest.FromString(body)))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=lambda: server.serve_forever(0.05), daemon=True)
    thread.start()
    try:
        yield TraceCollector(server.server_port, spans)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _read(request: ExportTraceServiceRequest) -> Iterator[Received]:
    for of_resource in request.resource_spans:
        service = _attributes(of_resource.resource.attributes)["service.name"]
        for of_scope in of_resource.scope_spans:
            for span in of_scope.spans:
                yield Received(
                    service=service,
                    name=span.name,
                    kind=span.kind,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    links=[link.span_id.hex() for link in span.links],
                    begun=span.start_time_unix_nano / 1e9,
                    seconds=(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
                    attributes=_attributes(span.attributes),
                    error=span.status.message if span.status.code == 2 else None,
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}
