"""begins_with: answers begin with the required bytes and are otherwise the model's."""

from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_engine import prompt, sampling
from toy_runner import VOCAB, ToyRunner

from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.forward.logits import log_softmax
from serving import GREEDY, Answer, build_engine, next_logits, request, serve

END = 0  # stands for no text, like every end token
TOKENS = [b"", b"", *(bytes([letter]) for letter in b"printf(x) \xc3\xa9\xf0\x9f\x99\x82\xa8")]
TOKENS += [b"pr", b"pri", b"print", b"printf", b"rin", b"int", b"t(", b"  ", b" p", b" print"]
TOKENS += ["é".encode(), "éx".encode(), b"x\xc3", b"\xf0\x9f", "🙂".encode(), b"\x99\x82(", b"nt"]
TOKENS += [b""] * (VOCAB - len(TOKENS))
assert len(TOKENS) == VOCAB

BEGINNINGS = [
    b"p",
    b"pri",
    b"print(",
    b" ",
    "é".encode(),
    "xé🙂".encode(),
    b"\xc3",
    b"prinp",
    b"t((",
]


def engine(slots: int = 512, eos: tuple[int, ...] = (END,), **options: int) -> Engine:
    return build_engine(ToyRunner(slots), eos, **options, token_bytes=TOKENS.__getitem__)


def healed(
    name: str, tokens: list[int], begins_with: bytes, params: EngineSamplingParams = GREEDY
) -> EngineRequest:
    return EngineRequest(
        request_id=name, token_ids=tokens, sampling=params, begins_with=begins_with
    )


def text(answer: Answer) -> bytes:
    return b"".join(TOKENS[token] for token in answer.tokens)


@cache
def writable(required: bytes, banned: frozenset[int] = frozenset()) -> frozenset[int]:
    """Return by exhaustive search the tokens that can start a text beginning with ``required``."""
    return frozenset(
        token
        for token, piece in enumerate(TOKENS)
        if piece
        and token not in banned
        and (
            piece.startswith(required)
            or (required.startswith(piece) and writable(required[len(piece) :], banned))
        )
    )


def truth(
    tokens: list[int],
    required: bytes,
    count: int = 12,
    bias: dict[int, float] | None = None,
    banned: frozenset[int] = frozenset(),
) -> list[int]:
    """Return the greedy answer by brute force: the most likely allowed token, one by one."""
    runner, answer = ToyRunner(256), list[int]()
    while len(answer) < count:
        logits = next_logits(runner, tokens + answer)
        for token, value in (bias or {}).items():
            logits[token] += value
        if required:
            ids = sorted(writable(required, banned))
            token = ids[int(logits[ids].argmax())]
            required = required[len(TOKENS[token]) :]
        else:
            token = int(logits.argmax())
        answer.append(token)
    return answer


def test_a_prepared_engine_looks_at_few_tokens_for_the_first_request() -> None:
    seen = list[int]()

    def token_bytes(token_id: int) -> bytes:
        seen.append(token_id)
        return TOKENS[token_id]

    one = build_engine(ToyRunner(512), (END,), token_bytes=token_bytes)
    one.prepare()
    assert set(seen) == set(range(VOCAB))
    seen.clear()
    one.add(healed("a", prompt(40), b"pri"))
    assert len(seen) < 10


