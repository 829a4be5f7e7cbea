"""How answers end: by tokens and lengths, refused, cancelled, or by a failure of the model."""

import numpy as np
import pytest
from toy_engine import engine, prompt, sampling, truth
from toy_runner import VOCAB, ToyRunner

from midfill.errors import InvalidRequestError
from midfill.runners.forward.batch import ForwardBatch
from serving import build_engine, check_idle, request, serve


class TestTheEnd:
    def test_an_end_token_stops_and_is_included(self) -> None:
        tokens = prompt(25)
        end = truth(tokens)[4]
        first = truth(tokens).index(end)
        answer = serve(engine(eos=(end,)), [request("a", tokens, sampling(ignore_eos=False))])
        assert answer["a", 0].tokens == truth(tokens)[: first + 1]
        assert answer["a", 0].finish_reason == "stop"

    def test_ignore_eos_continues(self) -> None:
        tokens = prompt(25)
        answer = serve(engine(eos=tuple(range(VOCAB))), [request("a", tokens)])["a", 0]
        assert (len(answer.tokens), answer.finish_reason) == (12, "length")

    def test_a_stop_token_stops_even_when_end_tokens_are_ignored(self) -> None:
        tokens = prompt(25)
        stop = truth(tokens)[0]
        answer = serve(engine(), [request("a", tokens, sampling(stop_token_ids=(stop,)))])["a", 0]
        assert (answer.tokens, answer.finish_reason) == ([stop], "stop")

    def test_a_single_sequence_can_use_the_whole_pool(self) -> None:
        tokens = prompt(20)
        one = engine(slots=50)
        answer = serve(one, [request("a", tokens, sampling(max_tokens=1000))])["a", 0]
        assert (len(answer.tokens), answer.finish_reason) == (30, "length")
        assert answer.tokens == truth(tokens, 30)
        assert one.stats().preemptions == 0

    def test_the_context_ends_an_answer(self) -> None:
        answer = serve(engine(context=40), [request("a", prompt(20), sampling(max_tokens=1000))])[
            "a", 0
        ]
        assert (len(answer.tokens), answer.finish_reason) == (20, "length")

    def test_two_sequences_that_each_want_the_whole_pool_both_get_it(self) -> None:
        long = sampling(max_tokens=1000)
        one = engine(slots=50)
        answers = serve(one, [request("a", prompt(20), long), request("b", prompt(20, 1), long)])
        assert answers["a", 0].tokens == truth(prompt(20), 30)
        assert answers["b", 0].tokens == truth(prompt(20, 1), 30)


class TestRefusals:
    @pytest.mark.parametrize("length", [50, 51, 300])
    def test_a_prompt_that_can_never_fit(self, length: int) -> None:
        one = engine(slots=50)
        with pytest.raises(InvalidRequestError, match=f"{length} tokens, but at most 50") as error:
            one.add(request("a", prompt(length)))
        assert (error.value.code, error.value.param) == ("context_length_exceeded", "prompt")
        assert not one.has_work()

    def test_the_longest_prompt_that_fits_gets_one_token(self) -> None:
        answer = serve(engine(slots=50), [request("a", prompt(49))])["a", 0]
        assert answer.tokens == truth(prompt(49), 1)

    @pytest.mark.parametrize("tokens", [[], [VOCAB], [-1], [2**40], [2**70]])
    def test_invalid_prompts(self, tokens: list[int]) -> None:
        with pytest.raises(InvalidRequestError) as error:
            engine().add(request("a", tokens))
        assert error.value.param == "prompt"

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("max_tokens", 0),
            ("max_tokens", -5),
            ("n", 0),
            ("n", 10**9),
            ("temperature", float("nan")),
            ("temperature", float("inf")),
            ("temperature", -1.0),
            ("temperature", 101.0),
            ("presence_penalty", 2.5),
            ("repetition_penalty", 1e9),
            ("logit_bias", {0: -101.0}),
            ("top_k", -1),
            ("top_p", 0.0),
            ("top_p", 1.5),
            ("top_p", float("nan")),
            ("min_p", -0.1),
            ("min_p", 1.1),
            ("typical_p", 0.0),
            ("presence_penalty", float("nan")),
            ("frequency_penalty", float("inf")),
            ("repetition_penalty", 0.0),
            ("logprobs", -1),
            ("logprobs", VOCAB + 1),
            ("logit_bias", {VOCAB: 1.0}),
            ("logit_bias", {-1: 1.0}),
            ("logit_bias", {0: float("nan")}),
        ],
    )
    def test_sampling_parameters_out_of_range(self, field: str, value: object) -> None:
        one = engine()
        with pytest.raises(InvalidRequestError, match=field) as error:
            one.add(request("a", [1], sampling(**{field: value})))
        assert error.value.param == field
        assert not one.has_work()

    def test_an_id_in_flight_is_refused_until_it_has_ended(self) -> None:
        one = engine()
        one.add(request("a", [1, 2]))
        with pytest.raises(InvalidRequestError, match="in flight"):
            one.add(request("a", [3]))
        serve(one)
        serve(one, [request("a", [3])])


