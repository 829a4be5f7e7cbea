"""ModelSwitch: what is handed on is the request as it came, and errors have the client's shape."""

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator
from typing import cast

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from midfill.errors import MidfillError
from midfill.serving.server.app import DIALECTS
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.models.host import HostedModel, ModelHost, RunningModel
from midfill.serving.server.models.switch import ModelSwitch
from midfill.serving.server.request import RequestRecord, current_request
from midfill.serving.server.service import ModelService


class Echo:
    """An application that answers with its name and the body that it got."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body, more = b"", True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": self.name.encode() + b" " + body})

    def stop(self) -> None:
        """Do nothing: a service has this."""


@contextlib.asynccontextmanager
async def echo(name: str) -> AsyncIterator[RunningModel]:
    if name == "broken":
        raise MidfillError("broken can't be loaded")
    app = Echo(name)
    yield RunningModel(app, cast("ModelService", app), 1)


def ask(method: str, path: str, **request: object) -> httpx.Response:
    """Ask a server of the models a, b and broken, whose keys are "known"."""

    async def asking() -> httpx.Response:
        models = [HostedModel(name, 1) for name in ("a", "b", "broken")]
        host = ModelHost(models, echo, memory=10)
        await host.start()
        switch = ModelSwitch(host, KeyRing(["known"]), DIALECTS, max_body_bytes=100)
        transport = httpx.ASGITransport(switch)
        headers = {"authorization": "Bearer known"}
        async with httpx.AsyncClient(
            transport=transport, base_url="http://x", headers=headers
        ) as client:
            return await client.request(method, path, **request)  # type: ignore[arg-type]

    return asyncio.run(asking())


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"model": "b"}', "b"),
        (b'{"model": "b:latest"}', "b"),
        (b'{"name": "b"}', "b"),
        (b'{"prompt": "model"}', "a"),
        (b'{"model": "unknown"}', "a"),
        (b'{"model": 3}', "a"),
        (b'["model", "b"]', "a"),
        (b"no JSON", "a"),
        (b"", "a"),
        (b'{"model": "b", "prompt": "' + b"x" * 100 + b'"}', "a"),
    ],
)
def test_a_request_goes_whole_to_the_model_that_it_names(body: bytes, model: str) -> None:
    assert ask("POST", "/v1/completions", content=body).content == model.encode() + b" " + body


def test_a_body_in_parts_arrives_whole() -> None:
    parts = [b'{"model":', b' "b"}', b"", b" " * 50]

    async def content() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    assert ask("POST", "/v1/completions", content=content()).content == b"b " + b"".join(parts)


def test_what_is_no_question_to_a_model_is_any_ones() -> None:
    assert ask("GET", "/v1/models").content == b"a "


@pytest.mark.parametrize(
    ("path", "shape"),
    [("/v1/completions", "message"), ("/api/generate", None), ("/infill", "message")],
)
def test_a_model_that_cannot_be_loaded_is_an_error_in_the_clients_shape(
    path: str, shape: str | None
) -> None:
    response = ask("POST", path, json={"model": "broken"})
    error = response.json()["error"]
    assert response.status_code == 500
    assert (error if shape is None else error[shape]) == "broken can't be loaded"


def test_without_a_key_no_body_is_looked_at() -> None:
    headers = {"authorization": "Bearer wrong"}
    assert ask("POST", "/x", json={"model": "b"}, headers=headers).content.startswith(b"a ")


def test_the_key_of_an_earlier_request_is_not_this_ones() -> None:
    """A connection's next request may begin in the context of the one before."""
    earlier = RequestRecord(
        request_id="earlier", method="POST", path="/x", arrived=0.0, tenant="key-1"
    )
    headers = {"authorization": "Bearer wrong"}

    def asking() -> httpx.Response:
        current_request.set(earlier)
        return ask("POST", "/x", json={"model": "b"}, headers=headers)

    assert contextvars.copy_context().run(asking).content.startswith(b"a ")
