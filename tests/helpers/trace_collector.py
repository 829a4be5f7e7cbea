"""A collector of OpenTelemetry's traces: an HTTP server that decodes what it is sent."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from processes import wait_for


class TraceCollector:
    """What a collector was sent.

    Attributes:
        spans: all spans so far.
        resources: attributes of the programs that sent them.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, object]] = []

    def add(self, path: str, data: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        assert path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append(attributes(resource.resource))
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)

    def trace_of(self, request_id: str) -> tuple[Any, list[Any]]:
        """Return the span of a request and its children, once they are there."""

        def found() -> list[Any]:
            return [
                span
                for span in self.spans
                if attributes(span).get("gen_ai.request.id") == request_id
            ]

        wait_for(lambda: bool(found()))
        (root,) = found()
        return root, [span for span in self.spans if span.parent_span_id == root.span_id]


def attributes(holder: Any) -> dict[str, object]:
    """Return the attributes of a span or a resource."""
    return {item.key: _value(item.value) for item in holder.attributes}


def _value(value: Any) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(item) for item in value.array_value.values]
    return getattr(value, kind)


class _Receiver(ThreadingHTTPServer):
    """Has a port of its own from the start, and refuses connections until it is activated."""

    allow_reuse_address = False

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler, bind_and_activate=False)
        self.server_bind()


@dataclass(frozen=True)
class Port:
    """A port of the loopback interface that nobody else can have."""

    number: int
    receiver: ThreadingHTTPServer

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Receive what is sent to it."""
        self.receiver.server_activate()
        thread = threading.Thread(target=self.receiver.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield
        finally:
            self.receiver.shutdown()
            thread.join()


@contextmanager
def port_of(collector: TraceCollector) -> Iterator[Port]:
    """Yield a port where a collector can listen; until it does, connections are refused."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.add(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with _Receiver(Handler) as receiver:
        yield Port(receiver.server_address[1], receiver)


@contextmanager
def collecting(collector: TraceCollector) -> Iterator[int]:
    """Listen on a port of the loopback interface, and yield it."""
    with port_of(collector) as port, port.listening():
        yield port.number
