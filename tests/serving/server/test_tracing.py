"""Traces: a real server sends them to a real receiver of OTLP over HTTP."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from running_server import RunningServer, start
from trace_collector import TraceCollector, attributes, collecting, port_of

from midfill.errors import MidfillError
from midfill.serving.options import ServeOptions
from midfill.system.extras import require

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

SECRET = "nobody should read this"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture(scope="module")
def collector() -> TraceCollector:
    return TraceCollector()


@pytest.fixture(scope="module")
def server(tiny_folder: Path, collector: TraceCollector) -> Iterator[RunningServer]:
    """A server that sends its spans at once."""
    with pytest.MonkeyPatch.context() as patch, collecting(collector) as port:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "60")
        options = ["--otlp-traces-endpoint", f"http://127.0.0.1:{port}", "--api-key", "key"]
        options += ["--kv-memory", "4MB", "--log-format", "json"]
        with start(tiny_folder, *options) as server:
            yield server


def post(server: RunningServer, name: str, body: object, **headers: str) -> int:
    given = {"authorization": "Bearer key", "x-request-id": name, **headers}
    return server.post("/v1/completions", body, headers=given).status_code


def test_a_request_is_a_span_with_its_stages_below(
    server: RunningServer, collector: TraceCollector
) -> None:
    body = {"prompt": SECRET, "suffix": SECRET, "max_tokens": 4, "temperature": 0, "seed": 1}
    assert post(server, "whole", body) == 200
    root, stages = collector.trace_of("whole")
    assert (root.name, root.parent_span_id) == ("llm_request", b"")
    assert root.kind == root.SPAN_KIND_SERVER
    assert [stage.name for stage in stages] == ["encode", "queue", "prefill", "decode"]
    times = [
        time for stage in stages for time in (stage.start_time_unix_nano, stage.end_time_unix_nano)
    ]
    assert [root.start_time_unix_nano, *times, root.end_time_unix_nano] == sorted(
        [root.start_time_unix_nano, *times, root.end_time_unix_nano]
    )
    assert stages[1].end_time_unix_nano == stages[2].start_time_unix_nano
    found = attributes(root)
    assert found["gen_ai.latency.e2e"] > found["gen_ai.latency.time_to_first_token"] > 0  # type: ignore[operator]
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "tiny-llama",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
        "url.path": "/v1/completions",
        "midfill.tenant": "key-1",
    }
    assert expected.items() <= found.items()
    assert found["gen_ai.usage.prompt_tokens"] == server.logged("whole")["prompt_tokens"]
    assert collector.resources[0]["service.name"] == "midfill"
    assert not any(SECRET in str(span) for span in collector.spans)


def test_the_log_names_the_trace(server: RunningServer, collector: TraceCollector) -> None:
    assert post(server, "logged", {"prompt": "a", "max_tokens": 1}) == 200
    root, _ = collector.trace_of("logged")
    assert server.logged("logged")["trace_id"] == root.trace_id.hex()


def test_a_clients_trace_is_continued(server: RunningServer, collector: TraceCollector) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    assert post(server, "continued", body, traceparent=f"00-{TRACE}-{PARENT}-01") == 200
    root, stages = collector.trace_of("continued")
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == (TRACE, PARENT)
    assert {stage.trace_id.hex() for stage in stages} == {TRACE}
    assert post(server, "bad parent", body, traceparent="00-none") == 200


def test_a_trace_that_the_client_does_not_sample_is_not_sent(
    server: RunningServer, collector: TraceCollector
) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    assert post(server, "unsampled", body, traceparent=f"00-{TRACE}-{PARENT}-00") == 200
    assert "trace_id" not in server.logged("unsampled")


def test_a_refused_request_says_why(server: RunningServer, collector: TraceCollector) -> None:
    assert post(server, "refused", {"prompt": 5.5}) == 400
    root, stages = collector.trace_of("refused")
    assert stages == []
    expected = {"http.response.status_code": 400, "error.type": "invalid_request_error"}
    assert expected.items() <= attributes(root).items()


def test_a_collector_that_is_down_costs_one_warning(tiny_folder: Path) -> None:
    collector = TraceCollector()
    with port_of(collector) as port, pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
        endpoint = f"http://127.0.0.1:{port.number}/v1/traces"
        options = ["--otlp-traces-endpoint", endpoint, "--kv-memory", "4MB"]
        with start(tiny_folder, *options) as server:
            for number in range(5):
                assert post(server, f"down-{number}", {"prompt": "a", "max_tokens": 1}) == 200
                server.wait_for(lambda: any("can't be sent" in line for line in server.log))
            with port.listening():

                def is_received() -> bool:
                    post(server, "up", {"prompt": "a", "max_tokens": 1})
                    return any(
                        attributes(span).get("gen_ai.request.id") == "up"
                        for span in collector.spans
                    )

                server.wait_for(is_received)
                server.wait_for(lambda: any("again" in line for line in server.log))
                warnings = [line for line in server.log if "WARNING" in line]
    assert [re.sub(".* WARNING |,.*", "", line) for line in warnings] == [
        f"traces can't be sent to {endpoint}",
        f"traces are sent to {endpoint} again",
    ]


def test_nothing_is_imported_without_the_option() -> None:
    # FastAPI itself imports OpenTelemetry's API where it is installed.
    program = (
        "import sys, midfill.serving.server.startup, midfill.serving.server.app;"
        "names = 'midfill.serving.server.tracing', 'opentelemetry.sdk', 'opentelemetry.exporter';"
        "sys.exit(any(name.startswith(names) for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("url", ["localhost:4317", "grpc://a:4317", "http://", "http://a b"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(MidfillError, match="--otlp-traces-endpoint takes a URL"):
        ServeOptions(model="none", otlp_traces_endpoint=url)


def test_missing_libraries_are_named_with_their_extra() -> None:
    with pytest.raises(MidfillError, match=r"pip install 'midfill\[otel\]'"):
        require("--otlp-traces-endpoint", ["no_such.library"], extra="otel")
