"""Log probabilities of prompts, as evaluation harnesses ask for them, and the best of several."""

import json
from typing import Any, ClassVar

import pytest
from running_server import RunningServer
from tiny_checkpoints import tiny_tokenizer

PROMPT = "def f(tokenizer):\n    return tokenizer.encode("
TOKENS = tiny_tokenizer().encode(PROMPT).ids


def logprobs_of(server: RunningServer, **body: object) -> dict[str, Any]:
    (choice,) = server.complete(**body)["choices"]
    return {**choice["logprobs"], "text": choice["text"]}


class TestScoring:
    def test_a_prompt_is_scored_as_its_tokens_would_have_been_when_generated(
        self, server: RunningServer
    ) -> None:
        # Letters that no merge joins, so that the answer's text has the answer's tokens.
        letters = {str(tiny_tokenizer().token_to_id(letter)): 100 for letter in "jqz"}
        body = {"prompt": TOKENS, "max_tokens": 8, "temperature": 0, "logit_bias": letters}
        written = logprobs_of(server, **body, logprobs=3)
        whole = logprobs_of(server, **body, logprobs=3, echo=True)
        assert whole["text"] == PROMPT + written["text"]
        assert whole["token_logprobs"][-8:] == written["token_logprobs"]
        ids = tiny_tokenizer().encode(whole["text"]).ids
        assert len(ids) == len(TOKENS) + 8
        scored = logprobs_of(server, prompt=ids, max_tokens=0, logprobs=3, echo=True)
        assert scored["text"] == whole["text"]
        for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert scored[field] == whole[field]

    def test_every_token_has_its_place_and_all_but_the_first_a_score(
        self, server: RunningServer
    ) -> None:
        scored = logprobs_of(server, prompt=PROMPT, max_tokens=0, logprobs=2, echo=True)
        assert "".join(scored["tokens"]) == scored["text"] == PROMPT
        for token, offset in zip(scored["tokens"], scored["text_offset"], strict=True):
            assert PROMPT.startswith(token, offset)
        assert scored["token_logprobs"][0] is scored["top_logprobs"][0] is None
        assert all(value <= 0 for value in scored["token_logprobs"][1:])
        for token, value, top in list(
            zip(scored["tokens"], scored["token_logprobs"], scored["top_logprobs"], strict=True)
        )[1:]:
            assert top[token] == value
            assert 2 <= len(top) <= 3

    def test_the_cache_changes_nothing(self, server: RunningServer) -> None:
        body = {"prompt": "x = [1, 2, 3]\ny = x", "max_tokens": 0, "logprobs": 1, "echo": True}
        cold = logprobs_of(server, **body)
        server.complete(prompt=body["prompt"], max_tokens=1)
        assert logprobs_of(server, **body) == cold

    def test_as_an_evaluation_harness_asks(self, server: RunningServer) -> None:
        """Lists of token ids with one token to generate, whose continuation is scored."""
        cases = [("a = ", "llama"), ("for i in ", "range(3)"), ("import ", "tokenizer")]
        encode = tiny_tokenizer().encode
        contexts = [encode(context).ids for context, _ in cases]
        prompts = [encode(context).ids + encode(answer).ids for context, answer in cases]
        choices = server.complete(
            prompt=prompts, max_tokens=1, logprobs=1, echo=True, seed=1234, temperature=0
        )["choices"]
        for choice, context, prompt in zip(choices, contexts, prompts, strict=True):
            logprobs = choice["logprobs"]["token_logprobs"][len(context) : -1]
            assert len(logprobs) == len(prompt) - len(context)
            alone = logprobs_of(server, prompt=prompt, max_tokens=0, logprobs=1, echo=True)
            assert sum(logprobs) == sum(alone["token_logprobs"][len(context) :])
            top = choice["logprobs"]["top_logprobs"][len(context) : -1]
            assert all(max(one.values()) >= value for one, value in zip(top, logprobs, strict=True))

    def test_nothing_is_generated_without_tokens_to_generate(self, server: RunningServer) -> None:
        answer = server.complete(prompt=PROMPT, max_tokens=0, echo=True)
        (choice,) = answer["choices"]
        assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
        assert choice["logprobs"] is None
        assert answer["usage"]["completion_tokens"] == 0
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0

    def test_streamed_the_prompt_comes_with_the_first_chunk(self, server: RunningServer) -> None:
        body = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        body |= {"logprobs": 1, "echo": True}
        whole = logprobs_of(server, **body)
        with server.client.stream(
            "POST", f"{server.url}/v1/completions", json={**body, "stream": True}
        ) as response:
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
        choices = [json.loads(line)["choices"][0] for line in lines]
        assert "".join(choice["text"] for choice in choices) == whole["text"]
        assert choices[0]["text"].startswith(PROMPT)
        for field in ("tokens", "token_logprobs", "text_offset"):
            joined = [one for choice in choices for one in choice["logprobs"][field]]
            assert joined == whole[field]

    def test_a_template_is_scored_if_it_is_sent_as_it_is(self, server: RunningServer) -> None:
        prompt = "<fim_prefix>a<fim_suffix>b<fim_middle>"
        scored = logprobs_of(
            server,
            prompt=prompt,
            max_tokens=0,
            logprobs=0,
            echo=True,
            midfill={"layout": "verbatim"},
        )
        assert scored["tokens"] == ["<fim_prefix>", "a", "<fim_suffix>", "b", "<fim_middle>"]
        assert scored["text_offset"] == [0, 12, 13, 25, 26]


