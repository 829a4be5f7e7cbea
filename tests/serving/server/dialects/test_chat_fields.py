"""Chats with models that think or call, through real sockets, with OpenAI's and Ollama's clients.

Each of a served model's tokens is followed by the next one.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import ollama
import openai
import pytest
from running_server import RunningServer, start
from scripted_model import write_scripted

ANSWER = ("assistant", "<think>", "Hm", "</think>", "Yes", "<|endoftext|>")
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ note }}"
    "{% if reasoning_effort %}{{ reasoning_effort }}{% endif %}assistant"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% elif messages[-1].content == 'opened' %}<think>{% endif %}"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = write_scripted(tmp_path_factory.mktemp("thinks"), TEMPLATE, pairwise(ANSWER))
    with start(folder, "--kv-memory", "4MB", "--alias", "thinks") as server:
        yield server


def chat(content: str = "hi", **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "thinks", "messages": messages, "temperature": 0, "max_tokens": 32, **fields}


def said(server: RunningServer, **fields: Any) -> tuple[str | None, str | None, str]:
    """Return an answer's reasoning, its content, and why it ended."""
    (choice,) = server.openai().chat.completions.create(**chat(**fields)).choices
    extra = choice.message.model_extra or {}
    assert extra.get("reasoning") == extra.get("reasoning_content")
    return extra.get("reasoning"), choice.message.content, choice.finish_reason


def streamed(server: RunningServer, **fields: Any) -> tuple[str | None, str | None, str]:
    """Return the same of a stream."""
    chunks = list(server.openai().chat.completions.create(**chat(**fields, stream=True)))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    reasoning = "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas)
    content = "".join(delta.content or "" for delta in deltas)
    return reasoning or None, content, chunks[-1].choices[0].finish_reason or ""


@pytest.mark.parametrize("ask", [said, streamed])
def test_reasoning_stands_beside_the_content(server: RunningServer, ask: Any) -> None:
    assert ask(server) == ("Hm", "Yes", "stop")
    assert ask(server, content="opened") == ("Hm", "Yes", "stop")
    assert ask(server, max_tokens=2) == ("Hm", "", "length")


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
        {"reasoning_effort": "none"},
    ],
)
def test_reasoning_can_be_turned_off(server: RunningServer, fields: dict[str, Any]) -> None:
    for ask in (said, streamed):
        assert ask(server, **fields) == (None, "Yes", "stop")


def test_log_probabilities_are_the_contents(server: RunningServer) -> None:
    (choice,) = server.openai().chat.completions.create(**chat(logprobs=True)).choices
    assert choice.logprobs is not None
    assert [token.token for token in choice.logprobs.content or ()] == ["Yes"]


def test_template_arguments_reach_the_template_as_text(server: RunningServer) -> None:
    def prompt_tokens(**fields: object) -> int:
        response = server.post("/v1/chat/completions", chat(**fields))
        assert response.status_code == 200, response.text
        tokens: int = response.json()["usage"]["prompt_tokens"]
        return tokens

    none = prompt_tokens()
    assert prompt_tokens(chat_template_kwargs={"note": "Hm"}) > none + 1  # not the token
    assert prompt_tokens(chat_template_kwargs={"self": 1, "unknown": [{}]}) == none
    assert prompt_tokens(chat_template_kwargs=None) == none
    high = prompt_tokens(reasoning_effort="high")
    assert high > none
    given = {"reasoning_effort": "a much longer effort than high"}
    assert prompt_tokens(reasoning_effort="high", chat_template_kwargs=given) > high


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("chat_template_kwargs", [1], "expected object or null, got array"),
        ("chat_template_kwargs", {"messages": []}, "can't hold 'messages': the server sets it"),
        ("chat_template_kwargs", {"a": 1, "tools": []}, "can't hold 'tools'"),
        ("reasoning_effort", "hgih", "must be one of none, minimal, low, .* not 'hgih'"),
        ("tools", [{"type": "function", "function": {"name": "f"}}], "tools are not supported"),
    ],
)
def test_bad_values_are_refused_by_name(
    server: RunningServer, field: str, value: object, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as refused:
        server.openai().chat.completions.create(**chat(extra_body={field: value}))
    assert field in refused.value.message
    assert "\n" not in refused.value.message


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_think_turns_it_on_and_off(server: RunningServer, stream: bool) -> None:
    client = ollama.Client(host=server.url)

    def asked(**fields: Any) -> tuple[str, str]:
        ask: Any = client.chat
        messages = [{"role": "user", "content": "hi"}]
        answer = ask("thinks", messages, stream=stream, options={"temperature": 0}, **fields)
        parts = list(answer) if stream else [answer]
        thinking = "".join(part.message.thinking or "" for part in parts)
        return thinking, "".join(part.message.content or "" for part in parts)

    assert asked() == asked(think=True) == asked(think="high") == ("Hm", "Yes")
    assert asked(think=False) == ("", "Yes")
    whole = client.generate("thinks", "hi", think=True, options={"temperature": 0})
    assert (whole.thinking, whole.response) == ("Hm", "Yes")


def test_ollamas_clients_are_told_that_it_thinks(server: RunningServer) -> None:
    shown = ollama.Client(host=server.url).show("thinks")
    assert shown.capabilities == ["completion", "insert", "thinking"]


def test_an_unknown_effort_is_refused_by_ollamas_name(server: RunningServer) -> None:
    body = {"model": "thinks", "messages": [{"role": "user", "content": "hi"}], "think": "hgih"}
    response = server.post("/api/chat", body)
    assert response.status_code == 400
    assert response.json()["error"].startswith("think must be one of")


ARGUMENTS = '{"city": "Ulm"}'
CALL = ("assistant", "<tool_call>", f'{{"name": "weather", "arguments": {ARGUMENTS}}}')
CALL_TEMPLATE = (
    "{% if tools %}Write <tool_call>\\n</tool_call> for {{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant"
)
TOOLS: list[Any] = [{"type": "function", "function": {"name": "weather"}}]


@pytest.fixture(scope="module")
def calling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    answer = (*CALL, "</tool_call>", "<|endoftext|>")
    folder = write_scripted(tmp_path_factory.mktemp("calls"), CALL_TEMPLATE, pairwise(answer))
    with start(folder, "--kv-memory", "4MB", "--alias", "thinks") as server:
        yield server


def test_calls_between_tags_are_tool_calls(calling: RunningServer) -> None:
    create = calling.openai().chat.completions.create
    (choice,) = create(**chat(tools=TOOLS)).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    ((name, arguments),) = (
        (call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()
    )
    assert (name, arguments) == ("weather", ARGUMENTS)
    chunks = [chunk.choices[0] for chunk in create(**chat(tools=TOOLS, stream=True))]
    calls = [call.function for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert "".join(call.name or "" for call in calls) == "weather"
    assert "".join(call.arguments or "" for call in calls) == ARGUMENTS
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(chunk.delta.content for chunk in chunks)


def test_without_tools_tags_of_calls_are_content(calling: RunningServer) -> None:
    for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        (choice,) = calling.openai().chat.completions.create(**chat(**fields)).choices
        assert choice.message.content == "".join((*CALL[1:], "</tool_call>"))
        assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)


def test_ollamas_clients_get_calls_too(calling: RunningServer) -> None:
    client = ollama.Client(host=calling.url)
    message = client.chat("thinks", [{"role": "user", "content": "hi"}], tools=TOOLS).message
    (call,) = message.tool_calls or ()
    assert (call.function.name, call.function.arguments) == ("weather", {"city": "Ulm"})
    assert "tools" in (client.show("thinks").capabilities or ())
