"""Requests that may not be queued are refused before anything else is done for them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.routing import APIRoute

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.errors import QueueFullError
from midfill.frontend.prompts import PromptEncoder, fim_format
from midfill.models.checkpoints.opening import open_model
from midfill.serving.server.app import DIALECTS, create_app
from midfill.serving.server.key_guesses import MAX_GUESSES
from midfill.serving.server.key_ring import KeyRing
from midfill.serving.server.service import ModelService

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
