"""RequestTraces: a trace of each request for OpenTelemetry, sent with OTLP over HTTP.

Needs the extra ``otel``, and is imported only if traces are asked for. A request's span is made
when the request is finished, from its record; children tell its stages: encode, queue, prefill,
decode.
Attributes follow the semantic conventions for generative AI, with vLLM's additions. What the client
has written is in none of them.

Spans are sent by a thread of OpenTelemetry's. A collector that is down costs them, and a warning.
"""

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, Status, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

from midfill.serving.server.request import Generation, RequestRecord
from midfill.version import __version__

_log = logging.getLogger(__name__)

_SPAN = "llm_request"  # vLLM's name
_TRACE_HEADERS = (b"traceparent", b"tracestate")
_MAX_PROMPTS = 16  # of one request that have children
_MAX_PATH = 200  # characters
_CLOSE_SECONDS = 2.0

Attributes = dict[str, AttributeValue]


class RequestTraces:
    """Makes and sends the traces of a server.

    Args:
        endpoint: URL of the collector; without a path, OTLP's own is added. OpenTelemetry's
            environment variables say the rest, such as OTEL_SERVICE_NAME.
    """

    def __init__(self, endpoint: str) -> None:
        if urlsplit(endpoint).path in ("", "/"):
            endpoint = endpoint.rstrip("/") + "/v1/traces"
        self._exporter = _Exporter(endpoint)
        resource = Resource.create()
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "midfill"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("midfill", __version__)
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self,
        record: RequestRecord,
        headers: Iterable[tuple[bytes, bytes]],
        status: int,
        finish_reasons: Sequence[str],
        now: float,
    ) -> str | None:
        """Send a finished request's trace.

        Args:
            record: the request.
            headers: its HTTP headers; one that has a traceparent continues the client's trace.
            status: its HTTP status.
            finish_reasons: why its answers ended.
            now: the time of its end, by ``time.perf_counter``.

        Returns:
            The trace's id; None if the trace is not sampled.
        """
        ahead = time.time_ns() - int(now * 1e9)

        def clock(seconds: float) -> int:
            return int(seconds * 1e9) + ahead

        carrier = {
            name.decode("ascii"): value.decode("latin-1")
            for name, value in headers
            if name in _TRACE_HEADERS
        }
        span = self._tracer.start_span(
            _SPAN,
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            start_time=clock(record.arrived),
        )
        if not span.is_recording():
            return None
        span.set_attributes(_of_request(record, status))
        if record.generation is not None:
            span.set_attributes(_of_generation(record, record.generation, finish_reasons, now))
        if status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        parent = set_span_in_context(span)
        for name, start, end in _stages(record, now):
            stage = self._tracer.start_span(name, parent, start_time=clock(start))
            stage.end(clock(end))
        span.end(clock(now))
        return format_trace_id(span.get_span_context().trace_id)

    def close(self) -> None:
        """Send what is left, if that is possible soon."""
        if self._exporter.is_failing:
            self._exporter.shutdown()
        # A daemon, since the provider may wait for the collector far longer.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(_CLOSE_SECONDS)
        self._exporter.shutdown()


def _of_request(record: RequestRecord, status: int) -> Attributes:
    attributes: Attributes = {
        "gen_ai.request.id": record.request_id,
        "gen_ai.provider.name": "midfill",
        "gen_ai.operation.name": "chat" if "chat" in record.path else "text_completion",
        "http.request.method": record.method,
        "url.path": record.path[:_MAX_PATH],
        "http.response.status_code": status,
    }
    if record.tenant:
        attributes["midfill.tenant"] = record.tenant
    if record.model is not None:
        attributes["gen_ai.request.model"] = attributes["gen_ai.response.model"] = record.model
    if record.error is not None:
        attributes["error.type"] = record.error
    return attributes


def _of_generation(
    record: RequestRecord, generation: Generation, finish_reasons: Sequence[str], now: float
) -> Attributes:
    usage, sampling, times = generation.usage, generation.sampling, generation.times
    attributes: Attributes = {
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.n": sampling.n,
        "gen_ai.response.finish_reasons": list(finish_reasons),
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
        "gen_ai.usage.completion_tokens": usage.completion_tokens,
        "gen_ai.latency.e2e": now - record.arrived,
    }
    if usage.knows_cached:
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens
    if times.queued is not None:
        attributes["gen_ai.latency.time_in_queue"] = times.queued
    admitted, first, last = times.admitted, times.first_token, times.last_token
    if admitted is not None and first is not None and last is not None:
        attributes["gen_ai.latency.time_to_first_token"] = first - record.arrived
        attributes["gen_ai.latency.time_in_model_prefill"] = first - admitted
        attributes["gen_ai.latency.time_in_model_decode"] = last - first
        attributes["gen_ai.latency.time_in_model_inference"] = last - admitted
    return attributes


def _stages(record: RequestRecord, now: float) -> Iterator[tuple[str, float, float]]:
    """Yield (name, start, end) of the stages that the request reached."""
    for start, end in record.encodings:
        yield "encode", start, end
    if record.generation is None:
        return
    for times in record.generation.prompt_times[:_MAX_PROMPTS]:
        if times.submitted is None:
            continue
        yield "queue", times.submitted, times.admitted or now
        if times.admitted is not None:
            yield "prefill", times.admitted, times.first_token or now
        if times.first_token is not None and times.last_token is not None:
            yield "decode", times.first_token, times.last_token


class _Exporter(SpanExporter):
    """OpenTelemetry's own, whose complaints about one failure after the other are one warning.

    Attributes:
        is_failing: whether the last attempt has failed.
    """

    def __init__(self, endpoint: str) -> None:
        self.is_failing = False
        self._exporter = OTLPSpanExporter(endpoint)
        self._endpoint = endpoint
        self._is_closed = False
        logger = logging.getLogger("opentelemetry")
        logger.propagate = False
        logger.handlers[:] = [_Complaints(self)]

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS and self.is_failing:
            self.is_failing = False
            _log.warning("traces are sent to %s again", self._endpoint)
        return result

    def warn(self, reason: str) -> None:
        """Log that spans can't be sent, unless that is known."""
        if not (self.is_failing or self._is_closed):
            self.is_failing = True
            _log.warning(
                "traces can't be sent to %s, which disturbs nothing else: %s",
                self._endpoint,
                reason,
            )

    def shutdown(self) -> None:
        """Give up what is being sent."""
        if not self._is_closed:
            self._is_closed = True
            self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Do nothing: nothing is held back here."""
        return True


class _Complaints(logging.Handler):
    """What OpenTelemetry logs in its sending thread."""

    def __init__(self, exporter: _Exporter) -> None:
        super().__init__(logging.WARNING)
        self._exporter = exporter

    def emit(self, record: logging.LogRecord) -> None:
        """Pass the first complaint on."""
        self._exporter.warn(record.getMessage()[:300])
