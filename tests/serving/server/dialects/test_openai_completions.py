"""/v1/completions through a real socket, with OpenAI's own client."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from running_server import RunningServer
from tiny_checkpoints import tiny_tokenizer

PREFIX, SUFFIX = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 12, "extra_body": {"ignore_eos": True}}


def test_a_completion(server: RunningServer) -> None:
    answer = server.openai().completions.create(model="tiny-llama", prompt="def f(", **GREEDY)
    assert answer.object == "text_completion"
    assert answer.model == "tiny-llama"
    (choice,) = answer.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_stream_has_the_same_text(server: RunningServer) -> None:
    client = server.openai()
    whole = client.completions.create(model="tiny-llama", prompt="class A", **GREEDY)
    stream = client.completions.create(
        model="tiny-llama",
        prompt="class A",
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_without_usage_has_none(server: RunningServer) -> None:
    stream = server.openai().completions.create(
        model="tiny-llama", prompt="a", stream=True, **GREEDY
    )
    assert all(chunk.choices and chunk.usage is None for chunk in stream)


def test_infilling_later_rounds_compute_the_increment_only(server: RunningServer) -> None:
    client = server.openai()
    prefix = "".join(f"x{line} = 1\n" for line in range(40))
    suffix = "y = 2\n" * 10
    first = client.completions.create(model="tiny-llama", prompt=prefix, suffix=suffix, **GREEDY)
    typed = prefix + "z = 3"
    later = client.completions.create(model="tiny-llama", prompt=typed, suffix=suffix, **GREEDY)
    # So short a prefix stands after the suffix as a whole.
    assert later.midfill["layout"] == first.midfill["layout"] == "spm"
    assert later.midfill["cut"] == first.midfill["cut"] == 0
    assert later.midfill["document"] == first.midfill["document"]
    assert later.midfill["sentinels"] is True
    assert later.usage is not None
    assert first.usage is not None
    cached = later.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 1
    assert later.midfill["computed_tokens"] == later.usage.prompt_tokens - cached <= 6


@pytest.mark.parametrize("layout", ["psm", "spm"])
def test_a_layout_can_be_chosen(server: RunningServer, layout: str) -> None:
    answer = server.complete(
        prompt=PREFIX, suffix=SUFFIX, midfill={"layout": layout, "document": "a.py"}
    )
    assert answer["midfill"]["layout"] == layout


def test_the_answer_does_not_depend_on_the_cache(server: RunningServer) -> None:
    body = {"prompt": PREFIX, "suffix": SUFFIX, "temperature": 0, "ignore_eos": True}
    texts = {server.complete(**body, max_tokens=20)["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 1


def test_sentinels_are_parsed_in_a_raw_prompt_but_not_in_a_document(server: RunningServer) -> None:
    raw = server.complete(prompt="<fim_prefix>a<fim_suffix>b<fim_middle>", max_tokens=1)
    assert raw["midfill"]["layout"] != "verbatim"
    infill = server.complete(prompt="a", suffix="b", max_tokens=1)
    spelled = server.complete(prompt="<fim_prefix>", suffix="b", max_tokens=1)
    assert raw["usage"]["prompt_tokens"] == infill["usage"]["prompt_tokens"] == 4
    assert spelled["usage"]["prompt_tokens"] > 8


def test_several_prompts_and_answers(server: RunningServer) -> None:
    client = server.openai()
    prompts = ["def f(", "class A", "import "]
    single = [
        client.completions.create(model="tiny-llama", prompt=p, **GREEDY).choices[0].text
        for p in prompts
    ]
    answer = client.completions.create(model="tiny-llama", prompt=prompts, n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [t for t in single for _ in range(2)]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6 * 12
    chunks = client.completions.create(
        model="tiny-llama", prompt=prompts, n=2, stream=True, **GREEDY
    )
    texts = [""] * 6
    for chunk in chunks:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [t for t in single for _ in range(2)]


def test_token_ids_as_prompt(server: RunningServer) -> None:
    one = server.complete(prompt=[5, 6, 7], max_tokens=4, temperature=0)
    two = server.complete(prompt=[[5, 6, 7], [8]], max_tokens=4, temperature=0)
    assert one["usage"]["prompt_tokens"] == 3
    assert two["choices"][0]["text"] == one["choices"][0]["text"]
    assert two["usage"]["prompt_tokens"] == 4


def test_seeded_samples_are_reproducible_and_differ_between_answers(server: RunningServer) -> None:
    body = {"prompt": "a", "temperature": 1.5, "seed": 7, "n": 3, "max_tokens": 10}
    first, second = (
        [choice["text"] for choice in server.complete(**body)["choices"]] for _ in range(2)
    )
    assert first == second
    assert len(set(first)) == 3


def test_echo(server: RunningServer) -> None:
    plain = server.complete(prompt="def f(", max_tokens=3, temperature=0)
    echoed = server.complete(prompt="def f(", max_tokens=3, temperature=0, echo=True)
    assert echoed["choices"][0]["text"] == "def f(" + plain["choices"][0]["text"]


def test_a_stop_string_is_not_shown(server: RunningServer) -> None:
    whole = server.complete(prompt="def f(", max_tokens=30, temperature=0, ignore_eos=True)
    text = whole["choices"][0]["text"]
    stop = text[10:13]
    body = {"prompt": "def f(", "max_tokens": 30, "temperature": 0, "ignore_eos": True}
    stopped = server.complete(**body, stop=["not in it", stop])["choices"][0]
    assert stopped["text"] == text[: text.index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    kept = server.complete(**body, stop=stop, include_stop_str_in_output=True)["choices"][0]
    assert kept["text"] == stopped["text"] + stop
    server.wait_for(lambda: server.metric("num_requests_running") == 0)


def test_a_stop_string_ends_one_of_several_answers_in_the_engine(
    server: RunningServer, slow_server: RunningServer
) -> None:
    body = {"prompt": "def f(", "n": 3, "temperature": 1.5, "seed": 4, "max_tokens": 400}
    body["ignore_eos"] = True
    whole = server.complete(**body, timeout=60)["choices"]
    stop = whole[1]["text"][5:8]
    before = slow_server.metric("generation_tokens_total")
    answers = slow_server.complete(**body, stop=stop)
    for stopped, free in zip(answers["choices"], whole, strict=True):
        assert stopped["text"] == free["text"].partition(stop)[0]
    slow_server.wait_for(slow_server.is_idle)
    assert slow_server.metric("generation_tokens_total") - before < 1100


def test_speculation_is_counted(server: RunningServer) -> None:
    counts = [
        server.metric(f"spec_decode_num_{what}_total")
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    server.complete(prompt="a b " * 20, max_tokens=60, logit_bias={"5": 90, "9": 90})
    later = [
        server.metric(f"spec_decode_num_{what}_total")
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    assert all(after >= before >= 0 for before, after in zip(counts, later, strict=True))
    assert later[0] <= later[1]
    assert later[2] <= later[1]


def test_logprobs(server: RunningServer) -> None:
    answer = server.openai().completions.create(
        model="tiny-llama", prompt="def f(", logprobs=2, **GREEDY
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert len(logprobs.token_logprobs) == 12
    assert all(value <= 0 for value in logprobs.token_logprobs)
    for value, top in zip(logprobs.token_logprobs, logprobs.top_logprobs or [], strict=True):
        assert max(top.values()) == pytest.approx(value)  # greedy took the most likely


def test_logit_bias_and_stop_token_ids(server: RunningServer) -> None:
    biased = server.complete(prompt="a", logit_bias={"70": 100}, temperature=0, max_tokens=3)
    logprobs = server.complete(
        prompt="a", logit_bias={"70": 100}, temperature=0, max_tokens=3, stop_token_ids=[70]
    )
    assert biased["usage"]["completion_tokens"] == 3
    assert logprobs["choices"][0]["text"] == ""
    assert logprobs["choices"][0]["stop_reason"] == 70


def test_an_end_token_named_as_a_stop_is_an_ordinary_end(server: RunningServer) -> None:
    end = tiny_tokenizer().token_to_id("<|endoftext|>")
    body = {"prompt": "a", "stop": ["<|endoftext|>", "<fim_middle>"], "temperature": 0}
    (choice,) = server.complete(**body, logit_bias={str(end): 100})["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    middle = tiny_tokenizer().token_to_id("<fim_middle>")
    (choice,) = server.complete(**body, logit_bias={str(middle): 100})["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", middle)


@pytest.mark.parametrize(
    ("body", "temperature"),
    [
        ({"prompt": "def f(x):\n    ", "suffix": "\n\nprint(f(1))\n"}, 0.2),
        ({"prompt": "<fim_prefix>def f(x):\n    <fim_suffix>\n\nprint(f(1))\n<fim_middle>"}, 0.2),
        ({"prompt": "def f(x):\n    "}, 1),
    ],
    ids=["a suffix", "a template", "a raw prompt"],
)
def test_the_temperature_that_is_not_given(
    server: RunningServer, body: dict[str, Any], temperature: float
) -> None:
    asked = {**body, "seed": 3, "max_tokens": 24, "ignore_eos": True}
    text = server.complete(**asked)["choices"][0]["text"]
    for other in (0.2, 1):
        same = server.complete(**asked, temperature=other)["choices"][0]["text"] == text
        assert same == (other == temperature)


def test_unknown_fields_and_nulls_are_ignored(server: RunningServer) -> None:
    answer = server.complete(
        prompt="a", max_tokens=1, suffix=None, stop=None, seed=None, best_of=1, surprise={"x": [1]}
    )
    assert answer["usage"]["completion_tokens"] == 1


def test_concurrent_requests_get_the_same_answers_as_alone(server: RunningServer) -> None:
    prompts = [f"def f{i}(x):\n    return x * {i}" for i in range(12)]

    def ask(prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
        return str(server.complete(**body)["choices"][0]["text"])

    alone = [ask(prompt) for prompt in prompts]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, prompts)) == alone


BODY: dict[str, Any] = {
    "prompt": "x = 1\ny =",
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
}


def test_an_answers_tokens_are_named_on_request(server: RunningServer) -> None:
    (choice,) = server.complete(**BODY, return_token_ids=True)["choices"]
    assert len(choice["token_ids"]) == 6
    text = server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["content"]
    assert text == choice["text"]
    (plain,) = server.complete(**BODY)["choices"]
    assert "token_ids" not in plain


def test_the_models_card_names_its_fim_tokens(server: RunningServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["midfill"]["sentinels"] is True
    prefix, suffix, middle = card["midfill"]["fim_tokens"]
    assert len({prefix, suffix, middle}) == 3


DEEPSEEK_BODY = {
    "prompt": "x = 1\nz = toke",
    "suffix": ")\nprint(x)\n",
    "temperature": 0,
    "max_tokens": 12,
}


@pytest.mark.parametrize("base", ["/beta", "/beta/v1"])
def test_completions_with_a_suffix(server: RunningServer, base: str) -> None:
    client = openai.OpenAI(base_url=server.url + base, api_key="none", max_retries=0)
    answer = client.completions.create(model="tiny-llama", **DEEPSEEK_BODY)  # type: ignore[call-overload]
    assert answer.choices[0].text == server.complete(**DEEPSEEK_BODY)["choices"][0]["text"] != ""
    stream = client.completions.create(  # type: ignore[call-overload]
        model="tiny-llama", **DEEPSEEK_BODY, stream=True
    )
    assert "".join(chunk.choices[0].text for chunk in stream) == answer.choices[0].text
    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="deepseek-chat", prompt="a")