class TestGreedy:
    @pytest.mark.parametrize("required", BEGINNINGS)
    @pytest.mark.parametrize("budget", [7, 256])
    def test_equals_brute_force_whole_and_chunked(self, required: bytes, budget: int) -> None:
        tokens = prompt(40)
        answer = serve(engine(token_budget=budget), [healed("a", tokens, required)])["a", 0]
        assert answer.tokens == truth(tokens, required)
        assert text(answer).startswith(required)

    @settings(max_examples=40, deadline=None)
    @given(
        st.text("printx( é🙂", min_size=1, max_size=5).map(str.encode),
        st.integers(1, 30),
        st.integers(0, 99),
    )
    def test_equals_brute_force_for_any_text(self, required: bytes, length: int, seed: int) -> None:
        tokens = prompt(length, seed)
        answer = serve(engine(), [healed("a", tokens, required)])["a", 0]
        assert answer.tokens == truth(tokens, required)

    def test_bias_applies_among_the_allowed_tokens(self) -> None:
        tokens = prompt(30)
        bias = {TOKENS.index(b"pri"): 60.0, TOKENS.index(b"x"): 100.0}
        params = sampling(logit_bias=bias, max_tokens=3)
        answer = serve(engine(), [healed("a", tokens, b"print", params)])["a", 0]
        assert answer.tokens == truth(tokens, b"print", 3, bias)
        assert answer.tokens[0] == TOKENS.index(b"pri")

    def test_all_answers_to_one_prompt(self) -> None:
        tokens = prompt(30)
        one = engine(max_running=2)
        answers = serve(one, [healed("a", tokens, b"print(", sampling(n=4))])
        assert [answer.tokens for answer in answers.values()] == [truth(tokens, b"print(")] * 4

    @pytest.mark.parametrize("step", range(1, 5))
    def test_preempted_halfway_through_the_beginning(self, step: int) -> None:
        # Single bytes are made the most likely, so the beginning takes many steps.
        required = "printx🙂(".encode()
        bias = {TOKENS.index(bytes([byte])): 50.0 for byte in b"printx(\xf0\x9f\x99\x82"}
        params = sampling(logit_bias=bias)
        tokens = prompt(10)
        one = engine(slots=20 + 2 * step)
        hog = request("hog", prompt(10, 1), sampling(max_tokens=8))
        answer = serve(one, [hog, healed("a", tokens, required, params)])["a", 0]
        assert one.stats().preemptions > 0
        assert answer.tokens[:11] == [TOKENS.index(required[at : at + 1]) for at in range(11)]
        assert answer.tokens == truth(tokens, required, 12, bias)[: len(answer.tokens)]

    def test_beside_unconstrained_rows_every_request_gets_its_own_answer(self) -> None:
        requests = [
            healed(
                f"r{index}",
                prompt(10 + index, index),
                BEGINNINGS[index % len(BEGINNINGS)] if index % 2 else b"",
                sampling(temperature=index % 3 * 0.8, seed=index, top_p=0.95),
            )
            for index in range(16)
        ]
        alone = [serve(engine(), [one])[one.request_id, 0].tokens for one in requests]
        together = serve(engine(token_budget=32), requests)
        assert [together[one.request_id, 0].tokens for one in requests] == alone
        crowded = engine(slots=60, token_budget=32)
        together = serve(crowded, requests)
        assert [together[one.request_id, 0].tokens for one in requests] == alone
        assert crowded.stats().preemptions > 0


