"""Editors get no answers that aren't sure, and programs get them all."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, start

CARET = {"prompt": "x = 1\ny = ", "suffix": "\nz = 3\n"}
SEGMENTS = {"prefix": CARET["prompt"], "suffix": CARET["suffix"]}


@pytest.fixture(scope="module")
def doubting(
    tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    """A server of a model that is never sure of anything."""
    folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("models") / "doubting")
    never = [-9.0, 0.0, 0.0, 0.0, 0.0]
    record = {"confidence": {"line": never, "start": never, "threshold": 0.4}}
    (folder / "midfill.json").write_text(json.dumps(record))
    with start(folder, "--kv-memory", "4MB") as server:
        yield server


def ask(server: RunningServer, path: str, body: dict[str, Any]) -> Any:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    return response.json()


EDITORS: dict[str, tuple[str, dict[str, Any], Callable[[Any], str]]] = {
    "llama.cpp": (
        "/infill",
        {"input_prefix": CARET["prompt"], "input_suffix": CARET["suffix"], "n_predict": 8},
        lambda answer: str(answer["content"]),
    ),
    "Tabby": (
        "/v1/completions",
        {"language": "python", "segments": SEGMENTS},
        lambda answer: str(answer["choices"][0]["text"]),
    ),
    "Mistral": (
        "/v1/fim/completions",
        {"model": "", **CARET, "max_tokens": 8},
        lambda answer: str(answer["choices"][0]["message"]["content"]),
    ),
    "Ollama": (
        "/api/generate",
        {"model": "doubting", **CARET, "stream": False, "options": {"num_predict": 8}},
        lambda answer: str(answer["response"]),
    ),
}


@pytest.mark.parametrize("editor", EDITORS)
def test_editors_get_no_answer_that_is_not_sure(doubting: RunningServer, editor: str) -> None:
    path, body, text = EDITORS[editor]
    assert text(ask(doubting, path, body)) == ""


def test_programs_get_the_answer_and_how_sure_it_is_if_they_ask(doubting: RunningServer) -> None:
    body = {**CARET, "max_tokens": 8, "temperature": 0}
    plain = ask(doubting, "/v1/completions", body)
    told = ask(doubting, "/v1/completions", {**body, "midfill": {"min_confidence": 0}})
    assert plain["choices"][0]["text"] == told["choices"][0]["text"] != ""
    assert "confidence" not in plain["midfill"]
    assert told["midfill"]["confidence"] == pytest.approx(1 / (1 + 2.718281828**9), abs=1e-4)


@pytest.mark.parametrize("least", [0.2, "editor"])
def test_programs_may_ask_for_sure_answers_only(doubting: RunningServer, least: object) -> None:
    body = {**CARET, "max_tokens": 8, "midfill": {"min_confidence": least}}
    answer = ask(doubting, "/v1/completions", body)
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["midfill"]["confidence"] < 0.2


def test_a_stream_is_judged_by_its_first_tokens(doubting: RunningServer) -> None:
    body = {**CARET, "max_tokens": 8, "stream": True, "midfill": {"min_confidence": 0.2}}
    text = doubting.post("/v1/completions", body).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == ""
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chunks[-1]["midfill"]["confidence"] < 0.2


def test_several_answers_are_each_as_sure_as_they_are(doubting: RunningServer) -> None:
    body = {**CARET, "max_tokens": 4, "n": 2, "midfill": {"min_confidence": 0}}
    choices = ask(doubting, "/v1/completions", body)["choices"]
    assert all(choice["midfill"]["confidence"] < 0.2 for choice in choices)


@pytest.mark.parametrize("least", [-0.1, 1.5, "sure"])
def test_what_is_no_probability_is_refused(doubting: RunningServer, least: object) -> None:
    response = doubting.post("/v1/completions", {**CARET, "midfill": {"min_confidence": least}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "midfill.min_confidence"