class TestBestOf:
    BODY: ClassVar = {
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 1.5,
        "seed": 11,
        "ignore_eos": True,
    }

    def test_the_most_likely_answers_are_returned_best_first(self, server: RunningServer) -> None:
        every = server.complete(**self.BODY, n=6, logprobs=0)["choices"]

        def mean(choice: dict[str, Any]) -> float:
            logprobs = choice["logprobs"]["token_logprobs"]
            return sum(logprobs) / len(logprobs)

        expected = sorted(every, key=mean, reverse=True)[:2]
        for fields in ({}, {"logprobs": 0}):
            answer = server.complete(**self.BODY, n=2, best_of=6, **fields)
            texts = [choice["text"] for choice in answer["choices"]]
            assert texts == [choice["text"] for choice in expected]
            assert [choice["index"] for choice in answer["choices"]] == [0, 1]
            assert answer["usage"]["completion_tokens"] == 6 * 12
            logprobs = [choice["logprobs"] for choice in answer["choices"]]
            assert logprobs == [one["logprobs"] if fields else None for one in expected]

    def test_of_several_prompts_each_has_its_own(self, server: RunningServer) -> None:
        prompts = [PROMPT, "import "]
        both = server.complete(**self.BODY | {"prompt": prompts}, best_of=4)["choices"]
        single = [
            server.complete(**self.BODY | {"prompt": prompt}, best_of=4)["choices"][0]["text"]
            for prompt in prompts
        ]
        assert [choice["text"] for choice in both] == single
        assert [choice["index"] for choice in both] == [0, 1]

    def test_as_many_as_are_returned_stay_in_order(self, server: RunningServer) -> None:
        plain = server.complete(**self.BODY, n=3, logprobs=0)["choices"]
        same = server.complete(**self.BODY, n=3, best_of=3, logprobs=0)["choices"]
        assert same == plain


class TestDefaultLength:
    BODY: ClassVar = {"temperature": 1.5, "seed": 3, "ignore_eos": True}

    @pytest.mark.parametrize(
        "fields",
        [
            {"prompt": "x = ", "suffix": "\n"},
            {"prompt": "<PRE> x =  <SUF>\n <MID>"},
        ],
    )
    def test_infilling_is_not_cut_short(self, server: RunningServer, fields: dict) -> None:
        answer = server.complete(**fields, **self.BODY)
        assert 96 <= answer["usage"]["completion_tokens"] <= 128
        assert answer["choices"][0]["finish_reason"] == "length"
        limited = server.complete(**fields, **self.BODY, max_tokens=5)
        assert limited["usage"]["completion_tokens"] == 5

    def test_it_ends_with_a_line_if_there_is_one(self, server: RunningServer) -> None:
        line_break = tiny_tokenizer().encode("\n").ids[0]
        body = {"prompt": "x = ", "suffix": "#", **self.BODY, "logit_bias": {str(line_break): 4}}
        answer = server.complete(**body)
        assert answer["usage"]["completion_tokens"] < 128
        longer = server.complete(**body, max_tokens=128)["choices"][0]["text"]
        text = answer["choices"][0]["text"]
        assert longer.startswith(f"{text}\n")

    def test_a_raw_prompt_has_openais_default(self, server: RunningServer) -> None:
        answer = server.complete(prompt="x = ", **self.BODY)
        assert answer["usage"]["completion_tokens"] == 16
