"""KV moves from one server to another, for those that have the key, and as what it is."""

import asyncio
import http.client
import time
from collections.abc import AsyncIterator, Iterator, MutableMapping
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from running_server import RunningServer, start

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.errors import MidfillError
from midfill.kv.blob import decode_blob
from midfill.serving.options import ServeOptions
from midfill.serving.server.kv_routes import kv_routes
from midfill.serving.server.responses import install_error_handlers

KEY = "a key for moving"
SENT = {"Authorization": f"Bearer {KEY}"}
TOKENS = list(range(5, 205))


@pytest.fixture(scope="module")
def source(tiny_folder: Path) -> Iterator[RunningServer]:
    with start(tiny_folder, "--kv-memory", "4MB", "--kv-transfer-key", KEY) as server:
        yield server


@pytest.fixture(scope="module")
def blob(source: RunningServer) -> bytes:
    source.complete(prompt=TOKENS, max_tokens=4, temperature=0, ignore_eos=True)
    response = export(source, token_ids=TOKENS)
    assert response.status_code == 200, response.text
    return response.content


def export(server: RunningServer, headers: dict[str, str] = SENT, **body: object) -> httpx.Response:
    return server.post("/internal/kv/export", body, headers=headers)


def import_(
    server: RunningServer, content: bytes, tenant: str = "", headers: dict[str, str] = SENT
) -> httpx.Response:
    path = f"/internal/kv/import?tenant={tenant}"
    return server.client.post(server.url + path, content=content, headers=headers)


def test_another_server_goes_on_with_the_same_kv(
    source: RunningServer, blob: bytes, tiny_folder: Path
) -> None:
    asked = {"prompt": TOKENS, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    expected = source.complete(**asked)["choices"][0]["text"]
    with start(tiny_folder, "--kv-memory", "4MB", "--kv-transfer-key", KEY) as target:
        response = import_(target, blob)
        assert (response.status_code, response.json()) == (200, {"tokens": 200})
        answer = target.complete(**asked)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 199
        assert answer["choices"][0]["text"] == expected
        size = len(decode_blob(blob).data)
        target.wait_for(lambda: target.metric("kv_imported_bytes_total") == size)


def test_what_another_server_has_need_not_be_sent(
    source: RunningServer, blob: bytes, tiny_folder: Path
) -> None:
    with start(tiny_folder, "--kv-memory", "4MB", "--kv-transfer-key", KEY) as target:
        import_(target, export(source, token_ids=TOKENS[:70]).content)
        found = target.post("/internal/kv/find", {"token_ids": TOKENS}, headers=SENT).json()
        assert found == {"tokens": 70}
        rest = export(source, token_ids=TOKENS, start=70).content
        assert decode_blob(rest).tokens.tolist() == TOKENS[70:]
        before = np.array(TOKENS[:70], "<i4").tobytes()
        refused = import_(target, rest)
        assert refused.status_code == 400
        assert "begins at token 70" in refused.json()["error"]["message"]
        path = f"{target.url}/internal/kv/import?before="
        short = target.client.post(f"{path}70", content=before[:9], headers=SENT)
        assert short.status_code == 400
        assert "ends within the 70 tokens" in short.json()["error"]["message"]
        many = target.client.post(f"{path}{2**40}", content=before + rest, headers=SENT)
        assert many.status_code == 400
        assert "the KV pool holds" in many.json()["error"]["message"]
        response = target.client.post(f"{path}70", content=before + rest, headers=SENT)
        assert (response.status_code, response.json()) == (200, {"tokens": 200})
        size = len(decode_blob(blob).data)
        target.wait_for(lambda: target.metric("kv_imported_bytes_total") == size)


def test_what_is_cached_is_exported_and_no_more(source: RunningServer, blob: bytes) -> None:
    assert decode_blob(blob).tokens.tolist() == TOKENS
    shorter = export(source, token_ids=[*TOKENS[:70], 3])
    assert decode_blob(shorter.content).tokens.tolist() == TOKENS[:70]
    nothing = export(source, token_ids=[9, 9, 9])
    assert nothing.status_code == 404
    assert nothing.json()["error"]["code"] == "kv_not_cached"


@pytest.mark.parametrize("sent", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY}x"])
def test_without_the_key_nothing_moves(source: RunningServer, blob: bytes, sent: str) -> None:
    headers = {"Authorization": sent}
    for response in (
        export(source, headers, token_ids=TOKENS),
        import_(source, blob, headers=headers),
        source.post("/internal/kv/find", {"token_ids": TOKENS}, headers=headers),
    ):
        assert response.status_code == 401
        assert "--kv-transfer-key" in response.json()["error"]["message"]


def test_a_server_without_a_key_has_no_such_paths(server: RunningServer) -> None:
    assert export(server, token_ids=TOKENS).status_code == 404
    assert import_(server, b"").status_code == 404


def test_other_tenants_kv_is_refused(source: RunningServer, blob: bytes) -> None:
    refused = import_(source, blob, tenant="alice")
    assert refused.status_code == 400
    assert "another tenant" in refused.json()["error"]["message"]
    assert export(source, token_ids=TOKENS, tenant="alice").status_code == 404


@pytest.mark.parametrize("damage", ["emptied", "cut", "flipped"])
def test_damaged_kv_is_refused(source: RunningServer, blob: bytes, damage: str) -> None:
    flipped = bytearray(blob)
    flipped[len(blob) // 2] ^= 1
    content = {"emptied": b"", "cut": blob[:-9], "flipped": bytes(flipped)}[damage]
    refused = import_(source, content)
    assert refused.status_code == 400
    assert refused.json()["error"]["code"] == "kv_refused"


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [2**31]},
        {"token_ids": "1"},
        {"token_ids": [1], "tenants": ""},
        {"token_ids": [1], "start": -1},
    ],
)
def test_an_export_of_nonsense_is_refused(source: RunningServer, body: dict[str, object]) -> None:
    assert export(source, **body).status_code == 400


