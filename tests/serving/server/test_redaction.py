"""What users write and the keys they send appear in no output of a server, at any level."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from running_server import RunningServer, start
from trace_collector import TraceCollector, collecting

pytest.importorskip("opentelemetry.sdk")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CANARY = "Canary7f3a"
KEY = f"{CANARY}-key"
OPENAI = {"prompt": f"{CANARY} = ", "suffix": f"\n{CANARY}", "max_tokens": 4}
MIDFILL = {
    "document": CANARY, "path": f"{CANARY}.py", "repository": CANARY, "lines": "single",
    "context": [{"text": CANARY, "path": CANARY}],
}  # fmt: skip
MESSAGES = [{"role": "user", "content": CANARY}]
BODIES: list[tuple[str, object]] = [
    ("/v1/completions", {**OPENAI, "midfill": MIDFILL, "stop": [CANARY], "user": CANARY}),
    ("/v1/completions", {**OPENAI, "stream": True}),
    ("/v1/completions", {"prompt": CANARY * 500}),
    ("/v1/completions", {"prompt": CANARY, "model": CANARY}),
    ("/v1/completions", {"prompt": CANARY, "logit_bias": {CANARY: 1}}),
    ("/v1/completions", {"prompt": CANARY, "midfill": {CANARY: CANARY}}),
    ("/v1/completions", {"prompt": CANARY, "midfill": {"method": CANARY}}),
    ("/v1/completions", {"prompt": {CANARY: CANARY}}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": [{"role": CANARY, "content": {CANARY: 1}}]}),
    ("/infill", {"input_prefix": CANARY, "input_suffix": CANARY, "input_extra": [
        {"text": CANARY, "filename": CANARY}], "n_predict": 3}),
    ("/completion", {"prompt": CANARY, "n_predict": 3}),
    ("/tokenize", {"content": CANARY}),
    ("/api/generate", {"model": "tiny-llama", "prompt": CANARY, "suffix": CANARY}),
    ("/api/generate", {"model": CANARY, "prompt": CANARY}),
    ("/api/chat", {"model": "tiny-llama", "messages": MESSAGES}),
    ("/v1/fim/completions", {"prompt": CANARY, "suffix": CANARY, "max_tokens": 3}),
    ("/v1/completions", {"segments": {"prefix": CANARY, "suffix": CANARY}}),
    ("/v1/events", {"type": CANARY, "completion_id": CANARY, "choice_index": 0}),
]  # fmt: skip
RAW = [
    f'{{"prompt": "{CANARY}'.encode(),
    f'{{"prompt": "{CANARY}\ud800"}}'.encode("utf-8", "surrogatepass"),
    f'{{"prompt": NaN, "{CANARY}": 1}}'.encode(),
    f"[{CANARY}]".encode(),
    CANARY.encode() + b"\xff",
]


@pytest.fixture(scope="module")
def collector() -> TraceCollector:
    return TraceCollector()


@pytest.fixture(scope="module", params=[True, False], ids=["redacted", "not-redacted"])
def redacted(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(scope="module")
def server(tiny_folder: Path, collector: TraceCollector, redacted: bool) -> Iterator[RunningServer]:
    with pytest.MonkeyPatch.context() as patch, collecting(collector) as port:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        options = ["--otlp-traces-endpoint", f"http://127.0.0.1:{port}", "--api-key", KEY]
        options += ["--kv-memory", "4MB", "--log-level", "debug"]
        options += ["--redact"] if redacted else []
        with start(tiny_folder, *options, step_seconds=0.005) as server:  # some act amid answers
            yield server


def write_everywhere(server: RunningServer, headers: dict[str, str]) -> None:
    """Send the canary wherever a client can write something."""
    for path, body in BODIES:
        server.post(path, body, headers=headers)
    for raw in RAW:
        json = {**headers, "content-type": "application/json"}
        server.post("/v1/completions", content=raw, headers=json)
        server.post("/infill", content=raw, headers=headers)
    for wrong in (CANARY, f"Bearer {CANARY}", f"Basic {CANARY}", f"{CANARY} {CANARY}"):
        server.post("/v1/completions", OPENAI, headers={**headers, "authorization": wrong})
        server.client.get(f"{server.url}/metrics", headers={"authorization": wrong})
    server.client.get(f"{server.url}/v1/models?{CANARY}={CANARY}", headers=headers)
    server.client.get(f"{server.url}/slots?fail_on_no_slot={CANARY}", headers=headers)
    server.post("/v1/completions", content=CANARY, headers={**headers, "content-type": CANARY})
    with contextlib.suppress(httpx.TransportError):
        server.client.request(CANARY.upper(), f"{server.url}/v1/models", headers=headers)
    address = urlsplit(server.url)
    for garbage in (f"{CANARY}\r\n\r\n", f"GET /health HTTP/1.1\r\n{CANARY}\r\n\r\n"):
        with socket.create_connection((address.hostname, address.port)) as connection:
            connection.sendall(garbage.encode())
            connection.recv(1000)
    long = {**OPENAI, "max_tokens": 300, "ignore_eos": True, "stream": True}
    with server.client.stream(
        "POST", f"{server.url}/v1/completions", json=long, headers=headers
    ) as response:
        next(response.iter_bytes())  # and then it leaves


def crash_the_engine(server: RunningServer, headers: dict[str, str]) -> None:
    """Have the engine dump where its threads are while it works on the canary."""
    body = {**OPENAI, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with (
        contextlib.suppress(httpx.TransportError),
        server.client.stream(
            "POST", f"{server.url}/v1/completions", json=body, headers=headers
        ) as response,
    ):
        chunks = response.iter_bytes()
        next(chunks)
        os.kill(server.engine_process(), signal.SIGABRT)
        list(chunks)
    server.wait_for(lambda: any("Fatal Python error: Aborted" in line for line in server.log))
    server.wait_for(lambda: server.client.get(f"{server.url}/health").status_code == 200)


def test_no_output_holds_what_users_wrote(
    server: RunningServer, collector: TraceCollector, redacted: bool
) -> None:
    headers = {"authorization": f"Bearer {KEY}", "user-agent": CANARY, "cookie": CANARY}
    headers |= {"referer": CANARY, "traceparent": CANARY, "x-forwarded-for": CANARY}
    if redacted:  # else these two are logged, as documented
        headers |= {"x-request-id": CANARY}
        server.client.get(f"{server.url}/{CANARY}/{CANARY}", headers=headers)
        server.client.get(f"{server.url}/v1/models/{CANARY}", headers=headers)
        server.client.get(f"{server.url}/pages/{CANARY}", headers=headers)
    write_everywhere(server, headers)
    crash_the_engine(server, headers)
    write_everywhere(server, headers)
    metrics = server.get("/metrics").text
    last = server.post("/v1/completions", OPENAI, headers=headers).headers["x-request-id"]
    server.wait_for(lambda: any(last in line for line in server.log))
    collector.trace_of(last)  # spans and lines come in the order in which requests end
    log = "\n".join(server.log)
    traces = [str(span) for span in collector.spans]
    assert "POST /v1/completions 200" in log
    assert len(traces) > 20
    for name, output in {
        "log": log,
        "banner": server.banner,
        "metrics": metrics,
        "traces": "\n".join(traces),
    }.items():
        at = output.lower().find(CANARY.lower())
        assert at < 0, f"{name}: {output[max(0, at - 300) : at + 100]}"


def test_redacted_lines_still_tell_what_happened(server: RunningServer, redacted: bool) -> None:
    if not redacted:
        pytest.skip("of redacted logs")
    headers = {"authorization": f"Bearer {KEY}", "x-request-id": CANARY}
    known = server.client.get(f"{server.url}/v1/models/{CANARY}", headers=headers)
    identity = known.headers["x-request-id"]
    assert CANARY not in identity
    unknown = server.client.get(f"{server.url}/{CANARY}", headers=headers)
    for asked in (known, unknown):
        name = asked.headers["x-request-id"]
        server.wait_for(lambda name=name: any(name in line for line in server.log))
    (line,) = (line for line in server.log if identity in line)
    assert f"GET /v1/models/{{name:path}} 404 request_id={identity} tenant=key-1" in line
    (line,) = (line for line in server.log if unknown.headers["x-request-id"] in line)
    assert "GET - 404" in line
