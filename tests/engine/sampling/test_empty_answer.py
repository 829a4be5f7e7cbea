"""empty_threshold: an answer is empty where the model gives that enough probability, else not."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import prompt, sampling
from toy_runner import VOCAB, ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest
from midfill.errors import InvalidRequestError
from midfill.methods.rows.lazyllm import LazyLLM
from midfill.runners.forward.logits import log_softmax
from serving import Answer, FixedCost, build_engine, greedy_alone, next_logits, serve

END, OTHER_END = 0, 1  # they stand for no text
LETTERS = [bytes([letter]) for letter in b"abcd"]
LONGER = [b"ab", b"abc", b"bc", b"cd", b"da", b"aa", b"abca"]
TOKENS = [b"", b"", *LETTERS, *LONGER]
TOKENS += [bytes([100 + token]) for token in range(len(TOKENS), VOCAB)]
ENDS = frozenset({END, OTHER_END})
BEGINNINGS = [b"", b"a", b"ab", b"abca"]


def engine(slots: int = 512, **options: object) -> Engine:
    return build_engine(
        ToyRunner(slots), (END, OTHER_END), token_bytes=TOKENS.__getitem__, **options
    )


def asking(
    name: str,
    tokens: list[int],
    threshold: float,
    begins_with: bytes = b"",
    **fields: object,
) -> EngineRequest:
    params = sampling(**({"ignore_eos": False} | fields))
    return EngineRequest(
        request_id=name,
        token_ids=tokens,
        sampling=params,
        begins_with=begins_with,
        empty_threshold=threshold,
    )


def probabilities(tokens: list[int], bias: dict[int, float]) -> np.ndarray:
    logits = next_logits(ToyRunner(256), tokens).astype(np.float64)
    for token, value in bias.items():
        logits[token] += value
    powers = np.exp(logits - logits.max())
    return powers / powers.sum()


def possible(required: bytes) -> list[int]:
    """Tokens that an answer may continue with; every letter is a token, so all can be spelled."""
    if not required:
        return list(range(VOCAB))
    return [
        token
        for token, piece in enumerate(TOKENS)
        if piece and (piece.startswith(required) or required.startswith(piece))
    ]


def empty_answer(
    tokens: list[int], required: bytes, bias: dict[int, float]
) -> tuple[list[int], float]:
    """Return the most likely exact spelling and end, and the probability of any end there."""
    answer, probability = list[int](), 1.0
    while required:
        found = probabilities(tokens + answer, bias)
        allowed = possible(required)
        exact = [token for token in allowed if len(TOKENS[token]) <= len(required)]
        best = max(exact, key=lambda token: found[token])
        probability *= found[best] / found[allowed].sum()
        answer.append(best)
        required = required[len(TOKENS[best]) :]
    found = probabilities(tokens + answer, bias)
    ends = sorted(ENDS)
    answer.append(max(ends, key=lambda token: found[token]))
    return answer, probability * found[ends].sum()


def truth(
    tokens: list[int], threshold: float, required: bytes, bias: dict[int, float], count: int = 12
) -> list[int]:
    """The greedy answer by brute force."""
    empty, probability = empty_answer(tokens, required, bias)
    if probability > threshold:
        return empty
    answer, written, least = list[int](), b"", len(required)
    while len(answer) < count:
        found = probabilities(tokens + answer, bias)
        ids = possible(required)
        if not required and len(written) == least:
            ids = [token for token in ids if token not in ENDS]
        answer.append(max(ids, key=lambda token: found[token]))
        written += TOKENS[answer[-1]]
        required = required[len(TOKENS[answer[-1]]) :]
        if answer[-1] in ENDS:
            break
    return answer


def answers_by_name(one: Engine, requests: list[EngineRequest]) -> dict[str, list[int]]:
    return {name: answer.tokens for (name, _), answer in serve(one, requests).items()}


def threshold_around(probability: float, above: bool) -> float:
    return min(1.0, probability * (1.01 if above else 0.99))


class TestTheDecision:
    @pytest.mark.parametrize("required", BEGINNINGS)
    @pytest.mark.parametrize("above", [False, True])
    @pytest.mark.parametrize("drafts", [False, True])
    def test_it_depends_on_the_probability_of_the_empty_answer(
        self, required: bytes, above: bool, drafts: bool
    ) -> None:
        tokens, bias = prompt(30), {END: 2.0, OTHER_END: 1.5}
        expected, probability = empty_answer(tokens, required, bias)
        threshold = threshold_around(probability, above)
        one = engine(step_cost=FixedCost() if drafts else None)
        request = asking("r", tokens, threshold, required, logit_bias=bias)
        answer = serve(one, [request])["r", 0]
        assert answer.tokens == truth(tokens, threshold, required, bias)
        assert (answer.tokens == expected) is not above

    @pytest.mark.parametrize("required", BEGINNINGS)
    def test_an_answer_is_never_empty_at_the_threshold_1(self, required: bytes) -> None:
        # The end token is by far the most likely, also after each of the first tokens.
        bias = {END: 60.0}
        request = asking("r", prompt(30), 1.0, required, logit_bias=bias)
        tokens = serve(engine(), [request])["r", 0].tokens
        assert len(b"".join(TOKENS[token] for token in tokens)) > len(required)
        assert tokens[-1] == END

    def test_the_threshold_0_is_off(self) -> None:
        tokens, bias = prompt(30), {END: 60.0}
        request = asking("r", tokens, 0.0, logit_bias=bias)
        assert serve(engine(), [request])["r", 0].tokens == [END]
        request = asking("r", tokens, 0.0)
        assert serve(engine(), [request])["r", 0].tokens[0] == int(
            probabilities(tokens, {}).argmax()
        )

    def test_its_probability_is_reported(self) -> None:
        tokens, bias = prompt(30), {END: 3.0}
        _, probability = empty_answer(tokens, b"ab", bias)
        one = engine()
        one.add(asking("r", tokens, probability / 2, b"ab", logit_bias=bias))
        outputs = []
        while one.has_work():
            outputs += one.step()
        assert [output.empty_probability for output in outputs] == [
            pytest.approx(probability, rel=1e-4)
        ]
        (output, *_) = serve_outputs(asking("r", tokens, 0.0, b"ab"))
        assert output.empty_probability is None

    def test_nothing_is_decided_where_no_token_ends_the_answer(self) -> None:
        request = asking("r", prompt(30), 0.5, ignore_eos=True, max_tokens=4)
        answer = serve(engine(), [request])["r", 0]
        assert (len(answer.tokens), answer.finish_reason) == (4, "length")

    def test_nothing_is_decided_where_there_is_no_room_to_spell_the_beginning(self) -> None:
        request = asking("r", prompt(30), 1e-9, b"abca", max_tokens=3)
        answer = serve(engine(), [request])["r", 0]
        assert answer.finish_reason == "length"
        assert len(answer.tokens) <= 3

    @pytest.mark.parametrize("threshold", [-0.1, 1.5, float("nan")])
    def test_thresholds_are_probabilities(self, threshold: float) -> None:
        with pytest.raises(InvalidRequestError, match="empty_threshold"):
            engine().add(asking("r", [1], threshold))


def serve_outputs(request: EngineRequest) -> list:
    one = engine()
    one.add(request)
    outputs = []
    while one.has_work():
        outputs += one.step()
    return outputs


class TestTheSurroundings:
    @settings(max_examples=40, deadline=None)
    @given(
        st.sampled_from(BEGINNINGS),
        st.integers(0, 99),
        st.floats(-1.0, 6.0),
        st.floats(0.01, 1.0),
        st.sampled_from([7, 64]),
        st.booleans(),
    )
    def test_equals_brute_force(self, required, seed, bias, threshold, budget, drafts) -> None:
        tokens, biases = prompt(12, seed), {END: bias}
        request = asking("r", tokens, threshold, required, logit_bias=biases)
        one = engine(token_budget=budget, step_cost=FixedCost() if drafts else None)
        _, probability = empty_answer(tokens, required, biases)
        if abs(probability - threshold) > 1e-4:
            answer = serve(one, [request])["r", 0]
            assert answer.tokens == truth(tokens, threshold, required, biases)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    @pytest.mark.parametrize("method", [None, LazyLLM("0", "0.6")])
    def test_every_request_gets_its_own_answer(
        self, temperature: float, method: LazyLLM | None
    ) -> None:
        requests = [
            asking(
                f"r{index}",
                prompt(10 + index, index % 7),
                0.02 + index % 5 * 0.2,
                BEGINNINGS[index % len(BEGINNINGS)],
                logit_bias={END: index % 4 * 2.0},
                temperature=temperature,
                seed=index,
            )
            for index in range(24)
        ]
        alone = {}
        for one in requests:
            alone |= answers_by_name(engine(method=method), [one])
        assert len({len(tokens) for tokens in alone.values()}) > 2
        for options in (
            {"token_budget": 32},
            {"step_cost": FixedCost()},
            {"step_cost": FixedCost(0.6)},
            {"slots": 60, "token_budget": 32},
            {"slots": 60, "token_budget": 32, "step_cost": FixedCost()},
            {"max_running": 3},
        ):
            crowded = engine(**options, method=method)
            assert answers_by_name(crowded, requests) == alone
            # What the cache holds now is what was computed for these very tokens.
            assert answers_by_name(crowded, requests) == alone
        assert crowded_preempts(requests)

    def test_all_answers_to_one_prompt(self) -> None:
        tokens, bias = prompt(30), {END: 3.0}
        for threshold in (0.01, 1.0):
            for limit in (1, 8):
                request = asking("r", tokens, threshold, b"abca", logit_bias=bias, n=4)
                answers = serve(engine(max_running=limit), [request])
                expected = truth(tokens, threshold, b"abca", bias)
                assert [answer.tokens for answer in answers.values()] == [expected] * 4

    @pytest.mark.parametrize("step", range(1, 4))
    @pytest.mark.parametrize("end", [0.0, 60.0])
    def test_preempted_while_it_is_decided(self, step: int, end: float) -> None:
        # The exact spelling takes a step for each letter; an answer with text ends it otherwise.
        required, longer = b"dcda", TOKENS.index(b"abca")
        bias = {TOKENS.index(letter): 30.0 for letter in LETTERS} | {END: end, longer: 31.0}
        tokens = prompt(10)
        one = engine(slots=20 + 2 * step)
        hog = EngineRequest(
            request_id="hog", token_ids=prompt(10, 1), sampling=sampling(max_tokens=8)
        )
        request = asking("a", tokens, 0.1, required, logit_bias=bias, max_tokens=8)
        answer = serve(one, [hog, request])["a", 0]
        assert one.stats().preemptions > 0
        expected = truth(tokens, 0.1, required, bias)
        assert answer.tokens == expected[: len(answer.tokens)]
        assert (longer in answer.tokens) == (end == 0.0)
        # What the cache holds now is what was computed for these very tokens.
        again = [*tokens, *answer.tokens]
        after = EngineRequest(request_id="b", token_ids=again, sampling=sampling(max_tokens=2))
        served = serve(one, [after])["b", 0]
        assert served.tokens == greedy_alone(ToyRunner(256), again, 2)
        assert served.cached_tokens > 10


def crowded_preempts(requests: list[EngineRequest]) -> bool:
    crowded = engine(slots=60, token_budget=32)
    serve(crowded, requests)
    return crowded.stats().preemptions > 0


def test_log_probabilities_are_those_of_the_model() -> None:
    tokens, bias = prompt(30), {END: 3.0}
    for threshold in (0.01, 1.0):
        request = asking("r", tokens, threshold, b"ab", logit_bias=bias, logprobs=1, max_tokens=4)
        answer: Answer = serve(engine(), [request])["r", 0]
        history = list(tokens)
        assert len(answer.logprobs) == len(answer.tokens)
        for token, reported in zip(answer.tokens, answer.logprobs, strict=True):
            row = log_softmax(next_logits(ToyRunner(256), history))
            assert reported.logprob == pytest.approx(row[token].item(), abs=1e-5)
            history.append(token)


def test_sampled_answers_that_are_not_empty_have_text() -> None:
    params: dict[str, object] = {"temperature": 2.0, "n": 8, "logit_bias": {END: 4.0}}
    answers = serve(engine(), [asking("r", prompt(20), 1.0, b"ab", seed=3, **params)])
    texts = [b"".join(TOKENS[token] for token in one.tokens) for one in answers.values()]
    assert all(text.startswith(b"ab") and len(text) > 2 for text in texts)
    assert len(set(texts)) > 1