@pytest.mark.parametrize("required", BEGINNINGS)
@pytest.mark.parametrize("fields", [{}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_sampled_answers_begin_with_it(required: bytes, fields: dict[str, float]) -> None:
    params = sampling(temperature=2.0, seed=5, n=6, **fields)
    answers = serve(engine(), [healed("a", prompt(20), required, params)])
    assert all(text(answer).startswith(required) for answer in answers.values())
    assert len({tuple(answer.tokens) for answer in answers.values()}) > 1


def test_log_probabilities_are_those_of_the_unconstrained_model() -> None:
    tokens = prompt(30)
    params = sampling(logprobs=2, max_tokens=6)
    answer = serve(engine(), [healed("a", tokens, b"xprinp", params)])["a", 0]
    history = list(tokens)
    for token, reported in zip(answer.tokens, answer.logprobs, strict=True):
        row = log_softmax(next_logits(ToyRunner(256), history))
        assert reported.logprob == pytest.approx(row[token].item(), abs=1e-5)
        assert [token_id for token_id, _ in reported.top] == (-row).argsort()[:2].tolist()
        history.append(token)


class TestTheEnd:
    def test_end_tokens_are_not_allowed_before_it_is_written(self) -> None:
        # The end token is by far the most likely.
        params = sampling(ignore_eos=False, logit_bias={END: 100.0})
        answer = serve(engine(), [healed("a", prompt(20), b"print(", params)])["a", 0]
        assert text(answer).startswith(b"print(")
        assert (answer.tokens[-1], answer.finish_reason) == (END, "stop")

    def test_stop_tokens_do_not_write_it(self) -> None:
        stops = frozenset(TOKENS.index(piece) for piece in (b"printf", b"print", b"pri", b"p"))
        params = sampling(stop_token_ids=tuple(stops), max_tokens=4)
        tokens = prompt(20)
        answer = serve(engine(), [healed("a", tokens, b"print", params)])["a", 0]
        expected = truth(tokens, b"print", 4, banned=stops)
        assert TOKENS[expected[0]] == b"pr"
        assert answer.tokens == expected[: len(answer.tokens)]
        assert text(answer).startswith(b"print")

    def test_max_tokens_may_end_it_earlier(self) -> None:
        params = sampling(max_tokens=2)
        answer = serve(engine(), [healed("a", prompt(20), b"((((", params)])["a", 0]
        assert (text(answer), answer.finish_reason) == (b"((", "length")


class TestRefusals:
    @pytest.mark.parametrize("required", [b"q", b"priq", b"\xff", "ü".encode(), b"x" * 129])
    def test_bytes_that_cannot_be_written(self, required: bytes) -> None:
        one = engine()
        with pytest.raises(InvalidRequestError, match="begin") as error:
            one.add(healed("a", [1], required))
        assert error.value.param == "begins_with"
        assert not one.has_work()
        serve(one, [healed("a", [1], b"pri")])  # the id is not in use

    @pytest.mark.parametrize("required", [b"(", b"(x", b"x(", b"pr("])
    def test_bytes_that_only_stop_tokens_could_write(self, required: bytes) -> None:
        params = sampling(stop_token_ids=(TOKENS.index(b"("), TOKENS.index(b"t(")))
        with pytest.raises(InvalidRequestError, match="begin"):
            engine().add(healed("a", [1], required, params))

    def test_an_engine_that_does_not_know_its_tokens(self) -> None:
        one = build_engine(ToyRunner(64), ())
        with pytest.raises(InvalidRequestError, match="begins_with"):
            one.add(healed("a", [1], b"x"))
        assert not one.has_work()


def test_a_vocabulary_is_not_read_before_it_is_needed() -> None:
    read: list[int] = []

    def token_bytes(token: int) -> bytes:
        read.append(token)
        return TOKENS[token]

    one = build_engine(ToyRunner(512), (END,), token_bytes=token_bytes)
    serve(one, [request("a", [1, 2])])
    assert not read
    serve(one, [healed("b", [1, 2], b"pri"), healed("c", [1, 2], b"x")])
    assert set(read) == set(range(VOCAB))
    assert len(read) < 2 * VOCAB


def test_a_loaded_checkpoint_knows_its_tokens(tiny_folder: Path) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    tokenizer = checkpoint.tokenizer
    one, _, _ = load_engine(checkpoint, ModelOptions(threads=1, kv_memory=4 * 2**20))
    tokens = tokenizer.encode("def f(value):\n    re")
    for required in (b"return", b"    ", "größe".encode(), "字🙂".encode(), b"\x00\xff"):
        for params in (GREEDY, sampling(temperature=1.0, seed=3, n=3)):
            answers = serve(one, [healed("a", tokens, required, params)])
            for answer in answers.values():
                written = b"".join(map(tokenizer.token_bytes, answer.tokens))
                assert written.startswith(required[: len(written)])
                assert len(written) >= len(required) or len(answer.tokens) == 12
