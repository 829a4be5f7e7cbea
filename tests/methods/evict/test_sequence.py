"""Compressed KV in the engine: what it frees, what stays exact, and that load changes no answer."""

from collections.abc import Callable
from itertools import count, pairwise
from typing import Any

import numpy as np
import pytest
from toy_engine import prompt, sampling, truth
from toy_method import FailsAfter, KeepLoudest
from toy_runner import VOCAB, ToyCells, ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest
from midfill.errors import InvalidRequestError
from midfill.methods.evict.streaming_heads import HeadSplit, StreamingRule
from serving import Answers, FixedCost, build_engine, request, serve

METHOD = KeepLoudest(3)
ALL_ROWS = 1000
METHODS = [
    METHOD,
    KeepLoudest(3, interval=4),
    KeepLoudest(2, interval=1),
    KeepLoudest(ALL_ROWS, block_rows=8),
    KeepLoudest(ALL_ROWS, interval=3, block_rows=16),
]
each_method = pytest.mark.parametrize("method", METHODS, ids=str)
LONG = prompt(40)
PROMPTS = {f"r{seed}": prompt(30, seed) for seed in range(4)}


def engine(slots: int = 512, **options: Any) -> Engine:
    return build_engine(ToyRunner(slots), **({"method": METHOD} | options))


def owned_slots(one: Engine) -> int:
    """Slots that are neither free nor evictable."""
    stats = one.stats()
    return stats.slots_total - stats.slots_free - stats.slots_cached


def alone(tokens: list[int], method: KeepLoudest = METHOD, **fields: object) -> list[int]:
    answers = serve(engine(method=method), [request("alone", tokens, sampling(**fields))])
    return answers["alone", 0].tokens


def texts(answers: Answers) -> dict[tuple[str, int], list[int]]:
    return {key: answer.tokens for key, answer in answers.items()}


def test_answers_are_computed_over_the_keys_that_stay() -> None:
    assert alone(LONG) != truth(LONG)
    assert alone(LONG)[0] == truth(LONG)[0], "the first token sees the whole prompt"
    assert alone([1, 2, 3]) == truth([1, 2, 3]), "the method keeps everything of short prompts"


def test_slots_of_dropped_keys_are_free_while_the_answer_is_written() -> None:
    held: list[int] = []
    serve(engine(), [request("r", LONG)], after_step=lambda one: held.append(owned_slots(one)))
    # Half of the keys fill half of the slots; each step adds a token.
    assert held[0] == len(LONG) // 2
    assert max(held) <= len(LONG) // 2 + 12


def test_the_exact_prompt_stays_cached_and_is_what_the_next_request_finds() -> None:
    one = engine()
    serve(one, [request("first", LONG)])
    typed = [*LONG, 5, 6]
    answers = serve(one, [request("second", typed)])
    # The rows whose queries the method observes are computed again.
    assert answers["second", 0].cached_tokens == len(typed) - METHOD.observed_rows
    assert answers["second", 0].tokens == alone(typed)


def test_what_is_computed_over_compressed_keys_is_never_cached() -> None:
    one = engine()
    first = serve(one, [request("first", LONG)])["first", 0].tokens
    again = [*LONG, *first]
    answers = serve(one, [request("second", again)])
    assert answers["second", 0].cached_tokens <= len(LONG)
    assert answers["second", 0].tokens == alone(again)


@each_method
@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_batches_and_drafts_change_no_answer(budget: int, method: KeepLoudest) -> None:
    prompts = {f"r{seed}": prompt(20 + 7 * seed, seed) for seed in range(5)}
    expected = {(name, 0): alone(tokens, method) for name, tokens in prompts.items()}
    for cost in (None, FixedCost(0.0)):
        one = engine(token_budget=budget, step_cost=cost, method=method)
        answers = serve(one, [request(name, tokens) for name, tokens in prompts.items()])
        assert texts(answers) == expected


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_tokens_after_the_compressed_ones_are_scored_as_if_they_had_been_generated(
    budget: int,
) -> None:
    scored = sampling(logprobs=0)
    answer = serve(engine(), [request("first", LONG, scored)])["first", 0]
    one = engine(token_budget=budget)
    forced = request(
        "second",
        [*LONG, *answer.tokens],
        sampling(prompt_logprobs=0, max_tokens=1),
        compress_after=len(LONG),
        score_from=len(LONG),
    )
    one.add(forced)
    outputs = []
    while one.has_work():
        outputs += one.step()
    assert outputs[0].prompt_logprobs is not None
    found = [score.logprob for score in outputs[0].prompt_logprobs]
    assert found == pytest.approx([score.logprob for score in answer.logprobs], abs=1e-5)


