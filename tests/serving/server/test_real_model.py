"""The default model, served: real answers, and only what changed is computed."""

import inspect
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from doc_blocks import Block, ShellCommand
from documented_requests import ask, shown_answers, without_volatile
from running_server import RunningServer, start

from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.runners.cpu.runner import multiplies_bfloat16

pytestmark = pytest.mark.real_model

SOURCE = inspect.getsource(textwrap)
SAMPLES = sorted((Path(__file__).parents[3] / "web" / "src" / "samples").glob("*.txt"))


@pytest.fixture(scope="module")
def plain() -> Iterator[RunningServer]:
    """The base model without the adapter that taught it to infill."""
    with start(DEFAULT_MODEL, "--kv-memory", "512MB", "--adapter", "none") as server:
        yield server


@pytest.fixture(scope="module")
def infilling() -> Iterator[RunningServer]:
    with start(DEFAULT_MODEL, "--kv-memory", "512MB") as server:
        yield server


@pytest.fixture(scope="module")
def infilling_elsewhere() -> Iterator[RunningServer]:
    """The default model with KV as other chips have it: answers differ a little."""
    dtype = "f16" if multiplies_bfloat16() else "bf16"
    with start(DEFAULT_MODEL, "--kv-memory", "512MB", "--kv-cache-dtype", dtype) as server:
        yield server


@pytest.mark.parametrize(("command", "answer"), shown_answers(), ids=str)
def test_it_answers_as_the_documentation_shows(
    infilling: RunningServer, command: ShellCommand, answer: Block
) -> None:
    answered, shown = json.loads(ask(infilling, command)), json.loads(answer.text)
    assert without_volatile(answered) == without_volatile(shown)


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_the_playgrounds_samples_are_answered_right(infilling: RunningServer, sample: Path) -> None:
    assert_answered_right(infilling, sample)


@pytest.mark.slow
@pytest.mark.parametrize("sample", SAMPLES, ids=lambda path: path.stem)
def test_they_are_on_chips_with_another_kv_cache_dtype(
    infilling_elsewhere: RunningServer, sample: Path
) -> None:
    assert_answered_right(infilling_elsewhere, sample)


def assert_answered_right(server: RunningServer, sample: Path) -> None:
    """What is between a sample's marks is suggested, and sure enough to be shown by editors."""
    prompt, missing, suffix = sample.read_text("utf-8").split("\N{CARET}")
    for fields in ({}, {"min_confidence": "editor", "suggestion": True}):
        answer = server.complete(
            prompt=prompt,
            suffix=suffix,
            max_tokens=96,
            temperature=0,
            midfill={"lines": "block", **fields},
        )
        assert answer["choices"][0]["text"] == missing, fields


def test_there_are_samples() -> None:
    assert len(SAMPLES) >= 6


def test_the_documentation_shows_answers() -> None:
    assert any(answer.page == "README.md" for _, answer in shown_answers())


def test_it_answers_a_chat(plain: RunningServer) -> None:
    answer = plain.openai().chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[{"role": "user", "content": "Write a Python function that adds two numbers."}],
        max_tokens=30,
        temperature=0,
    )
    assert "return num1 + num2" in (answer.choices[0].message.content or "")


def test_it_completes_code_and_stops(plain: RunningServer) -> None:
    stream = plain.openai().completions.create(
        model=DEFAULT_MODEL,
        prompt="def add(a, b):\n    return",
        max_tokens=30,
        temperature=0,
        stop=["\n"],
        stream=True,
    )
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == " a + b"
    assert chunks[-1].finish_reason == "stop"


def test_without_fim_tokens_the_suffix_is_not_seen_and_the_answer_says_so(
    plain: RunningServer,
) -> None:
    body = {"prompt": "def add(a, b):\n    return", "max_tokens": 5, "temperature": 0}
    prefix_only = plain.complete(**body)
    infill = plain.complete(**body, suffix="\n\nprint(add(1, 2))\n")
    assert infill["choices"][0]["text"] == prefix_only["choices"][0]["text"]
    assert infill["midfill"]["layout"] == "prefix-only"
    assert infill["midfill"]["sentinels"] is False
    assert "no FIM tokens" in plain.banner


def test_it_continues_half_a_word_and_stops_by_itself(infilling: RunningServer) -> None:
    answer = infilling.complete(
        prompt='def area(width, height):\n    """The area of a rectangle."""\n    return wid',
        suffix="\n\n\nprint(area(2, 3))\n",
        max_tokens=32,
        temperature=0,
    )
    assert answer["choices"][0]["text"] == "th * height"
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["midfill"]["sentinels"] is True
    assert "smollm2-135m-fim" in infilling.banner


def test_rounds_of_a_document_compute_only_the_increment(infilling: RunningServer) -> None:
    suffix = SOURCE[4000:6000]
    before = 0
    for number in range(5):
        prefix = SOURCE[: 2000 + number * 40]
        answer = infilling.complete(
            prompt=prefix, suffix=suffix, max_tokens=4, temperature=0, ignore_eos=True
        )
        usage = answer["usage"]
        computed = usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]
        assert answer["midfill"]["computed_tokens"] == computed
        if number:
            assert computed <= usage["prompt_tokens"] - before + 8
        before = usage["prompt_tokens"]


def test_the_answer_does_not_depend_on_the_cache(infilling: RunningServer) -> None:
    body = {
        "prompt": SOURCE[:3000],
        "suffix": SOURCE[3000:4000],
        "max_tokens": 32,
        "temperature": 0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    cold = infilling.complete(**body)
    warm = infilling.complete(**body)
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 500
    assert warm["choices"][0]["text"] == cold["choices"][0]["text"]
    tokens = [answer["choices"][0]["logprobs"]["token_logprobs"] for answer in (cold, warm)]
    assert tokens[0] == pytest.approx(tokens[1], abs=1e-4)
