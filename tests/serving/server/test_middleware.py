"""What stands around the application.

Each request has an id, and a line in the log when it is finished. One that may not be queued is
refused before anything else is done for it, and one whose client disconnects ends wherever it is.
"""

import asyncio
import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute
from running_server import RunningServer, start
from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.errors import QueueFullError
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import FrontendOptions
from midfill.serving.server.app import DIALECTS, create_app
from midfill.serving.server.auth import MAX_GUESSES, KeyRing
from midfill.serving.server.listening import Listener, bind
from midfill.serving.server.middleware import OwnHosts
from midfill.serving.server.service import ModelService

SECRET = "nobody should read this"


def headers(request_id: str) -> dict[str, str]:
    return {"x-request-id": request_id}


@pytest.mark.parametrize("request_id", ["a", '4f-1/"x"', "x" * 128])
def test_a_clients_id_is_kept(server: RunningServer, request_id: str) -> None:
    response = server.client.get(f"{server.url}/v1/models", headers=headers(request_id))
    assert response.headers.get_list("x-request-id") == [request_id]


@pytest.mark.parametrize("request_id", ["", "x" * 129, "two words", "caf\u00e9", "a\tb"])
def test_an_id_that_is_no_good_is_replaced(server: RunningServer, request_id: str) -> None:
    given = {"x-request-id": request_id.encode()}
    response = server.client.get(f"{server.url}/v1/models", headers=given)  # type: ignore[arg-type]
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_requests_without_an_id_get_different_ones(server: RunningServer) -> None:
    ids = {server.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, 200),
        ("/api/generate", {"model": "tiny-llama", "prompt": "a", "suffix": ""}, 200),
        ("/v1/completions", {"prompt": 5.5}, 400),
        ("/infill", {}, 400),
        ("/nothing", {}, 404),
    ],
)
def test_streams_and_errors_have_the_id_too(
    server: RunningServer, path: str, body: dict[str, object], status: int
) -> None:
    response = server.post(path, body, headers=headers("mine"))
    assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_a_line(server: RunningServer, stream: bool) -> None:
    for number in range(2):
        body = {
            "prompt": f"{SECRET} {stream}", "suffix": SECRET, "max_tokens": 4, "temperature": 0,
            "stream": stream, "stop": [SECRET], "midfill": {"document": SECRET},
        }  # fmt: skip
        name = f"line-{stream}-{number}"
        response = server.post("/v1/completions", body, headers=headers(name))
        assert response.status_code == 200
        line = server.logged(name)
    assert {name: line[name] for name in ("level", "message", "method", "path", "status")} == {
        "level": "INFO",
        "message": "POST /v1/completions 200",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
    }
    assert line["model"] == "tiny-llama"
    assert line["completion_tokens"] == 4
    assert line["finish_reason"] == "length"
    assert 0 < line["cached_tokens"] < line["prompt_tokens"]
    assert 0 < line["queue_seconds"] < line["ttft_seconds"] < line["duration_seconds"]
    assert "tenant" not in line
    assert not any(SECRET in line for line in server.log)


def test_answers_that_end_differently_have_all_reasons(server: RunningServer) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "temperature": 0}
    server.post("/v1/completions", body, headers=headers("many"))
    line = server.logged("many")
    assert line["finish_reason"] == "length"
    assert line["completion_tokens"] == 12


def test_an_error_is_told_by_its_code(server: RunningServer) -> None:
    body = {"prompt": SECRET * 100, "max_tokens": 1}
    assert server.post("/v1/completions", body, headers=headers("long")).status_code == 400
    line = server.logged("long")
    assert (line["status"], line["error"]) == (400, "context_length_exceeded")
    server.post("/v1/completions", {"model": SECRET, "prompt": ""}, headers=headers("model"))
    assert server.logged("model")["error"] == "model_not_found"
    assert not any(SECRET in line for line in server.log)


def test_a_path_cant_forge_a_line(server: RunningServer) -> None:
    server.client.get(f"{server.url}/a%0A{'b' * 300}", headers=headers("forged"))
    line = server.logged("forged")
    assert line["path"].startswith(r"/a\nbbb")
    assert len(line["path"]) < 250


def test_what_monitoring_asks_is_not_logged(server: RunningServer) -> None:
    pages = ("/", "/planner", "/dashboard", "/pages/icon.svg")
    for path in ("/health", "/metrics", "/metrics/history", *pages):
        server.client.get(server.url + path, headers=headers("routine"))
    server.client.get(f"{server.url}/pages/none", headers=headers("missing"))
    assert server.logged("missing")["status"] == 404
    assert not any("routine" in line for line in server.log)


CONTEXT = 16_384
LONG_TEXT = "the quick fox " * 1000  # thousands of steps of a few tokens each
STEP_SECONDS = 0.02


