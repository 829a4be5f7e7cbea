"""Ollama's API through its official Python client, and as editor plugins send it."""

import json
from typing import Any

import ollama
import pytest
from running_server import RunningServer

NAME = "tiny-llama"
PREFIX, SUFFIX = "x = 1\ny = [2, 3]\nz = toke", ")\nprint(x)\n"
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}


@pytest.fixture
def client(server: RunningServer) -> ollama.Client:
    return ollama.Client(host=server.url)


def lines(server: RunningServer, path: str, **body: object) -> list[dict[str, Any]]:
    with server.client.stream("POST", server.url + path, json=body) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        return [json.loads(line) for line in response.iter_lines()]


def test_a_suffix_makes_an_infill_request(client: ollama.Client, server: RunningServer) -> None:
    answer = client.generate(NAME, PREFIX, SUFFIX, options=GREEDY)
    same = server.complete(prompt=PREFIX, suffix=SUFFIX, temperature=0, max_tokens=12)
    assert answer.response == same["choices"][0]["text"] != ""
    assert answer.done
    assert answer.done_reason == same["choices"][0]["finish_reason"]
    assert answer.prompt_eval_count == same["usage"]["prompt_tokens"]
    assert answer.eval_count == same["usage"]["completion_tokens"]
    for duration in (answer.total_duration, answer.prompt_eval_duration, answer.eval_duration):
        assert duration is not None
    assert answer.model == NAME


@pytest.mark.parametrize("fields", [{"suffix": SUFFIX}, {"raw": True}, {}])
def test_streamed_and_whole_answers_are_the_same(
    client: ollama.Client, fields: dict[str, Any]
) -> None:
    whole = client.generate(NAME, PREFIX, **fields, options=GREEDY)
    pieces = list(client.generate(NAME, PREFIX, **fields, options=GREEDY, stream=True))
    assert "".join(piece.response or "" for piece in pieces) == whole.response
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].response == ""
    assert pieces[-1].done_reason == whole.done_reason
    assert pieces[-1].eval_count == whole.eval_count


def test_a_call_that_says_nothing_about_streaming_streams_lines(server: RunningServer) -> None:
    body = {"model": NAME, "prompt": PREFIX, "suffix": SUFFIX, "options": GREEDY}
    pieces = lines(server, "/api/generate", **body)
    assert pieces[-1]["done"] is True
    assert len(pieces) > 1


def test_a_prompt_without_suffix_is_a_chat_unless_it_is_raw(
    client: ollama.Client, server: RunningServer
) -> None:
    said = client.generate(NAME, "say", system="be brief", options=GREEDY)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "say"}]
    chat = client.chat(NAME, messages, options=GREEDY)
    assert said.response == chat.message.content
    assert said.prompt_eval_count == chat.prompt_eval_count
    raw = client.generate(NAME, "say", raw=True, options=GREEDY)
    same = server.complete(prompt="say", temperature=0, max_tokens=12)
    assert raw.response == same["choices"][0]["text"]
    assert raw.prompt_eval_count == same["usage"]["prompt_tokens"]
    empty = client.generate(NAME, "say", suffix="", options=GREEDY)  # as clients in Go send it
    assert empty.prompt_eval_count == client.generate(NAME, "say").prompt_eval_count


def test_a_filled_in_template_is_an_infill_request(client: ollama.Client) -> None:
    template = f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>"
    filled = client.generate(NAME, template, options=GREEDY)
    assert filled.response == client.generate(NAME, PREFIX, SUFFIX, options=GREEDY).response


def test_a_chat_streams_messages(client: ollama.Client) -> None:
    messages = [{"role": "user", "content": "hi"}]
    whole = client.chat(NAME, messages, options=GREEDY)
    pieces = list(client.chat(NAME, messages, options=GREEDY, stream=True))
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert {piece.message.role for piece in pieces} == {"assistant"}
    assert pieces[-1].done


def test_a_call_without_a_prompt_means_load(client: ollama.Client) -> None:
    loaded = client.generate(NAME)
    assert (loaded.response, loaded.done, loaded.done_reason) == ("", True, "load")
    assert client.generate(NAME, keep_alive=0).done_reason == "unload"
    assert client.chat(NAME).done_reason == "load"


