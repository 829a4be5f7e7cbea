"""Answers in the harmony format through a real socket, with OpenAI's and Ollama's own clients.

The served model writes one given answer: each of its tokens is followed by the next one.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import ollama
import openai
import pytest
from running_server import RunningServer, start
from scripted_model import write_scripted

from midfill.frontend.channels import HARMONY

ARGUMENTS = '{"zone": "UTC"}'
ANSWER = (
    *("So", "Hm", "<|end|>", "<|start|>", "assistant"),
    *("<|channel|>", "final", "<|message|>", ARGUMENTS, "<|return|>"),
)
"""Its first token is the prompt's last one, in which the model has begun to reason."""

RECIPIENT = "functions.now"
"""A prompt that ends with it goes on with the channel."""

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ reasoning_effort }}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.thinking }}{{ m.tool_calls | tojson }}{% endif %}<|end|>{% endfor %}"
    "<|start|>assistant{% if messages[-1].content == 'call' %} to=functions.now"
    "{% elif messages[-1].content != 'plain' %}<|channel|>analysis<|message|>So{% endif %}"
)

TOOL: Any = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = tmp_path_factory.mktemp("harmony")
    follows = [*pairwise(ANSWER), (RECIPIENT, "<|channel|>")]
    write_scripted(folder, TEMPLATE, follows, list(HARMONY))
    with start(folder, "--kv-memory", "4MB", "--alias", "harmony") as server:
        yield server


def chat(content: str, **fields: object) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "harmony", "messages": messages, "temperature": 0, "max_tokens": 32, **fields}


def test_reasoning_stands_beside_the_content(server: RunningServer) -> None:
    answer = server.openai().chat.completions.create(**chat("hi"))
    (choice,) = answer.choices
    assert choice.message.content == ARGUMENTS
    assert choice.message.model_extra == {"reasoning_content": "Hm", "reasoning": "Hm"}
    assert choice.message.tool_calls is None
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(ANSWER) - 1  # all that was generated


def test_a_message_to_a_function_is_a_tool_call(server: RunningServer) -> None:
    (choice,) = server.openai().chat.completions.create(**chat("call", tools=[TOOL])).choices
    assert choice.message.content is None
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls or [None]
    assert call is not None
    assert call.type == "function"
    assert (call.function.name, call.function.arguments) == ("now", ARGUMENTS)
    assert call.id


@pytest.mark.parametrize("content", ["hi", "call", "plain"])
def test_a_streamed_answer_is_the_same(server: RunningServer, content: str) -> None:
    client, body = server.openai(), chat(content, n=2)
    whole = client.chat.completions.create(**body).choices
    with client.chat.completions.stream(**{**body, "messages": body["messages"]}) as stream:
        streamed = stream.get_final_completion().choices
    for one, other in zip(whole, streamed, strict=True):
        assert (other.message.content or "") == (one.message.content or "")
        assert other.finish_reason == one.finish_reason
        extra = other.message.model_extra or {}
        assert extra.get("reasoning_content") == (one.message.model_extra or {}).get(
            "reasoning_content"
        )
        calls = [
            [
                (call.function.name, call.function.arguments)
                for call in each.message.tool_calls or ()
            ]
            for each in (one, other)
        ]
        assert calls[0] == calls[1]


@pytest.mark.parametrize("limit", range(1, len(ANSWER)))
def test_no_markup_is_shown_wherever_an_answer_is_cut_off(
    server: RunningServer, limit: int
) -> None:
    (choice,) = server.openai().chat.completions.create(**chat("hi", max_tokens=limit)).choices
    assert choice.message.content == (ARGUMENTS if limit >= 8 else "")
    assert (choice.message.model_extra or {})["reasoning_content"] == "Hm"
    assert choice.finish_reason == ("length" if limit < 9 else "stop")


def test_log_probabilities_are_the_contents(server: RunningServer) -> None:
    (choice,) = server.openai().chat.completions.create(**chat("hi", logprobs=True)).choices
    assert choice.logprobs is not None
    assert [token.token for token in choice.logprobs.content or ()] == [ARGUMENTS]


def test_tools_and_what_was_called_reach_the_template(server: RunningServer) -> None:
    def prompt_tokens(**fields: object) -> int:
        response = server.post("/v1/chat/completions", chat("call", **fields))
        assert response.status_code == 200, response.text
        return response.json()["usage"]["prompt_tokens"]  # type: ignore[no-any-return]

    none = prompt_tokens()
    assert prompt_tokens(tools=[TOOL]) > none
    assert prompt_tokens(tools=[TOOL], tool_choice="none") == none
    assert prompt_tokens(reasoning_effort="high") > none
    called = {"id": "1", "type": "function", "function": {"name": "now", "arguments": ARGUMENTS}}
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "1", "content": "noon"},
        {"role": "user", "content": "call"},
    ]
    without = prompt_tokens(messages=history)
    history[1]["reasoning_content"] = "I need the time."
    assert prompt_tokens(messages=history) > without
    del history[1]["tool_calls"]  # the template doesn't render it without a call
    plain = prompt_tokens(messages=history)
    del history[1]["reasoning_content"]
    assert prompt_tokens(messages=history) == plain


def test_a_call_cant_be_enforced(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError, match="tool_choice must be auto or none"):
        server.openai().chat.completions.create(
            **chat("call", tools=[TOOL], tool_choice="required")
        )


def test_an_answer_to_a_raw_prompt_is_all_text(server: RunningServer) -> None:
    (choice,) = server.complete(prompt="So", max_tokens=3, temperature=0)["choices"]
    assert "reasoning_content" not in choice


@pytest.mark.parametrize("stream", [False, True])
def test_ollamas_answers_have_thinking_and_calls(server: RunningServer, stream: bool) -> None:
    client = ollama.Client(host=server.url)

    def said(content: str, **fields: Any) -> tuple[str, str, list[Any], str | None]:
        messages = [{"role": "user", "content": content}]
        options = {"temperature": 0}
        ask: Any = client.chat
        answer = ask("harmony", messages, stream=stream, options=options, **fields)
        parts = list(answer) if stream else [answer]
        return (
            "".join(part.message.content or "" for part in parts),
            "".join(part.message.thinking or "" for part in parts),
            [call for part in parts for call in part.message.tool_calls or ()],
            parts[-1].done_reason,
        )

    assert said("hi", think="low") == (ARGUMENTS, "Hm", [], "stop")
    content, thinking, (call,), _ = said("call", tools=[TOOL])
    assert (content, thinking) == ("", "")
    assert (call.function.name, call.function.arguments) == ("now", {"zone": "UTC"})
    whole = client.generate("harmony", "hi", options={"temperature": 0})
    assert (whole.response, whole.thinking) == (ARGUMENTS, "Hm")
