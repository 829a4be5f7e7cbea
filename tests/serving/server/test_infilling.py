"""Fields of infill requests in addition to prefix and suffix, through a real socket."""

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
from running_server import RunningServer, start
from tiny_checkpoints import tiny_tokenizer

from midfill.frontend.sampling import PostProcessing

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
PREFIX, SUFFIX = "x = 1\ny = [2, 3]\nz = toke", ")\nprint(x)\n"


def stream(server: RunningServer, **body: object) -> list[str]:
    """Return the texts of a streamed answer's chunks that have text."""
    with server.client.stream(
        "POST", f"{server.url}/v1/completions", json={**body, "stream": True}
    ) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    texts = [json.loads(event)["choices"][0]["text"] for event in events]
    return [text for text in texts if text]


def test_healing_through_the_official_client(server: RunningServer) -> None:
    answer = server.openai().completions.create(
        model="tiny-llama",
        prompt=PREFIX,
        suffix=SUFFIX,
        temperature=0,
        max_tokens=6,
        logprobs=2,
        extra_body={"ignore_eos": True, "midfill": {"layout": "spm"}},
    )
    assert answer.model_extra is not None
    assert answer.model_extra["midfill"]["healed"] == len("toke")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert answer.choices[0].text.startswith((logprobs.tokens or [])[0])
    assert (logprobs.text_offset or [])[0] == 0
    assert len(logprobs.token_logprobs or []) == 6


def test_healing_can_be_turned_off(server: RunningServer) -> None:
    body = {"prompt": PREFIX, "suffix": SUFFIX, **GREEDY}
    healed = server.complete(**body, midfill={"layout": "spm"})
    plain = server.complete(**body, midfill={"layout": "spm", "healing": False})
    assert "healed" not in plain["midfill"]
    assert plain["usage"]["prompt_tokens"] > healed["usage"]["prompt_tokens"]
    echoed = server.complete(**body, echo=True, midfill={"layout": "spm"})
    assert echoed["choices"][0]["text"] == PREFIX + healed["choices"][0]["text"]


def test_streamed_and_whole_answers_are_the_same(server: RunningServer) -> None:
    for layout in ("spm", "psm", "auto"):
        body = {"prompt": PREFIX, "suffix": SUFFIX, **GREEDY, "midfill": {"layout": layout}}
        whole = server.complete(**body)["choices"][0]["text"]
        assert "".join(stream(server, **body)) == whole


@pytest.mark.parametrize("spelling", ["midfill", "llama.cpp"])
def test_context_is_shown_to_the_model(server: RunningServer, spelling: str) -> None:
    def ask(*files: tuple[str, str]) -> dict[str, Any]:
        own = [{"path": path, "text": text} for path, text in files]
        extra = [{"filename": path, "text": text} for path, text in files]
        fields = {"context": own} if spelling == "midfill" else {}
        return server.complete(
            prompt="p = ",
            suffix="\n",
            **GREEDY,
            midfill={"layout": "psm", **fields},
            **({} if spelling == "midfill" else {"input_extra": extra}),
        )

    one, two = (f"{spelling}-1.py", "A = 1\n" * 20), (f"{spelling}-2.py", "B = 2\n" * 20)
    alone = ask()
    assert alone["usage"]["prompt_tokens"] < 10
    assert ask(one, two)["choices"][0]["text"] != alone["choices"][0]["text"]
    changed = ask((one[0], "A = 3\n" * 20), two)
    assert changed["usage"]["prompt_tokens"] > 150
    # What changed has moved to the end: the next change leaves the other file cached.
    again = ask((one[0], "A = 4\n" * 20), two)
    assert again["midfill"]["cached_tokens"] > 80


def test_the_documents_path_is_shown(server: RunningServer) -> None:
    body = {"prompt": "p = ", "suffix": "\n", **GREEDY}
    plain = server.complete(**body, midfill={"layout": "psm"})
    named = server.complete(**body, midfill={"layout": "psm", "path": "src/long/path/name.py"})
    assert named["usage"]["prompt_tokens"] > plain["usage"]["prompt_tokens"] + 10


