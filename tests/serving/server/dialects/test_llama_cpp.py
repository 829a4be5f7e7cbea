"""llama.cpp's /infill, /completion and what it tells of its model, as its plugins use them."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import httpx
import pytest
from running_server import RunningServer, start
from tiny_checkpoints import tiny_tokenizer

from midfill.frontend.sampling import SamplingParams
from midfill.serving.server.dialects.llama_cpp import LlamaCppFields

PREFIX, LINE, SUFFIX = "x = 1\ny = [2, 3]\n", "z = toke", ")\nprint(x)\n"
INFILL: dict[str, Any] = {
    "input_prefix": PREFIX,
    "prompt": LINE,
    "input_suffix": SUFFIX,
    "n_predict": 12,
    "temperature": 0,
    "ignore_eos": True,
}


TENANTS = [f"key-{number}" for number in range(4)]


@pytest.fixture(scope="module")
def server_of_tenants(tiny_folder: Path) -> Iterator[RunningServer]:
    keys = [option for key in TENANTS for option in ("--api-key", key)]
    with start(tiny_folder, "--kv-memory", "4MB", *keys) as server:
        yield server


@pytest.fixture
def own_server(
    server_of_tenants: RunningServer, request: pytest.FixtureRequest
) -> Iterator[RunningServer]:
    """A server that knows nothing of this client: which snippets are shown, and computed in idle
    time, depends on what the tenant has sent before."""
    key = request.param
    with httpx.Client(timeout=60, headers={"authorization": f"Bearer {key}"}) as client:
        yield replace(server_of_tenants, client=client, api_key=key)


def as_tenant(number: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("own_server", [TENANTS[number]], indirect=True, ids=[""])


def ask(server: RunningServer, path: str = "/infill", **body: object) -> Any:
    response = server.post(path, {**(INFILL if path == "/infill" else {}), **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: RunningServer, path: str, **body: object) -> list[dict[str, Any]]:
    sent = {**(INFILL if path == "/infill" else {}), **body, "stream": True}
    with server.client.stream("POST", server.url + path, json=sent) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: {") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def test_the_prompt_belongs_to_the_prefix(server: RunningServer) -> None:
    in_two = ask(server)["content"]
    in_one = ask(server, input_prefix=PREFIX + LINE, prompt="")["content"]
    openai = server.complete(
        prompt=PREFIX + LINE, suffix=SUFFIX, max_tokens=12, temperature=0, ignore_eos=True
    )
    assert in_two == in_one == openai["choices"][0]["text"] != ""


def test_answers_are_one_line_of_compact_json(server: RunningServer) -> None:
    # llama.vim without a key; httpx would refuse to send such a header.
    headers = {"content-type": "application/json", "authorization": "Bearer "}
    body = json.dumps({**INFILL, "model": ""}).encode()
    with urlopen(Request(f"{server.url}/infill", body, headers)) as response:
        text = response.read().decode()
    assert "\n" not in text
    assert re.match(r'\s*{.*"content"\s*:"', text)


def test_fields_are_selected_by_their_paths(server: RunningServer) -> None:
    answer = ask(server, response_fields=["content", "timings/prompt_n", "no/such", "timings/x"])
    assert list(answer) == ["content", "timings/prompt_n"]
    assert ask(server, response_fields=[""]) == {}
    assert len(ask(server, response_fields=[])) > 10


def test_a_result_tells_settings_tokens_and_timings(server: RunningServer) -> None:
    first, second = ask(server, input_prefix="u = 5\n" * 9), ask(server, input_prefix="u = 5\n" * 9)
    assert first["generation_settings"]["n_ctx"] == 512
    assert first["generation_settings"]["n_predict"] == 12
    assert first["stop"] is True
    assert first["stop_type"] == "limit"
    assert first["tokens_predicted"] == first["timings"]["predicted_n"] >= 12
    for answer in (first, second):
        timings = answer["timings"]
        assert answer["tokens_evaluated"] == timings["cache_n"] + timings["prompt_n"]
        assert answer["tokens_cached"] == timings["cache_n"]
        assert timings["prompt_ms"] > 0
        assert timings["predicted_per_second"] > 0
        assert not answer["truncated"]
    assert second["tokens_cached"] > first["tokens_cached"]
    assert second["timings"]["prompt_n"] <= 8
    assert ask(server, n_predict=-1)["truncated"]


def test_a_stop_string_is_told(server: RunningServer) -> None:
    text = ask(server)["content"]
    stop = text[len(text) // 2]
    answer = ask(server, stop=["", stop])
    assert answer["content"] == text[: text.index(stop)]
    assert (answer["stop_type"], answer["stopping_word"]) == ("word", stop)


def test_several_completions_are_an_array(server: RunningServer) -> None:
    answers = ask(server, n_cmpl=3, temperature=1, seed=1, top_k=0)
    assert [answer["index"] for answer in answers] == [0, 1, 2]
    assert len({answer["content"] for answer in answers}) > 1
    assert len(ask(server, n=2)) == 2
    several = ask(server, "/completion", prompt=["a", [1, 2]], n_cmpl=2, n_predict=2)
    assert [answer["index"] for answer in several] == [0, 1, 2, 3]


@pytest.mark.parametrize("path", ["/infill", "/completion"])
def test_streamed_and_whole_answers_are_the_same(server: RunningServer, path: str) -> None:
    fields = {} if path == "/infill" else {"prompt": "def f(", "n_predict": 9, "temperature": 0}
    whole = ask(server, path, **fields, return_tokens=True)
    *pieces, last = stream(server, path, **fields)
    assert "".join(piece["content"] for piece in pieces) == whole["content"]
    assert not any(piece["stop"] for piece in pieces)
    assert last["stop"] is True
    assert last["content"] == ""
    assert last["tokens_predicted"] == whole["tokens_predicted"] == len(whole["tokens"])
    assert last["has_new_line"] == whole["has_new_line"] == ("\n" in whole["content"])
    assert last["stop_type"] == whole["stop_type"]


def test_completion_parses_special_tokens_and_takes_ids(server: RunningServer) -> None:
    text = "<fim_prefix>a = <fim_suffix>\n<fim_middle>"
    (tokens,) = ask(server, "/tokenize", content=text).values()
    fields = {"n_predict": 6, "temperature": 0, "ignore_eos": True}
    for path in ("/completion", "/completions"):
        assert ask(server, path, prompt=text, **fields)["tokens_evaluated"] <= len(tokens)
        assert ask(server, path, prompt=tokens, **fields)["tokens_evaluated"] == len(tokens)


def test_probabilities_of_tokens(server: RunningServer) -> None:
    answer = ask(server, "/completion", prompt="def f(", n_predict=3, n_probs=2, temperature=0)
    assert len(answer["completion_probabilities"]) == answer["tokens_predicted"]
    for place in answer["completion_probabilities"]:
        assert place["logprob"] == max(one["logprob"] for one in place["top_logprobs"])
        assert bytes(place["bytes"]).decode(errors="replace") == place["token"]
        assert len(place["top_logprobs"]) == 2


def test_a_time_limit_ends_an_answer_at_a_line_break(server: RunningServer) -> None:
    (newline,) = tiny_tokenizer().encode("\n").ids
    body = {"n_predict": 300, "seed": 3, "temperature": 1, "logit_bias": [[newline, 3.5]]}
    free = ask(server, **body)["content"]
    assert free.count("\n") > 20
    limited = ask(server, **body, t_max_predict_ms=1)
    assert limited["stop_type"] == "limit"
    assert free.startswith(limited["content"] + "\n")
    assert limited["content"].count("\n") < free.count("\n")
    tokenizer = tiny_tokenizer()
    breaks = [i for i in range(tokenizer.get_vocab_size()) if "\n" in tokenizer.decode([i])]
    never = {**body, "logit_bias": [[i, False] for i in breaks]}
    assert ask(server, **never, t_max_predict_ms=1)["tokens_predicted"] >= 300


def test_an_indentation_ends_an_answer_before_a_line_with_less(server: RunningServer) -> None:
    (newline,) = tiny_tokenizer().encode("\n").ids
    body = {"seed": 5, "temperature": 1, "logit_bias": {str(newline): 3.5}}
    lines = ask(server, **body, n_predict=60)["content"].split("\n")
    kept = 1
    while kept < len(lines) and (not lines[kept].strip() or lines[kept].startswith("  ")):
        kept += 1
    assert kept < len(lines)
    ended = ask(server, **body, n_predict=60, n_indent=2)["content"]
    assert ended.rstrip() == "\n".join(lines[:kept]).rstrip()


@as_tenant(0)
def test_predicting_nothing_answers_at_once_and_warms_the_cache(own_server: RunningServer) -> None:
    server = own_server
    extra = [{"text": f"warm = {number}\n" * 6, "filename": "w.py"} for number in range(3)]
    server.wait_until_settled()
    before = server.metric("background_tokens_total")
    empty = {"input_prefix": "", "prompt": "", "input_suffix": "", "n_predict": 0}
    answer = ask(server, **empty, input_extra=extra, samplers=[], t_max_predict_ms=1)
    assert (answer["content"], answer["tokens_predicted"]) == ("", 0)
    server.wait_for(lambda: server.metric("background_tokens_total") > before + 100)
    server.wait_for(lambda: server.metric("num_requests_background") == 0)
    later = ask(server, input_extra=extra)
    assert later["tokens_cached"] > 100
    assert later["timings"]["prompt_n"] < 40


@as_tenant(1)
def test_announced_snippets_are_computed_with_the_document(own_server: RunningServer) -> None:
    server = own_server
    extra = [{"text": f"soon = {number}\n" * 4, "filename": "s.py"} for number in range(3)]
    ask(server, input_extra=extra[:2], prompt="soon")
    server.wait_until_settled()
    before = server.metric("background_tokens_total")
    empty = {"input_prefix": "", "prompt": "", "input_suffix": "", "n_predict": 0}
    ask(server, **empty, input_extra=extra, response_fields=[""])
    server.wait_for(lambda: server.metric("background_tokens_total") > before)
    server.wait_for(lambda: server.metric("num_requests_background") == 0)
    typed = ask(server, input_extra=extra, prompt="soon_")
    assert typed["timings"]["prompt_n"] <= 4


@as_tenant(2)
def test_the_oldest_snippets_are_dropped_when_they_do_not_fit(own_server: RunningServer) -> None:
    server = own_server
    extra = [{"text": f"n{number} = {number}\n" * 8, "filename": "n.py"} for number in range(40)]
    answer = ask(server, input_extra=extra)
    assert 120 < answer["tokens_evaluated"] < 512 * 0.75
    grown = ask(server, input_extra=extra[10:])
    assert grown["timings"]["prompt_n"] <= 8


@as_tenant(3)
def test_typing_with_snippets_computes_what_was_typed(own_server: RunningServer) -> None:
    server = own_server
    extra = [{"text": f"t{number} = {number}\n" * 3, "filename": "t.py"} for number in range(4)]
    for typed in ("v", "va", "val"):
        answer = ask(server, input_extra=extra, prompt=f"{LINE}\n{typed}")
    assert answer["timings"]["prompt_n"] <= 8


def test_settings_come_from_samplers_and_llama_cpps_defaults() -> None:
    def filters(**fields: Any) -> tuple[float, int, float, float]:
        found = SamplingParams(**LlamaCppFields(**fields)._filters())
        return found.temperature, found.top_k, found.top_p, found.min_p

    assert filters() == (0.8, 40, 0.95, 0.05)
    assert filters(samplers=[]) == filters(samplers="") == (1.0, 0, 1.0, 0.0)
    assert filters(samplers=["top_k", "temperature"], temperature=-1) == (0.0, 40, 1.0, 0.0)
    assert filters(samplers="kt", top_k=-1, temperature=0.3) == (0.3, 0, 1.0, 0.0)
    plugin = {"samplers": ["top_k", "top_p", "infill"], "top_k": 40, "top_p": 0.9}
    assert filters(**plugin) == (0.0, 40, 0.9, 0.2)
    assert filters(**plugin, n_cmpl=3) == (1.0, 40, 0.9, 0.2)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/infill", {"input_prefix": "a"}, "input_suffix is missing"),
        ("/infill", {**INFILL, "n_predict": "x"}, "n_predict: expected int or null, got str"),
        ("/infill", {**INFILL, "n_cmpl": 1000}, "n_cmpl must be from 1 to 128, not 1000"),
        ("/infill", {**INFILL, "n_indent": -1}, "n_indent must be at least 0"),
        ("/infill", {**INFILL, "input_extra": [{}]}, "input_extra[0].text is missing"),
        ("/infill", {**INFILL, "top_p": 0}, "top_p must be above 0 and at most 1, not 0.0"),
        ("/infill", {**INFILL, "t_max_predict_ms": -1}, "t_max_predict_ms must be at least 0"),
        (
            "/infill",
            {**INFILL, "input_suffix": "x" * 4_000_001},
            "input_suffix has 4000001 characters; at most 4000000 are accepted",
        ),
        ("/infill", {**INFILL, "grammar": "root ::= x"}, "grammar is not supported"),
        ("/infill", {**INFILL, "json_schema": {}}, "json_schema is not supported"),
        (
            "/completion",
            {"prompt": "a", "logit_bias": {"9" * 5000: 1}},
            "logit_bias must be of token ids from 0 to 319, not {999999999999999999: 1.0}",
        ),
        (
            "/completion",
            {"prompt": "a", "logit_bias": {"a" * 5000: 1, "b" * 5000: 1}},
            "logit_bias names texts of 10000 characters; at most 8192 are accepted",
        ),
        (
            "/completion",
            {"prompt": "a", "logit_bias": [["a", 1]] * 1025},
            "logit_bias must be of at most 1024 entries, not 1025",
        ),
        (
            "/completion",
            {"prompt": "a", "samplers": "k" * 65},
            "samplers must be at most 64 names, not 65",
        ),
        ("/completion", {"prompt": ""}, "prompt is empty"),
        ("/completion", {"prompt": ["a", 1]}, "prompt mixes texts and token ids"),
        ("/detokenize", {"tokens": [320]}, "tokens holds 320; this model's ids go from 0 to 319"),
        ("/tokenize", {}, "content is missing"),
        (
            "/tokenize",
            {"content": "é" * (1 << 20)},
            "content has 2097152 bytes; at most 1048576 are accepted",
        ),
    ],
)
def test_errors_have_llama_cpps_shape(
    server: RunningServer, path: str, body: object, message: str
) -> None:
    response = server.post(path, body)
    assert response.status_code == 400
    error = {"code": 400, "message": message, "type": "invalid_request_error"}
    assert response.json() == {"error": error}


def test_other_errors_have_its_shape_too(server: RunningServer) -> None:
    assert server.get("/infill").json()["error"]["code"] == 405
    full = server.post("/completion", {"prompt": "ab" * 1000})
    assert full.status_code == 400
    assert full.json()["error"]["type"] == "exceed_context_size_error"


def test_bodies_may_come_as_curl_sends_them_but_not_from_web_pages(server: RunningServer) -> None:
    headers = {"content-type": "application/x-www-form-urlencoded"}
    body = json.dumps({"prompt": "a", "n_predict": 1})
    answer = server.post("/completion", content=body, headers=headers)
    assert answer.status_code == 200
    page = server.post(
        "/completion", content=body, headers={**headers, "origin": "https://example.org"}
    )
    assert page.status_code == 415


def test_the_model_is_described(server: RunningServer) -> None:
    props = server.get("/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 512
    assert props["model_alias"] == "tiny-llama"
    assert "assistant" in props["chat_template"]
    slots = server.get("/slots").json()
    assert len(slots) == props["total_slots"]
    assert slots[0]["n_ctx"] == 512
    assert server.get("/health").json() == {"status": "ok"}


def test_text_becomes_tokens_and_text_again(server: RunningServer) -> None:
    text = "naïve 🎈 <fim_middle>"
    for special in (True, False):
        tokens = ask(server, "/tokenize", content=text, parse_special=special)["tokens"]
        assert ask(server, "/detokenize", tokens=tokens) == {"content": text}
    pieces = ask(server, "/tokenize", content=text, with_pieces=True)["tokens"]
    raw = b"".join(
        bytes(one["piece"]) if isinstance(one["piece"], list) else one["piece"].encode()
        for one in pieces
    )
    assert raw.decode() == text


def test_context_files_are_those_of_the_other_dialect(server: RunningServer) -> None:
    extra = [{"text": "same = 1\n" * 9, "filename": "same.py"}]
    ours = ask(server, input_extra=extra)
    openai = server.complete(
        prompt=PREFIX + LINE,
        suffix=SUFFIX,
        max_tokens=12,
        temperature=0,
        ignore_eos=True,
        input_extra=extra,
    )
    assert openai["choices"][0]["text"] == ours["content"]