class TestCancellation:
    def test_it_frees_everything_at_once(self) -> None:
        one = engine(token_budget=16)
        one.add(request("a", prompt(100)))
        one.add(request("b", prompt(50, 1)))
        one.step()
        one.cancel("a")
        one.cancel("b")
        check_idle(one)
        assert one.has_work()  # the outputs are still to be returned
        assert [(output.request_id, output.finish_reason) for output in one.step()] == [
            ("a", "cancelled"),
            ("b", "cancelled"),
        ]
        assert not one.has_work()

    def test_every_unfinished_answer_gets_an_output(self) -> None:
        one = engine()
        one.add(request("waiting", prompt(5), sampling(n=2)))
        one.cancel("waiting")
        one.add(request("running", prompt(5), sampling(n=3)))
        one.step()
        one.step()
        one.cancel("running")
        ended = [(output.request_id, output.index) for output in one.step()]
        assert ended == [("running", 0), ("running", 1), ("running", 2)]

    @pytest.mark.parametrize("index", [0, 1, 2])
    @pytest.mark.parametrize("step", range(5))
    def test_one_answer_of_several(self, step: int, index: int) -> None:
        tokens = prompt(30)
        one = engine(token_budget=12)  # three steps of prompt
        answers = serve(
            one, [request("a", tokens, sampling(n=3))], cancellations={step: ("a", index)}
        )
        reasons = {answer: answers["a", answer].finish_reason for answer in range(3)}
        assert reasons == {0: "length", 1: "length", 2: "length"} | {index: "cancelled"}
        for answer in range(3):
            got = answers["a", answer].tokens
            assert got == truth(tokens)[: max(step - 2, 0) if answer == index else 12]

    def test_all_answers_one_by_one(self) -> None:
        one = engine()
        one.add(request("a", prompt(5), sampling(n=3)))
        for index in (1, 1, 0, 2, 7):
            one.cancel("a", index)
        assert [output.index for output in one.step()] == [1, 0, 2]
        check_idle(one)
        assert not one.has_work()

    def test_an_unknown_id_is_ignored(self) -> None:
        one = engine()
        one.cancel("nobody")
        one.cancel("nobody", 3)
        assert not one.has_work()


class FailingRunner(ToyRunner):
    """Raises, or returns NaN for one output row, in chosen steps."""

    def __init__(self, slots: int) -> None:
        super().__init__(slots)
        self.raises_at: frozenset[int] = frozenset()
        self.spoils: dict[int, int] = {}

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        step = len(self.batches)
        logits = super().forward(batch)
        if step in self.raises_at:
            raise RuntimeError("out of memory")
        if step in self.spoils:
            logits[self.spoils[step]] = np.nan
        return logits


class TestFailures:
    def test_a_runner_that_raises_fails_only_the_requests_in_the_pass(self) -> None:
        runner = FailingRunner(512)
        runner.raises_at = frozenset({3})
        one = build_engine(runner, (), max_running=2)
        requests = [request(name, prompt(20, seed)) for seed, name in enumerate("abcd")]
        answers = serve(one, requests)
        for name in "ab":
            assert answers[name, 0].finish_reason == "error"
            assert answers[name, 0].error == "the model failed: out of memory"
        for seed, name in ((2, "c"), (3, "d")):
            assert answers[name, 0].tokens == truth(prompt(20, seed))
        again = serve(one, [request("a", prompt(20, 0))])
        assert again["a", 0].tokens == truth(prompt(20, 0))

    def test_chunks_computed_before_the_failure_stay_cached(self) -> None:
        runner = FailingRunner(512)
        runner.raises_at = frozenset({2})
        one = build_engine(runner, (), token_budget=16)
        assert serve(one, [request("a", prompt(60))])["a", 0].finish_reason == "error"
        again = serve(one, [request("a", prompt(60))])["a", 0]
        assert again.cached_tokens == 32
        assert again.tokens == truth(prompt(60))

    def test_every_answer_of_a_failed_prompt_gets_the_error(self) -> None:
        runner = FailingRunner(512)
        runner.raises_at = frozenset({0})
        answers = serve(build_engine(runner, ()), [request("a", prompt(9), sampling(n=3))])
        assert [answers["a", index].finish_reason for index in range(3)] == ["error"] * 3

    def test_logits_without_a_finite_value_fail_that_answer_alone(self) -> None:
        runner = FailingRunner(512)
        runner.spoils = {0: 0, 2: 0}
        one = build_engine(runner, ())
        answers = serve(
            one,
            [
                request("a", prompt(9), sampling(n=2)),
                request("b", prompt(9, 1)),
                request("c", prompt(9, 2)),
            ],
        )
        assert answers["a", 0].error == answers["a", 1].error
        assert answers["a", 0].error == "the model's logits hold no finite value"
        assert answers["b", 0].finish_reason == "error"
        assert answers["b", 0].tokens == truth(prompt(9, 1))[:2]
        assert answers["c", 0].tokens == truth(prompt(9, 2))
        # Nothing of the failed prompt stayed in the cache.
        assert serve(one, [request("a", prompt(9))])["a", 0].cached_tokens == 0
