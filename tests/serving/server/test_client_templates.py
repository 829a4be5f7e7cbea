"""Editors that fill in a template by the model's name: any name, any family's template."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_prompts import CLIENT_PROMPTS, NEXT_EDIT_PROMPTS, PREFIX, SUFFIX, ClientPrompt
from running_server import RunningServer, start
from tiny_checkpoints import tiny_tokenizer

ALIASES = ("qwen2.5-coder", "codellama:7b")
GREEDY = {"temperature": 0, "max_tokens": 8}
KEYS = {one.client: f"key-{number}" for number, one in enumerate(CLIENT_PROMPTS)}
OTHERS_KEY = "key"


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[RunningServer]:
    options = [option for alias in ALIASES for option in ("--alias", alias)]
    options += [option for key in (*KEYS.values(), OTHERS_KEY) for option in ("--api-key", key)]
    with start(tiny_folder, "--kv-memory", "4MB", *options) as server:
        server.client.headers["authorization"] = f"Bearer {OTHERS_KEY}"
        yield server


def test_the_model_has_further_names(server: RunningServer) -> None:
    assert "aliases  qwen2.5-coder, codellama:7b" in server.banner
    cards = server.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny-llama", *ALIASES]
    assert {card["root"] for card in cards} == {"tiny-llama"}
    for name in ALIASES:
        assert server.get(f"/v1/models/{name}").json()["id"] == name
        assert server.complete(model=name, prompt="a", max_tokens=1)["model"] == name
        chat = server.post("/v1/chat/completions", {"model": name, "messages": [_HELLO]})
        assert chat.json()["model"] == name
    assert server.complete(model="", prompt="a", max_tokens=1)["model"] == "tiny-llama"
    refused = server.post("/v1/completions", {"model": "gpt", "prompt": "a"})
    assert refused.status_code == 404
    assert "'tiny-llama', 'qwen2.5-coder', 'codellama:7b'" in refused.json()["error"]["message"]


_HELLO = {"role": "user", "content": "a"}


@pytest.mark.parametrize("one", CLIENT_PROMPTS, ids=lambda one: one.client)
def test_a_template_is_answered_as_prefix_and_suffix_are(
    server: RunningServer, one: ClientPrompt
) -> None:
    # A tenant of its own: files in a template are snippets, so those that a tenant was shown before
    # may stay in their place.
    headers = {"authorization": f"Bearer {KEYS[one.client]}"}

    def complete(**body: object) -> dict[str, Any]:
        response = server.post("/v1/completions", body | GREEDY, headers=headers)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    context = [{"path": file.path, "text": file.text} for file in one.context_files]
    fields = {"context": context, "path": one.path, "repository": one.repository}
    expected = complete(prompt=one.prefix, suffix=one.suffix, midfill=fields)
    answer = complete(prompt=one.prompt, stop=list(one.stop))
    assert answer["choices"][0]["text"] == expected["choices"][0]["text"]
    assert answer["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
    assert answer["midfill"]["template"] in one.prompt
    assert answer["midfill"]["document"] == expected["midfill"]["document"]
    assert answer["midfill"]["computed_tokens"] <= 1


def test_typing_in_a_template_computes_what_was_typed(server: RunningServer) -> None:
    def ask(prefix: str) -> dict[str, int]:
        prompt = f"<PRE> {prefix} <SUF>{SUFFIX * 6} <MID>"
        answer = server.complete(prompt=prompt, midfill={"healing": False}, **GREEDY)
        return answer["midfill"]  # type: ignore[no-any-return]

    ask(PREFIX + "w")
    assert ask(PREFIX + "w * ")["computed_tokens"] <= 5


def test_files_that_do_not_fit_are_left_out_and_long_documents_are_narrowed(
    server: RunningServer,
) -> None:
    large = "x = 1\n" * 400
    files = f"<|file_sep|>a.py\n{large}<|file_sep|>b.py\ny = 1\n<|file_sep|>c.py\n"
    prompt = f"{files}<|fim_prefix|>{PREFIX * 200}<|fim_suffix|>{SUFFIX}<|fim_middle|>"
    answer = server.complete(prompt=prompt, midfill={"report": "tokens"}, **GREEDY)
    assert answer["usage"]["prompt_tokens"] < 512
    assert answer["midfill"]["window"]["before"] < 200 * len(PREFIX)
    segments = answer["midfill"]["report"]["segments"]
    shown = "".join("".join(one["texts"]) for one in segments if one["role"] == "context")
    assert shown == "# b.py\ny = 1\n# c.py\n"


@pytest.mark.parametrize("prompt", NEXT_EDIT_PROMPTS.values(), ids=NEXT_EDIT_PROMPTS)
def test_next_edit_prompts_are_sent_as_they_are(server: RunningServer, prompt: str) -> None:
    answer = server.complete(prompt=prompt, **GREEDY)
    assert answer["midfill"]["layout"] == "verbatim"
    assert "template" not in answer["midfill"]


def test_an_answer_to_a_template_ends_where_it_repeats_the_suffix(server: RunningServer) -> None:
    letter = tiny_tokenizer().token_to_id("e")
    prompt = "<fim_prefix>x = <fim_suffix>eeee\n<fim_middle>"
    body = {"prompt": prompt, "logit_bias": {str(letter): 100}, "max_tokens": 4, "temperature": 0}
    assert server.complete(**body, midfill={"healing": False})["choices"][0]["text"] == ""
    kept = server.complete(**body, midfill={"healing": False, "trim": False})
    assert kept["choices"][0]["text"] == "eeee"