def test_questions_after_a_compressed_context_find_it_and_see_what_stays_of_it() -> None:
    one = engine()
    serve(one, [request("context", LONG)])
    exact = one.stats().slots_cached
    for seed in (1, 2):
        asked = [*LONG, *prompt(9, seed)]
        answers = serve(one, [request("asked", asked, compress_after=len(LONG))])
        assert answers["asked", 0].cached_tokens == len(LONG) - METHOD.observed_rows
        assert answers["asked", 0].tokens not in (alone(asked), truth(asked))
    assert one.stats().slots_cached == exact, "nothing that saw compressed keys is cached"


def test_questions_after_a_compressed_context_survive_preemption() -> None:
    asked = {f"r{seed}": prompt(31, seed) for seed in range(4)}
    fields = {"compress_after": 28}
    expected = {
        (name, 0): serve(engine(), [request(name, tokens, **fields)])[name, 0].tokens
        for name, tokens in asked.items()
    }
    one = engine(slots=75)
    answers = serve(one, [request(name, tokens, **fields) for name, tokens in asked.items()])
    assert one.stats().preemptions > 0
    assert texts(answers) == expected


def preempt(one: Engine) -> None:
    """Send every running sequence back to the queue, as a policy may after any step."""
    for sequence in reversed(list(one._queues.running)):
        one._execution.preempt(sequence)


def preempting_after(step: int) -> Callable[[Engine], None]:
    steps = count()
    return lambda one: preempt(one) if next(steps) == step else None


@each_method
def test_preempted_answers_are_compressed_at_the_same_points_again(method: KeepLoudest) -> None:
    expected = {(name, 0): alone(tokens, method) for name, tokens in PROMPTS.items()}
    for step in range(12):
        one = engine(token_budget=30, method=method, step_cost=FixedCost(0.0))
        requests = [request(name, tokens) for name, tokens in PROMPTS.items()]
        assert texts(serve(one, requests, after_step=preempting_after(step))) == expected
        assert one.stats().preemptions > 0


def test_answers_are_preempted_where_the_pool_is_too_small() -> None:
    one = engine(slots=75)
    answers = serve(one, [request(name, tokens) for name, tokens in PROMPTS.items()])
    assert one.stats().preemptions > 0
    assert texts(answers) == {(name, 0): alone(tokens) for name, tokens in PROMPTS.items()}