@pytest.fixture(scope="module")
def long_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server whose prefills take minutes, since its steps are small and slow."""
    folder = tmp_path_factory.mktemp("long") / "tiny-llama"
    write_tiny("llama", folder, max_position_embeddings=CONTEXT)
    options = ["--kv-memory", "64MB", "--token-budget", "4", "--no-idle-prefill"]
    options += ["--log-format", "json"]
    with start(folder, *options, step_seconds=STEP_SECONDS) as server:
        yield server


@contextmanager
def sent(
    long_server: RunningServer, *, request_id: str = "some", **body: object
) -> Iterator[socket.socket]:
    """Send a completion request over a connection that is closed at the end of the block."""
    host, port = long_server.url.removeprefix("http://").split(":")
    data = json.dumps({"max_tokens": 5, "temperature": 0, **body}).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\n"
            b"X-Request-Id: %b\r\nContent-Length: %d\r\n\r\n%b"
            % (request_id.encode(), len(data), data)
        )
        yield connection


def is_idle(long_server: RunningServer) -> bool:
    return long_server.metric("queued_tokens") == 0 and long_server.is_idle()


def check_works(long_server: RunningServer) -> None:
    """Every slot gets free, or cached and evictable, and the next request is answered."""

    def no_slot_is_held() -> bool:
        held = long_server.metric("kv_slots") - long_server.metric("kv_slots_free")
        return held == long_server.metric("kv_slots_cached")

    long_server.wait_for(no_slot_is_held)
    assert long_server.complete(prompt="a", max_tokens=1)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("infilling", [False, True])
def test_while_the_prompt_is_computed(
    long_server: RunningServer, stream: bool, infilling: bool
) -> None:
    before = long_server.metric("computed_tokens_total")
    prompt = f"{stream} {infilling} {LONG_TEXT}"
    fields = {"suffix": "\n", "midfill": {"window": "as-sent"}} if infilling else {}
    with sent(long_server, prompt=prompt, stream=stream, **fields):
        long_server.wait_for(lambda: long_server.metric("computed_tokens_total") > before + 50)
    long_server.wait_for(lambda: is_idle(long_server))
    assert long_server.metric("computed_tokens_total") - before < 3000
    check_works(long_server)


def test_while_it_waits_for_the_engine(long_server: RunningServer) -> None:
    with sent(long_server, prompt=f"first {LONG_TEXT}"):
        long_server.wait_for(lambda: long_server.metric("num_requests_running") == 1)
        admitted = long_server.metric("prompt_tokens_total")
        # Short prompts would be computed beside the first.
        second, third = f"second {LONG_TEXT}", f"third {LONG_TEXT}"
        with sent(long_server, prompt=second, stream=True), sent(long_server, prompt=third):
            long_server.wait_for(lambda: long_server.metric("num_requests_waiting") == 2)
        long_server.wait_for(lambda: long_server.metric("num_requests_waiting") == 0)
        assert long_server.metric("num_requests_running") == 1
        assert long_server.metric("prompt_tokens_total") == admitted
    long_server.wait_for(lambda: is_idle(long_server))
    check_works(long_server)


@pytest.mark.parametrize("stream", [False, True])
def test_it_is_logged_as_nginx_does(long_server: RunningServer, stream: bool) -> None:
    long_server.wait_for(lambda: is_idle(long_server))
    name = f"gone-{stream}"
    with sent(
        long_server,
        request_id=name,
        prompt="a",
        n=3,
        max_tokens=4000,
        ignore_eos=True,
        stream=stream,
    ):
        long_server.wait_for(lambda: long_server.metric("num_requests_running") == 3)
    line = long_server.logged(name)
    assert (line["status"], line["finish_reason"]) == (499, "abort")
    assert line["completion_tokens"] < 3 * 4000


def test_while_its_prompt_is_encoded(long_server: RunningServer) -> None:
    """One request keeps the encoding thread busy; nothing of it gets any further.

    Small requests may overtake it while its body arrives; they have a few tokens each. The engine
    gets no message before all have gone, so that none is too late to be cancelled.
    """
    engine = long_server.engine_process()
    admitted = long_server.metric("prompt_tokens_total")
    os.kill(engine, signal.SIGSTOP)
    try:
        with sent(long_server, prompt=[f"{number} {LONG_TEXT}" for number in range(100)]):
            for number in range(5):
                with sent(long_server, prompt=f"behind {number}", stream=bool(number % 2)):
                    pass
        long_server.wait_for(lambda: long_server.metric("queued_tokens") == 0)
    finally:
        os.kill(engine, signal.SIGCONT)
    check_works(long_server)  # its prompt is encoded after all of them
    assert long_server.metric("prompt_tokens_total") - admitted < 100


def test_while_a_body_is_sent(long_server: RunningServer) -> None:
    host, port = long_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost:\r\nContent-Type: application/json\r\n"
            b'Content-Length: 100\r\n\r\n{"prompt":'
        )
    check_works(long_server)


def test_a_connection_is_used_again_after_an_answer(long_server: RunningServer) -> None:
    """What watches for a disconnect takes nothing of the next request."""
    for _ in range(3):
        assert long_server.complete(prompt="a", max_tokens=1)["choices"]
        with long_server.client.stream(
            "POST", f"{long_server.url}/v1/completions", json={"prompt": "a", "stream": True}
        ) as response:
            assert list(response.iter_lines())[-2] == "data: [DONE]"


QUEUED = [path for dialect in DIALECTS for path in dialect.queued]
NOT_QUEUED = {"/tokenize", "/detokenize", "/v1/health", "/v1/events", "/api/show"}


class FullForOne(EngineClient):
    """An engine, never started, whose queue takes nothing of the tenant "full"."""

    def check_admission(self, tenant: str, deadline: float | None, document: str = "") -> None:
        if tenant in ("", "full"):
            raise QueueFullError("too much is queued", retry_after=7)


@pytest.fixture
def service(tiny_folder: Path) -> Iterator[ModelService]:
    checkpoint = open_model(tiny_folder)
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint, None), 256)
    engine = FullForOne(tiny_folder, ModelOptions())
    service = ModelService("tiny", engine, checkpoint.tokenizer, prompts, 1 << 20)
    yield service
    service.close()


def ask(service: ModelService, path: str, keys: KeyRing, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(service, keys))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(path, **options)

    return asyncio.run(send())


@pytest.mark.parametrize("path", QUEUED)
def test_a_body_is_not_even_looked_at(service: ModelService, path: str) -> None:
    response = ask(service, path, KeyRing(), content=b"no JSON")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert "too much is queued" in response.text
    if path.startswith("/api/"):  # Ollama's shape
        assert set(response.json()) == {"error"}


def test_every_path_that_is_queued_is_named(service: ModelService) -> None:
    async def nobody() -> str:
        return ""

    posts = {
        route.path
        for dialect in DIALECTS
        for route in dialect.routes(service, lambda _: nobody()).routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    }
    assert posts == {*QUEUED, *NOT_QUEUED}


def test_other_paths_are_answered(service: ModelService) -> None:
    response = ask(service, "/tokenize", KeyRing(), json={"content": "a"})
    assert response.status_code == 200


def test_it_is_the_queue_of_the_requests_own_tenant_that_counts(service: ModelService) -> None:
    keys = KeyRing(["one", "two"])  # their tenants' names are key-1 and key-2
    response = ask(
        service, "/v1/completions", keys, content=b"", headers={"authorization": "Bearer one"}
    )
    assert response.status_code == 415


def test_a_wrong_key_counts_as_one_guess(service: ModelService) -> None:
    keys = KeyRing(["known"])

    async def send() -> list[int]:
        transport = httpx.ASGITransport(create_app(service, keys), client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            answers = [
                await client.post("/v1/completions", headers={"authorization": f"Bearer {number}"})
                for number in range(MAX_GUESSES + 1)
            ]
        return [answer.status_code for answer in answers]

    assert asyncio.run(send()) == [401] * MAX_GUESSES + [429]


@pytest.mark.parametrize("value", ["soon", "-1"])
def test_a_time_that_makes_no_sense_is_said_first(service: ModelService, value: str) -> None:
    response = ask(service, "/infill", KeyRing(), headers={"X-Request-Timeout": value}, json={})
    assert response.status_code == 400
    assert "X-Request-Timeout" in response.text


async def nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    "host",
    [
        "", "localhost", "LOCALHOST:8080", "localhost.:80", "midfill.localhost", "127.0.0.1",
        "127.0.0.1:8080", "[::1]", "[::1]:8080", "192.168.1.5:80", socket.gethostname(),
        "proxy.example.org", "Proxy.Example.org:443",
    ],
)  # fmt: skip
def test_names_of_the_machine_and_allowed_ones_are_answered(host: str) -> None:
    assert OwnHosts(nothing, ["proxy.example.org"]).is_own(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example",
        "notlocalhost", "127.1.evil", "[evil]", "evil.example:", "::1.evil", "a b", "\xff",
    ],
)  # fmt: skip
def test_others_are_not(host: str) -> None:
    assert not OwnHosts(nothing, ["proxy.example.org"]).is_own(host)


@pytest.mark.parametrize(
    ("address", "keys", "checked"),
    [
        ("127.0.0.1", (), True),
        ("localhost", (), True),
        ("127.0.0.1", ("key",), False),
        ("0.0.0.0", (), False),
    ],
)
def test_only_servers_without_keys_on_loopback_care(
    address: str, keys: tuple[str, ...], checked: bool
) -> None:
    options = FrontendOptions(host=address, allowed_hosts=("proxy",))
    with bind(address, 0) as socket:
        found = Listener(options, socket, KeyRing(keys)).own_hosts
    assert found == ((address, "proxy") if checked else None)


def test_a_page_whose_name_points_here_gets_nothing(server: RunningServer) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/")):
        headers = {"host": "evil.example:8080"}
        answer = server.client.request(
            method, server.url + path, json={"prompt": "a"}, headers=headers
        )
        assert answer.status_code == 421
        assert answer.json()["error"]["code"] == "misdirected_request"
    port = server.url.rpartition(":")[2]
    headers = {"host": f"localhost:{port}"}
    assert server.client.get(f"{server.url}/health", headers=headers).status_code == 200
