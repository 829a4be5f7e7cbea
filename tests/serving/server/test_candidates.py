"""Editors of a server with candidates get the most probable of them; so does whoever asks."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running_server import RunningServer, start

from midfill.frontend.sampling import SamplingParams
from midfill.llm import LLM

CARET = {"prompt": "for i in ", "suffix": ":\n    pass\n"}
STOP = list("ABCDEFGHIJKLMNOPQRSTUVWXYZ")  # the tiny model ends no answer by itself
LENGTH = 40


@pytest.fixture(scope="module")
def searching(tiny_folder: Path) -> Iterator[RunningServer]:
    options = ("--kv-memory", "4MB", "--min-confidence", "0", "--candidates", "4")
    with start(tiny_folder, *options) as server:
        yield server


@pytest.fixture(scope="module")
def expected(tiny_folder: Path) -> dict[int, str]:
    """What a model in this process answers, by the number of candidates."""
    sampling = SamplingParams(temperature=0.0, max_tokens=LENGTH, stop=tuple(STOP))
    with LLM(str(tiny_folder), threads=1, kv_memory=4 << 20) as llm:
        answers = {
            count: llm.infill(CARET["prompt"], CARET["suffix"], sampling, candidates=count).text
            for count in (1, 2, 4)
        }
    assert len(set(answers.values())) == 3
    return answers


def complete(server: RunningServer, **fields: Any) -> Any:
    body = {**CARET, "max_tokens": LENGTH, "temperature": 0, "stop": STOP, **fields}
    response = server.post("/v1/completions", body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_request_gets_as_many_candidates_as_it_asks_for(
    searching: RunningServer, expected: dict[int, str], count: int
) -> None:
    answer = complete(searching, midfill={"candidates": count})
    assert answer["choices"][0]["text"] == expected[count]


def test_programs_get_one_and_editors_as_many_as_the_server_has(
    searching: RunningServer, expected: dict[int, str]
) -> None:
    assert complete(searching)["choices"][0]["text"] == expected[1]
    editor = complete(searching, midfill={"min_confidence": "editor"})
    assert editor["choices"][0]["text"] == expected[4]
    body = {
        "input_prefix": CARET["prompt"],
        "input_suffix": CARET["suffix"],
        "n_predict": LENGTH,
        "temperature": 0,
        "stop": STOP,
    }
    assert searching.post("/infill", body).json()["content"] == expected[4]


def test_each_prompt_of_a_request_has_its_own(
    searching: RunningServer, expected: dict[int, str]
) -> None:
    prompts = [CARET["prompt"], "def f(", CARET["prompt"]]
    choices = complete(searching, prompt=prompts, midfill={"candidates": 4})["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert choices[0]["text"] == choices[2]["text"] == expected[4]


def test_a_stream_is_one_answer(searching: RunningServer, expected: dict[int, str]) -> None:
    body = {**CARET, "max_tokens": LENGTH, "temperature": 0, "stop": STOP, "stream": True}
    text = searching.post("/v1/completions", {**body, "midfill": {"candidates": 4}}).text
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    chunks = [json.loads(line) for line in lines if line != "[DONE]"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected[1]


@pytest.mark.parametrize("count", [0, 9, "many"])
def test_a_number_out_of_range_is_refused(searching: RunningServer, count: object) -> None:
    response = searching.post("/v1/completions", {**CARET, "midfill": {"candidates": count}})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "midfill.candidates"


def test_nothing_is_left_running(searching: RunningServer) -> None:
    complete(searching, midfill={"candidates": 4})
    searching.wait_for(lambda: searching.metric("num_requests_running") == 0)