@each_method
@pytest.mark.parametrize("max_running", [1, 2, 10])
def test_answers_to_one_prompt_share_what_stays(max_running: int, method: KeepLoudest) -> None:
    held: list[int] = []
    one = engine(max_running=max_running, method=method)
    many = request("r", LONG, sampling(n=3))
    answers = serve(one, [many], after_step=lambda each: held.append(owned_slots(each)))
    assert texts(answers) == {("r", index): alone(LONG, method) for index in range(3)}
    copies = 3 if method.interval else 1
    assert max(held) <= max(len(LONG), copies * len(LONG) // 2 + 3 * 12)


@each_method
def test_cancelled_answers_leave_no_slot_behind(method: KeepLoudest) -> None:
    for step in range(6):
        one = engine(token_budget=16, method=method)
        answers = serve(one, [request("r", LONG, sampling(n=2))], cancellations={step: "r"})
        assert answers["r", 0].finish_reason == "cancelled"
        one = engine(token_budget=16, method=method)
        answers = serve(one, [request("r", LONG, sampling(n=2))], cancellations={step: ("r", 1)})
        assert answers["r", 0].tokens == alone(LONG, method)


def test_a_method_with_an_interval_bounds_what_an_answer_holds() -> None:
    held: list[int] = []
    one = engine(method=KeepLoudest(4, interval=4))
    many = request("r", LONG, sampling(max_tokens=80))
    serve(one, [many], after_step=lambda each: held.append(owned_slots(each)))
    # A quarter of n keys goes at every point, and four come until the next: n approaches 15.
    assert max(held[40:]) <= 15 + 4


def test_keys_that_stay_are_moved_only_into_freed_places() -> None:
    """Between points a sequence's slots are the same, and each holds one cell of each number."""
    one = engine(method=KeepLoudest(4, interval=4))
    seen: list[set[int]] = []

    def look(each: Engine) -> None:
        for sequence in each._queues.running:
            if sequence.kv is not None and sequence.kv.prefix is not None:
                prefix = sequence.kv.prefix
                assert len(np.unique(prefix.index.cells)) == len(prefix.index.cells)
                assert set((prefix.index.cells % 512).tolist()) <= set(prefix.slots.tolist())
                seen.append(set(prefix.slots.tolist()))

    serve(one, [request("r", LONG, sampling(max_tokens=40))], after_step=look)
    assert len(seen) > 20
    assert all(len(now - before) <= 4 for before, now in pairwise(seen))


@pytest.mark.parametrize("begins_with", [b"", b"abc"])
@pytest.mark.parametrize("threshold", [1e-9, 1.0])
def test_answers_that_are_checked_for_emptiness_meet_the_same_points(
    begins_with: bytes, threshold: float
) -> None:
    """Tokens of the check are taken back, so points come after them: with drafts, preempted too."""
    pieces = [b"", *(bytes([97 + token % 5]) for token in range(1, VOCAB))]

    def asked(name: str, tokens: list[int]) -> EngineRequest:
        return EngineRequest(
            request_id=name,
            token_ids=tokens,
            sampling=sampling(max_tokens=20, ignore_eos=False),
            begins_with=begins_with,
            empty_threshold=threshold,
        )

    def answers(
        names: list[str], cost: FixedCost | None = None, step: int = -1
    ) -> dict[str, list[int]]:
        method = KeepLoudest(ALL_ROWS, interval=2)
        options = {"step_cost": cost, "method": method, "token_bytes": pieces.__getitem__}
        one = build_engine(ToyRunner(512), (0,), **options)  # type: ignore[arg-type]
        requests = [asked(name, prompt(30, int(name))) for name in names]
        found = serve(one, requests, after_step=preempting_after(step))
        return {name: answer.tokens for (name, _), answer in found.items()}

    names = [str(seed) for seed in range(4)]
    expected = {name: answers([name])[name] for name in names}
    for cost in (None, FixedCost(0.0)):
        for step in range(-1, 10):
            assert answers(names, cost, step) == expected


BY_NAME = {"half": METHOD, "fifth": KeepLoudest(2, one_of=5), "none": None}


@pytest.mark.parametrize("budget", [5, 64])
@pytest.mark.parametrize("slots", [90, 512])
def test_requests_with_methods_of_their_own_are_answered_as_alone(budget: int, slots: int) -> None:
    def of(name: str | None, tokens: list[int]) -> EngineRequest:
        return request(f"{name}", tokens, method=name)

    def one(slots: int) -> Engine:
        return engine(slots, methods=BY_NAME, method=BY_NAME["fifth"], token_budget=budget)

    names = [*BY_NAME, None]
    for tokens in ([LONG] * 4, [prompt(20 + 9 * seed, seed) for seed in range(4)]):
        requests = [of(name, own) for name, own in zip(names, tokens, strict=True)]
        alone = {key: value for each in requests for key, value in serve(one(512), [each]).items()}
        assert texts(serve(one(slots), requests)) == texts(alone)
        assert alone["none", 0].tokens == truth(tokens[2])
    assert alone["None", 0].tokens != truth(tokens[3]), "the default compresses"
    assert len({tuple(serve(one(512), [of(name, LONG)])[name, 0].tokens) for name in BY_NAME}) == 3


def test_a_method_is_refused_where_requests_may_choose_none() -> None:
    one = engine()
    with pytest.raises(InvalidRequestError, match="can't choose a method"):
        one.add(request("r", LONG, method="half"))
    assert not one.has_work()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.parametrize(("with_nan", "error"), [(False, "no idea"), (True, "no finite number")])
def test_a_method_that_fails_ends_its_own_request_alone(
    n: int, time: int, with_nan: bool, error: str
) -> None:
    one = engine(methods={"bad": FailsAfter(time, with_nan)})
    bad = request("bad", LONG, sampling(n=n), method="bad")
    answers = serve(one, [bad, request("good", LONG)])
    assert answers["good", 0].tokens == alone(LONG)
    for index in range(n):
        assert answers["bad", index].finish_reason == "error"
        told = f"{answers['bad', index].error}"
        assert told.startswith("the method of compression failed: ")
        assert error in told


def test_cells_that_cant_be_written_leave_no_slot_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(ToyCells, "write", fail)
    means = HeadSplit(StreamingRule(1, 6, mean=True), (True, False))
    answers = serve(engine(method=means), [request("r", LONG, sampling(n=2))])
    assert {one.error for one in answers.values()} == {
        "the method of compression failed: the device is gone"
    }


def test_a_preempted_answer_whose_prompt_is_cached_whole_is_compressed_again() -> None:
    means = HeadSplit(StreamingRule(1, 6, interval=0, mean=True), (True, False))
    expected = serve(engine(method=means), [request("r", LONG)])["r", 0].tokens
    steps = count(1)

    def preempt(one: Engine) -> None:
        if next(steps) % 4 == 0 and one._queues.running:
            one._execution.preempt(one._queues.running[0])

    found = serve(engine(method=means), [request("r", LONG)], after_step=preempt)
    assert found["r", 0].tokens == expected
