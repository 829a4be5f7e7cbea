"""A server whose engine is not there, or that is about to end: each API says so in its own shape.

The engine is a real one that was never started.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.models.checkpoints.opening import open_model
from midfill.serving.server.app import create_app
from midfill.serving.server.service import ModelService

MESSAGES = [{"role": "user", "content": "a"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/beta/completions": {"prompt": "a", "model": "tiny"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/completion": {"prompt": "a"},
    "/completions": {"prompt": "a"},
    "/api/generate": {"prompt": "a", "model": "tiny"},
    "/api/chat": {"messages": MESSAGES, "model": "tiny"},
    "/v1/fim/completions": {"prompt": "a", "suffix": "b", "model": "tiny"},
}


@pytest.fixture(scope="module")
def service(tiny_folder: Path) -> Iterator[ModelService]:
    checkpoint = open_model(tiny_folder)
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint, None), 256)
    engine = EngineClient(tiny_folder, ModelOptions())
    service = ModelService("tiny", engine, checkpoint.tokenizer, prompts, 1 << 20)
    yield service
    service.close()


def ask(service: ModelService, method: str, path: str, body: object = None) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=create_app(service))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.request(method, path, json=body)

    return asyncio.run(send())


def message_of(path: str, error: Any) -> str:
    """Return an error's message, after checks of its shape."""
    if path.startswith("/api/"):  # Ollama's
        assert set(error) == {"error"}
        assert isinstance(error["error"], str)
        return error["error"]
    if path.startswith("/v1/fim"):  # Mistral's
        assert error["object"] == "error"
        assert error["type"] == "server_error"
        return str(error["message"])
    fields = error["error"]
    if path in ("/infill", "/completion", "/completions"):  # llama.cpp's
        assert fields["code"] == 503
        assert fields["type"] == "unavailable_error"
    else:  # OpenAI's
        assert fields["type"] == "server_error"
        assert fields["code"] in ("engine_restarting", "server_stopping")
    return str(fields["message"])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", REQUESTS)
def test_a_request_without_an_engine_may_be_tried_again(
    service: ModelService, path: str, stream: bool
) -> None:
    response = ask(service, "POST", path, {**REQUESTS[path], "stream": stream})
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    assert response.headers["content-type"] == "application/json"
    assert "try again in a moment" in message_of(path, response.json())


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        ("starting", False),
        ("ready", True),
        ("unresponsive", False),
        ("restarting", False),
        ("dead", False),
    ],
)
def test_readiness_is_the_engines_and_liveness_the_servers(
    service: ModelService, state: Any, ready: bool
) -> None:
    assert isinstance(service.engine, EngineClient)
    service.engine.state = state
    try:
        for path in ("/health", "/readyz"):
            response = ask(service, "GET", path)
            assert response.status_code == (200 if ready else 503)
            assert response.json() == {"status": "ok" if ready else state}
            assert ("retry-after" in response.headers) is not ready
        assert ask(service, "GET", "/livez").status_code == 200
    finally:
        service.engine.state = "starting"


def test_what_is_remembered_is_shown_with_its_bound(service: ModelService) -> None:
    ask(service, "POST", "/v1/completions", {"prompt": "a", "suffix": "b"})
    lines = ask(service, "GET", "/metrics").text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("midfill:"))
    for kind in ("documents", "contexts", "tokens"):
        held = float(values[f'midfill:remembered_bytes{{kind="{kind}"}}'])
        assert held <= float(values[f'midfill:remembered_bytes_max{{kind="{kind}"}}'])
    assert float(values['midfill:remembered_bytes{kind="documents"}']) > 0
    names = {line.partition("{")[0] for line in values}
    assert {"midfill:prefix_cache_nodes", "midfill:undelivered_outputs"} <= names
