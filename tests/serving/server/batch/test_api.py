"""InProcessApi: the routes' own answers and errors, and what of a row is planned."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.types import Receive, Scope, Send

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.frontend.prompt_encoder import PromptEncoder
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.serving.server.batch.api import InProcessApi, RowService, call_app
from midfill.serving.server.batch.job import Answered, PlannedPrompt

URL = "/v1/completions"


@pytest.fixture(scope="module")
def api(tiny_folder: Path) -> InProcessApi:
    """An API whose engine never starts: what is planned needs none."""
    checkpoint = open_checkpoint(tiny_folder)
    prompts = PromptEncoder(checkpoint, None, context=512, remembers=False)
    engine = EngineClient(tiny_folder, ModelOptions())
    service = RowService("tiny", engine, checkpoint.tokenizer, prompts, 1 << 20, idle_prefill=False)
    return InProcessApi(service)


def plan(api: InProcessApi, url: str = URL, **body: Any) -> PlannedPrompt | Answered:
    return asyncio.run(api.plan(url, json.dumps(body).encode()))


def test_a_row_is_planned_as_it_will_be_answered(api: InProcessApi) -> None:
    found = plan(api, prompt="alpha beta", max_tokens=7)
    assert isinstance(found, PlannedPrompt)
    assert found.tokens.dtype == np.int32
    assert (found.prompt_tokens, found.output_tokens) == (len(found.tokens), 7)


def test_all_prompts_and_answers_of_a_row_count(api: InProcessApi) -> None:
    found = plan(api, prompt=["alpha", "beta beta"], n=2, max_tokens=5)
    assert isinstance(found, PlannedPrompt)
    assert found.prompt_tokens > len(found.tokens)
    assert found.output_tokens == 2 * 2 * 5


def test_an_answer_counts_no_more_than_the_context_holds(api: InProcessApi) -> None:
    found = plan(api, prompt="alpha", max_tokens=100_000)
    assert isinstance(found, PlannedPrompt)
    assert found.output_tokens == 512 - len(found.tokens)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"prompt": "a", "stream": True}, 400, "can't be streamed"),
        ({"prompt": "a", "model": "other"}, 404, "there is no model"),
        ({"prompt": "a", "temperature": "hot"}, 400, "temperature"),
        ({}, 400, "prompt is missing"),
        ({"prompt": "a " * 5000}, 400, "context"),
    ],
)
def test_what_a_route_refuses_has_the_routes_error(
    api: InProcessApi, body: dict[str, Any], status: int, said: str
) -> None:
    found = plan(api, **body)
    assert isinstance(found, Answered)
    assert found.status == status
    assert said in json.loads(found.body)["error"]["message"]


def test_a_plan_depends_on_its_row_alone(api: InProcessApi) -> None:
    lines = "".join(f"line {number}\n" for number in range(10))
    rows = [{"prompt": lines[:cut], "suffix": lines[cut:]} for cut in (20, 21, 35, 22)]
    alone = [plan(api, **row) for row in rows]
    again = [plan(api, **row) for row in reversed(rows)][::-1]
    for one, other in zip(alone, again, strict=True):
        assert isinstance(one, PlannedPrompt)
        assert isinstance(other, PlannedPrompt)
        assert one.tokens.tolist() == other.tokens.tolist()


def test_an_engine_that_is_not_ready_is_an_answer_to_try_again(api: InProcessApi) -> None:
    answered = asyncio.run(api.answer(URL, b'{"prompt":"a"}'))
    assert answered.status == 503
    assert answered.retry_after is not None


def test_a_bug_that_was_answered_is_an_answer() -> None:
    async def answering(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["body"] == b"{}"
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})
        raise KeyError

    assert asyncio.run(call_app(answering, URL, b"{}", "")) == Answered(500, b"no")


def test_a_bug_that_was_not_answered_is_raised() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(call_app(failing, URL, b"{}", ""))