@pytest.mark.parametrize(
    ("fields", "post_processing"),
    [
        ({}, PostProcessing(overlap=True)),
        ({"trim": True}, PostProcessing(overlap=True)),
        ({"trim": False, "lines": "single"}, PostProcessing(overlap=False, lines="single")),
        ({"lines": "block"}, PostProcessing(lines="block")),
        ({"brackets": "close"}, PostProcessing(brackets="close")),
        (
            {"trim": True, "lines": "single", "brackets": "close"},
            PostProcessing(overlap=True, lines="single", brackets="close"),
        ),
    ],
)
def test_post_processing_is_the_same_streamed_and_whole(
    server: RunningServer, fields: dict[str, Any], post_processing: PostProcessing
) -> None:
    # What makes something to trim: brackets, line breaks, the suffix's beginning.
    likely = tiny_tokenizer().encode("()]\n\n   print").ids
    for seed in range(4):
        body = {
            "prompt": "def f(x):\n    y = [",
            "suffix": ")\n\nprint(f(1))\n",
            "max_tokens": 30,
            "temperature": 1,
            "seed": seed,
            "ignore_eos": True,
            "logit_bias": {str(token_id): 4 for token_id in likely},
        }
        asked = {"layout": "psm", "trim": False}
        untrimmed = server.complete(**body, midfill=asked)["choices"][0]["text"]
        expected = post_processing.apply(untrimmed, body["prompt"], body["suffix"], broken_off=True)
        whole = server.complete(**body, midfill={"layout": "psm", **fields})["choices"][0]
        pieces = stream(server, **body, midfill={"layout": "psm", **fields})
        assert whole["text"] == expected
        assert "".join(pieces) == expected