def test_a_body_larger_than_the_pool_is_not_read(source: RunningServer) -> None:
    connection = http.client.HTTPConnection(httpx.URL(source.url).netloc.decode(), timeout=60)
    connection.putrequest("POST", "/internal/kv/import")
    for name, value in (SENT | {"Content-Length": str(10**12)}).items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()


def without_an_engine(folder: Path) -> FastAPI:
    """The routes of a server whose engine has not started."""
    app = FastAPI()
    app.include_router(kv_routes(EngineClient(folder, ModelOptions()), KEY))
    install_error_handlers(app, {}, {})
    return app


def test_the_event_loop_goes_on_while_much_kv_is_imported(tmp_path: Path) -> None:
    size = 60 << 20
    halves = [bytes(size // 2)] * 2
    started = time.thread_time()
    b"".join(halves)
    copying, stalls = time.thread_time() - started, [0.0]

    async def pieces() -> AsyncIterator[bytes]:
        for _ in range(size >> 20):
            yield halves[0][: 1 << 20]
            await asyncio.sleep(0)

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0)
            stalls.append(time.thread_time() - before)

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=without_an_engine(tmp_path))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.post("/internal/kv/import", headers=SENT)  # routes are made
            watching = asyncio.create_task(watch())
            answer = await client.post("/internal/kv/import", content=pieces(), headers=SENT)
            await asyncio.sleep(0.01)
            watching.cancel()
            return answer

    assert asyncio.run(send()).status_code == 503
    assert max(stalls) < copying / 2


def test_an_export_is_written_piece_by_piece(tmp_path: Path) -> None:
    class Exporting(EngineClient):
        async def export_kv(self, *_: object) -> memoryview:  # type: ignore[override]
            return memoryview(bytes(5 << 19))

    app = FastAPI()
    app.include_router(kv_routes(Exporting(tmp_path, ModelOptions()), KEY))
    sent: list[MutableMapping[str, Any]] = []
    headers = [(name.lower().encode(), value.encode()) for name, value in SENT.items()]
    scope = {
        "type": "http", "method": "POST", "path": "/internal/kv/export", "query_string": b"",
        "headers": [*headers, (b"content-type", b"application/json")], "client": ("x", 1),
    }  # fmt: skip
    bodies = iter([{"type": "http.request", "body": b'{"token_ids":[1]}'}])

    async def receive() -> MutableMapping[str, Any]:
        body = next(bodies, None)
        if body is None:
            await asyncio.sleep(60)
        return cast(MutableMapping[str, Any], body)

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    assert dict(sent[0]["headers"])[b"content-length"] == str(5 << 19).encode()
    assert [len(each["body"]) for each in sent[1:]] == [1 << 20, 1 << 20, 1 << 19, 0]


def test_an_empty_key_is_refused() -> None:
    with pytest.raises(MidfillError, match="--kv-transfer-key is empty"):
        ServeOptions(model="m", kv_transfer_key=" ")
