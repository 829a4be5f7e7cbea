"""Mistral's FIM endpoint through its official Python client."""

from typing import Any

import pytest
from mistralai.client import Mistral
from mistralai.client.errors import SDKError
from running_server import RunningServer

NAME = "tiny-llama"
BODY: dict[str, Any] = {
    "model": NAME, "prompt": "x = 1\nz = toke", "suffix": ")\nprint(x)\n",
    "temperature": 0, "max_tokens": 12,
}  # fmt: skip


@pytest.fixture
def client(server: RunningServer) -> Mistral:
    return Mistral(api_key="none", server_url=server.url)


def test_a_hole_is_filled(client: Mistral, server: RunningServer) -> None:
    answer = client.fim.complete(**BODY)
    same = server.complete(**BODY)
    (choice,) = answer.choices
    assert choice.message is not None
    assert choice.message.content == same["choices"][0]["text"] != ""
    assert choice.finish_reason == same["choices"][0]["finish_reason"]
    assert answer.model == NAME
    assert answer.usage.prompt_tokens == same["usage"]["prompt_tokens"]
    assert answer.usage.completion_tokens == same["usage"]["completion_tokens"]


def test_streamed_and_whole_answers_are_the_same(client: Mistral) -> None:
    whole = client.fim.complete(**BODY)
    chunks = [event.data for event in client.fim.stream(**BODY)]
    text = "".join(str(chunk.choices[0].delta.content) for chunk in chunks)
    assert whole.choices[0].message is not None
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_without_a_suffix_the_prompt_is_continued(client: Mistral) -> None:
    answer = client.fim.complete(**{**BODY, "suffix": None}, random_seed=1, stop=["\n"])
    assert answer.choices[0].message is not None
    assert "\n" not in str(answer.choices[0].message.content)


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [
        ({"model": "codestral"}, 404, "model", "there is no model 'codestral'"),
        ({"max_tokens": 0}, 400, "max_tokens", "max_tokens must be at least 1, not 0"),
        ({"random_seed": 2**70}, 400, "random_seed", "random_seed must be a 64-bit"),
        ({"prompt": None}, 400, "prompt", "prompt: expected str, got null"),
    ],
)
def test_errors_have_mistrals_shape(
    server: RunningServer, fields: dict[str, Any], status: int, param: str, message: str
) -> None:
    response = server.post("/v1/fim/completions", {**BODY, **fields})
    assert response.status_code == status
    error = response.json()
    assert error["object"] == "error"
    assert error["param"] == param
    assert error["message"].startswith(message)


def test_the_client_reports_errors(client: Mistral) -> None:
    with pytest.raises(SDKError, match="there is no model 'codestral'") as raised:
        client.fim.complete(**{**BODY, "model": "codestral"})
    assert raised.value.status_code == 404