def test_a_single_line_ends_generation(server: RunningServer) -> None:
    (newline,) = tiny_tokenizer().encode("\n").ids
    answer = server.complete(
        prompt="a = ",
        suffix="",
        temperature=0,
        max_tokens=400,
        logit_bias={str(newline): 100},
        midfill={"lines": "single", "healing": False},
    )
    assert answer["choices"][0]["text"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 1
    server.wait_for(lambda: server.metric("num_requests_running") == 0)


class TestEmptyAnswers:
    """After what is healed, the end token is by far the most likely."""

    BODY: ClassVar = {
        "prompt": PREFIX, "suffix": SUFFIX, "max_tokens": 6, "logit_bias": {"0": 60},
    }  # fmt: skip
    KINDS: ClassVar = [
        {"temperature": 0},
        {"temperature": 1.5, "seed": 1, "n": 4},
        {"temperature": 0, "midfill": {"healing": False}},
        {"temperature": 0, "logprobs": 2},
    ]

    @pytest.mark.parametrize("fields", KINDS)
    @pytest.mark.parametrize("threshold", [1e-30, 1])
    def test_a_request_says_how_probable_they_have_to_be(
        self, server: RunningServer, fields: dict[str, Any], threshold: float
    ) -> None:
        asked = {**fields.get("midfill", {}), "trim": False, "empty_threshold": threshold}
        body = {**self.BODY, **fields, "midfill": asked}
        whole = server.complete(**body)
        choices = whole["choices"]
        assert [choice["text"] == "" for choice in choices] == [threshold < 1] * len(choices)
        assert {choice["finish_reason"] for choice in choices} == {"stop"}
        assert [choice["index"] for choice in choices] == list(range(body.get("n", 1)))
        for choice in choices if "logprobs" in body else ():
            assert (choice["logprobs"]["tokens"] == []) == (threshold < 1)
        if "n" not in body:
            assert "".join(stream(server, **body)) == choices[0]["text"]
            # The end token alone, or one of text and the end token.
            assert whole["usage"]["completion_tokens"] == (1 if threshold < 1 else 2)

    def test_ignore_eos_asks_for_text_in_any_case(self, server: RunningServer) -> None:
        body = {**self.BODY, **GREEDY, "max_tokens": 5}
        plain = server.complete(**body, midfill={"trim": False})
        asked = server.complete(**body, midfill={"trim": False, "empty_threshold": 1e-30})
        assert asked["choices"] == plain["choices"]
        assert asked["usage"]["completion_tokens"] == 5


DOCUMENT, REST = "                    a = 1\n" * 24, "print(a)\n" * 12


def delete_past_the_cut(server: RunningServer, prepares: bool) -> list[dict[str, Any]]:
    """A whole document, one deleted close to the cut, and one from which the cut has to move."""
    body = {"suffix": REST, **GREEDY, "midfill": {"healing": False}}
    before = server.metric("background_tokens_total")
    answers = [server.complete(prompt=DOCUMENT, **body)]
    cut = answers[0]["midfill"]["cut"]
    answers.append(server.complete(prompt=DOCUMENT[: cut + 204], **body))
    if prepares:
        server.wait_for(lambda: server.metric("background_tokens_total") > before)
        server.wait_for(lambda: server.metric("num_requests_background") == 0)
    answers.append(server.complete(prompt=DOCUMENT[: cut + 198], **body))
    return answers


def test_idle_prefill_leaves_less_to_compute_and_changes_no_answer(tiny_folder: Path) -> None:
    with start(tiny_folder, "--kv-memory", "4MB") as server:
        prepared = delete_past_the_cut(server, prepares=True)
    with start(tiny_folder, "--kv-memory", "4MB", "--no-idle-prefill") as server:
        unprepared = delete_past_the_cut(server, prepares=False)
        assert server.metric("background_tokens_total") == 0
        cut, end = prepared[2]["midfill"]["cut"], prepared[0]["midfill"]["cut"] + 198
        head, typed = DOCUMENT[:cut], DOCUMENT[cut:end]
        same_prompt = server.complete(
            prompt=f"<fim_prefix>{head}<fim_suffix>{REST}<fim_middle>{typed}",
            **GREEDY,
            midfill={"layout": "verbatim"},
        )
    assert prepared[2]["choices"] == same_prompt["choices"]
    assert prepared[2]["usage"]["prompt_tokens"] == same_prompt["usage"]["prompt_tokens"]
    for with_prefill, without in zip(prepared[:2], unprepared[:2], strict=True):
        assert with_prefill["choices"] == without["choices"]
        drawn = {"document": without["midfill"]["document"]}  # at random, by each server
        assert with_prefill["midfill"] | drawn == without["midfill"]
    assert unprepared[2]["midfill"]["computed_tokens"] > 50
    assert prepared[2]["midfill"]["computed_tokens"] < 25


def messages(server: RunningServer, **fields: Any) -> list[str]:
    """Return the texts of a streamed answer's messages."""
    client = server.openai()
    stream = client.completions.create(
        model=client.models.list().data[0].id, prompt="def f(", stream=True, temperature=0,
        extra_body={"ignore_eos": True}, **fields,
    )  # fmt: skip
    return [chunk.choices[0].text for chunk in stream]


def test_tokens_of_a_stream_are_sent_together_except_the_first_the_last_and_stops(
    tiny_folder: Path,
) -> None:
    with start(tiny_folder, "--no-speculation", "--stream-interval-ms", "0") as server:
        each = messages(server, max_tokens=24)
    with start(tiny_folder, "--no-speculation", "--stream-interval", "60000") as server:
        gathered = messages(server, max_tokens=24)
        text = "".join(each)
        stop = text[len(text) // 2]
        stopped = messages(server, max_tokens=4000, stop=[stop])
    assert "".join(gathered) == text
    assert len(gathered) == 2 < len(each)
    assert gathered[0] == each[0]
    assert "".join(stopped) == text[: text.index(stop)]


def test_a_document_longer_than_the_context_is_answered(server: RunningServer) -> None:
    text = "".join(f"value_{n} = {n * 7919}\n" for n in range(4000))
    for caret in (0, 40_000, len(text)):
        answer = server.complete(prompt=text[:caret], suffix=text[caret:], **GREEDY)
        window = answer["midfill"]["window"]
        assert window["before"] + window["after"] > 50
        assert answer["usage"]["completion_tokens"] == GREEDY["max_tokens"]
    typed = server.complete(prompt=text[:40_000] + "x", suffix=text[40_000:], **GREEDY)
    assert typed["midfill"]["computed_tokens"] <= 1 + 8


def test_a_request_chooses_how_much_is_shown(server: RunningServer) -> None:
    text = "".join(f"value_{n} = {n * 7919}\n" for n in range(4000))
    body = {"prompt": text[:40_000], "suffix": text[40_000:], **GREEDY}
    answer = server.complete(**body, midfill={"window": {"before": 40, "after": 30}})
    assert 30 <= answer["midfill"]["window"]["before"] <= 50
    assert 15 <= answer["midfill"]["window"]["after"] <= 30
    narrow = server.complete(**body, midfill={"window": {"after": 0}})
    assert narrow["midfill"]["window"]["after"] == 0
    most = server.complete(**body, midfill={"window": {"before": 10**30, "after": 30}})
    assert most["midfill"]["window"]["before"] > 200
    assert most["midfill"]["window"]["after"] <= 30
