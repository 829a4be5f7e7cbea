"""/v1/chat/completions and /v1/models through a real socket, with OpenAI's own client."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest
from running_server import RunningServer, start

from midfill.engine.request import RequestHints
from midfill.serving.server.dialects.openai import GenerationFields

MESSAGES: Any = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi"}]},
]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"ignore_eos": True}}


def test_a_chat(server: RunningServer) -> None:
    answer = server.openai().chat.completions.create(
        model="tiny-llama", messages=MESSAGES, max_completion_tokens=10, **GREEDY
    )
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 10


def test_a_streamed_chat_has_the_same_text(server: RunningServer) -> None:
    client = server.openai()
    options = {"model": "tiny-llama", "messages": MESSAGES, "max_tokens": 10, "n": 2, **GREEDY}
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    roles = [None, None]
    finish: list[str | None] = [None, None]
    usage = None
    for chunk in client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    ):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            roles[choice.index] = choice.delta.role or roles[choice.index]
            texts[choice.index] += choice.delta.content or ""
            finish[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert roles == ["assistant", "assistant"]
    assert finish == ["length", "length"]
    assert usage is not None
    assert usage.completion_tokens == 20


def test_the_version_may_be_left_out(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "max_tokens": 4, "temperature": 0}
    with_version, without = (
        server.post(path, body).json()["choices"]
        for path in ("/v1/chat/completions", "/chat/completions")
    )
    assert without == with_version


def test_the_conversation_so_far_is_cached(server: RunningServer) -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "hi"}]
    body = {"messages": messages, "max_tokens": 1}
    first = server.post("/v1/chat/completions", body).json()["usage"]
    body["messages"] = [*messages, {"role": "user", "content": "again"}]
    second = server.post("/v1/chat/completions", body).json()["usage"]
    # All but what stood after the last message: the assistant's turn that was to be filled.
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached >= first["prompt_tokens"] - 20 > 0


def test_chat_logprobs(server: RunningServer) -> None:
    answer = server.openai().chat.completions.create(
        model="tiny-llama",
        messages=MESSAGES,
        max_tokens=5,
        logprobs=True,
        top_logprobs=3,
        **GREEDY,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 5
    for token in logprobs.content:
        assert len(token.top_logprobs) == 3
        assert token.logprob == token.top_logprobs[0].logprob
        assert bytes(token.bytes or ()).decode(errors="replace") == token.token


def test_without_a_limit_a_chat_ends_with_the_context(server: RunningServer) -> None:
    answer = server.openai().chat.completions.create(
        model="tiny-llama", messages=MESSAGES, **GREEDY
    )
    assert answer.usage is not None
    assert answer.usage.total_tokens == 512
    assert answer.choices[0].finish_reason == "length"


def test_a_chat_names_a_method_and_its_history_is_computed_once(server: RunningServer) -> None:
    said = [("user", "The lighthouse stands on the cliff."), ("assistant", "It is white and red.")]
    said += [("user", "Our soup has leeks and potatoes."), ("assistant", "Add some salt to it.")]
    history = [{"role": role, "content": text} for role, text in said]
    cached = []
    for question in ("Where is the lighthouse?", "What colour is the lighthouse?"):
        body = {
            "messages": [*history, {"role": "user", "content": question}],
            "max_tokens": 4,
            "midfill": {"method": "epicache:budget=24,block=32,episodes=1,turns=1"},
        }
        usage = server.post("/v1/chat/completions", body).json()["usage"]
        cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert cached[0] < 10  # what other tests' chats begin with, too
    assert cached[1] > 60
    body["midfill"] = {"method": "cake:budget=64"}
    refused = server.post("/v1/chat/completions", body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "midfill.method"
    assert "requests may not use 'cake' here" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("source", "message"), [("{{ 1 // 0 }}", "zero"), ("{% for %}", "template is broken")]
)
def test_a_template_that_fails_affects_chats_only(
    tiny_folder: Path, tmp_path: Path, source: str, message: str
) -> None:
    folder = Path(shutil.copytree(tiny_folder, tmp_path / "tiny"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": source}))
    with start(folder, "--kv-memory", "4MB") as server:
        response = server.post("/v1/chat/completions", {"messages": MESSAGES})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["param"] == "messages"
        assert message in error["message"]
        server.complete(prompt="a", max_tokens=1)


def test_models(server: RunningServer) -> None:
    client = server.openai()
    (model,) = client.models.list().data
    assert model.id == "tiny-llama"
    assert client.models.retrieve("tiny-llama") == model
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-9")


def test_the_api_describes_itself(server: RunningServer) -> None:
    schema = server.get("/openapi.json").json()
    assert "suffix" in schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "/v1/chat/completions" in schema["paths"]


def test_what_clients_say_for_the_scheduler() -> None:
    given = {"priority": -2, "job_id": "task", "is_last_step": True, "expected_tokens": 10**9}
    hints = RequestHints(priority=-2, program="task", last_step=True, expected_tokens=10**9)
    assert msgspec.convert(given, GenerationFields).hints() == hints
    nothing = dict.fromkeys(given)
    assert msgspec.convert(nothing, GenerationFields).hints() == RequestHints()


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_hints_that_make_no_sense_are_refused(server: RunningServer, path: str) -> None:
    body = {"messages": MESSAGES, "prompt": "a", "max_tokens": 2}
    for hints, said in (
        ({"is_last_step": True}, "is_last_step needs job_id, the program's name"),
        ({"expected_tokens": -3}, "expected_tokens must be at least 0, not -3"),
        ({"priority": 2**40}, f"priority must be a 32-bit whole number, not {2**40}"),
    ):
        refused = server.post(path, {**body, **hints})
        assert refused.status_code == 400
        error = refused.json()["error"]
        assert (error["param"], error["message"]) == (said.split()[0], said)
    for expected in (0, 10**9, 10**30):
        hints = {"priority": 3, "job_id": "x", "expected_tokens": expected}
        assert server.post(path, {**body, **hints}).status_code == 200
    served = server.post(path, {**body, "priority": 3, "job_id": "x", "expected_tokens": 0})
    assert served.status_code == 200