def test_options_are_ollamas(client: ollama.Client) -> None:
    text = client.generate(NAME, PREFIX, raw=True, options=GREEDY).response or ""
    stop = text[len(text) // 2]
    stopped = client.generate(NAME, PREFIX, raw=True, options={**GREEDY, "stop": [stop]})
    assert stopped.response == text[: text.index(stop)]
    assert stopped.done_reason == "stop"
    seeds = [
        client.generate(NAME, PREFIX, raw=True, options={"seed": seed, "num_predict": 12}).response
        for seed in (1, 1, 2)
    ]
    assert seeds[0] == seeds[1] != seeds[2]
    ignored = {"num_ctx": 2048, "mirostat": 1, "repeat_penalty": 1.1, "unheard_of": []}
    both = client.generate(NAME, PREFIX, raw=True, options={**GREEDY, **ignored})
    assert both.response == text
    endless = client.generate(NAME, PREFIX, raw=True, options={"num_predict": -1, "seed": 1})
    assert (endless.eval_count or 0) > 12


def test_logprobs(client: ollama.Client) -> None:
    answer = client.generate(
        NAME, PREFIX, raw=True, logprobs=True, top_logprobs=2, options={**GREEDY, "num_predict": 3}
    )
    assert answer.logprobs is not None
    assert len(answer.logprobs) == 3
    for one in answer.logprobs:
        assert len(one.top_logprobs or []) == 2


def test_the_latest_tag_may_be_left_out(client: ollama.Client) -> None:
    assert client.generate(f"{NAME}:latest").done
    assert client.show(f"{NAME}:latest").capabilities == client.show(NAME).capabilities


def test_the_served_model_is_listed_and_described(
    client: ollama.Client, server: RunningServer
) -> None:
    (listed,) = client.list().models
    (loaded,) = client.ps().models
    assert listed.model == loaded.model == f"{NAME}:latest"
    assert listed.modified_at is not None
    assert listed.size
    assert loaded.context_length == 512
    shown = client.show(NAME)
    assert shown.capabilities == ["completion", "insert"]
    assert shown.template is not None
    assert "<fim_suffix>{{ .Suffix }}" in shown.template
    assert shown.modelinfo is not None
    assert shown.modelinfo["midfill.context_length"] == 512
    by_name = server.post("/api/show", {"name": NAME})  # as Continue asks
    assert by_name.json()["template"] == shown.template
    major, minor = server.get("/api/version").json()["version"].split(".")[:2]
    assert (int(major), int(minor)) >= (0, 6)
    for path in ("/api/tags", "/api/version"):
        assert server.client.head(server.url + path).status_code == 200


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"model": "llama3"}, 404, "there is no model 'llama3'; this server has 'tiny-llama'"),
        ({}, 400, "model is missing"),
        ({"model": NAME, "prompt": 5}, 400, "prompt: expected str or null, got int"),
        ({"options": {"temperature": -1}}, 400, "options.temperature must be a number from 0"),
        ({"options": {"top_k": "x"}}, 400, "options.top_k: expected int or null, got str"),
        ({"format": "json"}, 400, "format is not supported"),
        ({"think": True}, 400, "think is not supported"),
        ({"template": "{{ .Prompt }}"}, 400, "template is not supported"),
        ({"prompt": "x" * 3_000_000, "raw": True}, 400, "prompt has 3000000 characters"),
    ],
)
def test_errors_are_strings(
    server: RunningServer, body: dict[str, Any], status: int, message: str
) -> None:
    if body and "model" not in body:
        body = {"model": NAME, "prompt": "a", **body}
    response = server.post("/api/generate", body)
    assert response.status_code == status
    assert response.json()["error"].startswith(message)


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/pull"), ("GET", "/api/v2/x")])
def test_an_unknown_path_is_reported_as_ollama_does(
    server: RunningServer, method: str, path: str
) -> None:
    response = server.client.request(method, server.url + path)
    assert response.status_code == 404
    assert response.json() == {"error": f"there is nothing at {method} {path}"}


def test_the_client_reports_errors(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="there is no model 'llama3'") as raised:
        client.generate("llama3", "a")
    assert raised.value.status_code == 404
    tool = {"type": "function", "function": {"name": "f"}}
    with pytest.raises(ollama.ResponseError, match="tools are not supported"):
        client.chat(NAME, [{"role": "user", "content": "a"}], tools=[tool])
    with pytest.raises(ollama.ResponseError, match="think is not supported"):
        client.chat(NAME, [{"role": "user", "content": "a"}], think=True)
    with pytest.raises(ollama.ResponseError, match="prompt has"):
        list(client.generate(NAME, "x" * 3_000_000, raw=True, stream=True))
