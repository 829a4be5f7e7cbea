"""The engine over models with states: answers of a cold engine, little to compute per keystroke.

A state can't be cut back to a part of what it has seen, so what is cached counts up to the last
snapshot only; however prompts come, the answers are those without any cache.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_checkpoints import VOCAB as TINY_VOCAB
from tiny_checkpoints import write_variant
from toy_runner import VOCAB
from toy_state_runner import ToyStateRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.sampling import SamplingParams
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import (
    GREEDY,
    FixedCost,
    background,
    build_engine,
    preempting_every,
    request,
    same,
    serve,
)

ANSWER = 12


def prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return random.Random(seed).choices(range(4, vocab), k=length)


def engine(slots: int = 512, states: int = 16, running: int = 8, **options: object) -> Engine:
    return build_engine(ToyStateRunner(slots, states), max_running=running, **options)  # type: ignore[arg-type]


def truth(tokens: list[int], sampling: EngineSamplingParams = GREEDY) -> list[int]:
    """The answer of an engine that has seen nothing before."""
    return serve(engine(), [request("a", tokens, sampling)])["a", 0].tokens


def check_states(one: Engine) -> None:
    """No sequence is left, so states are free or snapshots."""
    states = one._queues.pool.states
    assert states is not None
    assert states.used == 0
    assert not states._holds
    assert states.free + states.snapshots == states.store.count


def editing_load(count: int) -> list[EngineRequest]:
    """Prompts that share the head of one document for a while, as rounds of edits do."""
    document = prompt(80, 1)
    rng = random.Random(2)
    return [
        request(
            f"r{index}", document[: rng.randrange(80)] + prompt(rng.randrange(1, 30), 100 + index)
        )
        for index in range(count)
    ]


@pytest.mark.parametrize(("states", "running"), [(16, 8), (3, 2), (2, 1)])
@pytest.mark.parametrize("budget", [8, 64])
def test_answers_are_those_of_a_cold_engine(budget: int, states: int, running: int) -> None:
    requests = editing_load(20)
    arrivals = {3 * step: requests[2 * step : 2 * step + 2] for step in range(10)}
    doomed = [request(f"doomed{index}", prompt(60, index)) for index in range(4)]
    cancellations = {}
    for index, one in enumerate(doomed):
        arrivals[3 * index].append(one)
        cancellations[3 * index + 4] = one.request_id
    warm = engine(states=states, running=running, token_budget=budget)
    answers = serve(warm, arrivals=arrivals, cancellations=cancellations)
    for one in requests:
        assert answers[one.request_id, 0].tokens == truth(list(one.token_ids))
    check_states(warm)


@pytest.mark.parametrize("slots", [110, 512])
def test_preempted_sequences_go_on_from_snapshots(slots: int) -> None:
    requests = [request(f"r{index}", prompt(20 + index, index)) for index in range(6)]
    one = engine(slots, token_budget=32)
    answers = serve(one, requests, after_step=preempting_every(5))
    for each in requests:
        assert answers[each.request_id, 0].tokens == truth(list(each.token_ids))
    assert one.stats().preemptions > 0
    check_states(one)


def test_several_answers_go_on_with_copies_of_the_state() -> None:
    three = EngineSamplingParams(temperature=1.0, seed=3, max_tokens=ANSWER, ignore_eos=True, n=3)
    tokens = prompt(100, 3)
    together = engine()
    answers = serve(together, [request("a", tokens, three)])
    assert together.stats().computed_tokens == 100 + 3 * (ANSWER - 1)
    # With room for one at a time, the others start from a snapshot.
    apart = engine(states=4, running=1)
    assert serve(apart, [request("a", tokens, three)]) == answers
    assert apart.stats().computed_tokens < 100 + 3 * (ANSWER - 1) + 2 * 64
    assert len({tuple(answer.tokens) for answer in answers.values()}) == 3


def test_background_prompts_leave_snapshots() -> None:
    tokens = prompt(150, 5)
    one = engine(background_chunk=16)
    serve(one, [background("guess", tokens[:140])])
    before = one.stats().computed_tokens
    assert serve(one, [request("a", tokens)])["a", 0].tokens == truth(tokens)
    assert one.stats().computed_tokens - before == 10 + ANSWER - 1
    check_states(one)


def test_stats_say_where_states_are() -> None:
    one = engine(states=4, running=2)
    tokens = prompt(40, 1)
    one.add(request("a", tokens))
    one.step()
    stats = one.stats()
    assert (stats.states_total, stats.states_used) == (4, 1)
    serve(one)
    stats = one.stats()
    assert (stats.states_used, stats.snapshots_reused, stats.snapshots_evicted) == (0, 0, 0)
    kept = stats.state_snapshots
    assert kept > 0
    # What goes on behind the answer starts from the snapshot at its end.
    serve(one, [request("on", [*tokens, *truth(tokens), *prompt(5)])])
    assert one.stats().snapshots_reused == 1
    serve(one, [request(f"other{seed}", prompt(40, seed)) for seed in range(2, 6)])
    stats = one.stats()
    assert (stats.states_used, stats.snapshots_reused) == (0, 1)
    assert stats.state_snapshots == 4
    assert stats.snapshots_evicted >= kept


def test_an_answer_that_turns_out_not_to_be_empty_starts_again() -> None:
    """The check has computed tokens that are no part of the answer: the state has seen them."""
    one = build_engine(ToyStateRunner(512, 8), (0, 1, 2), max_running=4, token_bytes=_token_bytes)
    cold = build_engine(ToyStateRunner(512, 8), (0, 1, 2), max_running=4, token_bytes=_token_bytes)
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=ANSWER)
    for seed in range(12):
        tokens = prompt(60, seed)
        fields = {"begins_with": b"ab", "empty_threshold": 0.01}
        found = serve(one, [request(f"{seed}", tokens, sampling, **fields)])[f"{seed}", 0]
        plain = serve(cold, [request(f"{seed}", tokens, sampling, begins_with=b"ab")])
        assert found.tokens == plain[f"{seed}", 0].tokens or found.tokens[-1] in (0, 1, 2)
    check_states(one)


def _token_bytes(token_id: int) -> bytes:
    return b"" if token_id < 3 else bytes([ord("a") + token_id % 26])


def test_no_drafts_run() -> None:
    one = engine(step_cost=FixedCost(row=0.0))
    repeated = prompt(10) * 5
    assert serve(one, [request("a", repeated)])["a", 0].tokens == truth(repeated)
    assert one.stats().draft_tokens == 0


def test_a_model_with_states_has_no_methods_and_no_more_sequences_than_states() -> None:
    one = engine(methods={"any": object()})  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="layers have a state instead of KV"):
        one.add(request("a", prompt(10), method="any"))
    with pytest.raises(ValueError, match="8 running sequences need more than 8 states"):
        engine(states=8, running=8)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["type", "type", "type", "erase", "jump"]),
            st.integers(0, 150),
            st.integers(1, 12),
        ),
        min_size=2,
        max_size=12,
    ),
    st.integers(3, 12),
)
def test_sessions_of_edits_answer_as_cold(edits: list[tuple[str, int, int]], states: int) -> None:
    """Prompts as prefix first layouts make them: a head, the text after the caret, the end."""
    one = engine(states=states, running=1, token_budget=40)
    head, end = prompt(60, 1), prompt(10, 2)
    for number, (kind, place, size) in enumerate(edits):
        if kind == "type":
            end = end + prompt(size, place)
        elif kind == "erase":
            end = end[: max(len(end) - size, 1)]
        else:
            head = prompt(120, 1)[: 40 + place % 60]
        tokens = [*head, 1, *prompt(20, 3), 2, *end][:180]
        answer = serve(one, [request(f"{number}", tokens)])[f"{number}", 0]
        assert answer.tokens == truth(tokens)
    check_states(one)


@pytest.fixture(scope="module", params=["granitehybrid", "qwen3next"])
def hybrid_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp("hybrid"))


@pytest.fixture(scope="module")
def hybrid(hybrid_folder: Path) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(
        open_checkpoint(hybrid_folder), slots=2000, states=12, threads=2, kv_cache_dtype="f32"
    )
    yield runner
    runner.close()


def test_a_keystroke_computes_what_was_typed_and_at_most_64_tokens(hybrid: CpuRunner) -> None:
    """Answers and log probabilities have the bits of an engine without any cache."""
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
    tokens = prompt(300, 7, TINY_VOCAB)
    typed = prompt(100, 8, TINY_VOCAB)
    warm = build_engine(hybrid, max_running=4, token_budget=64)
    keystrokes = [0, 1, 3, 4, 9, 17, 18, 40, 41, 77]
    before = 0
    answers = []
    for last, now in zip([0, *keystrokes], keystrokes, strict=False):
        answers.append(serve(warm, [request(f"{now}", tokens + typed[:now], sampling)]))
        computed = warm.stats().computed_tokens - before
        before += computed
        rows = computed - (4 - 1)  # without those of the answer
        assert rows == 300 if now == 0 else rows <= (now - last) + 64
    for now, found in zip(keystrokes, answers, strict=True):
        cold = build_engine(hybrid, max_running=4, token_budget=512)
        expected = serve(cold, [request(f"{now}", tokens + typed[:now], sampling)])
        assert same(found[f"{now}", 0], expected[f"{now}", 0])


def test_an_infilling_session_computes_what_was_typed_and_at_most_64_tokens(
    hybrid: CpuRunner, hybrid_folder: Path
) -> None:
    """Keystrokes through the planner, with token healing, character by character."""
    checkpoint = open_checkpoint(hybrid_folder)
    encoder = PromptEncoder(checkpoint, fim_format(checkpoint), checkpoint.config.context)
    before = "".join(f"def double{n}(x):\n    return {n} * x\n\n" for n in range(6))
    after = "".join(f"\nprint(double{n}({n}))" for n in range(6))
    typed = "def triple(value):\n    return 3 * value"
    sampling = SamplingParams(temperature=0.0, max_tokens=6, logprobs=1)
    requests = []
    for length in range(len(typed) + 1):
        prompt = encoder.infill(InfillRequest(prefix=before + typed[:length], suffix=after))
        assert prompt.report is not None
        assert prompt.report.sentinels
        requests.append(prompt.request(f"{length}", sampling))
    token_bytes = checkpoint.tokenizer.token_bytes
    warm = build_engine(hybrid, (0,), max_running=4, token_bytes=token_bytes)
    computed, found = 0, {}
    for number, one in enumerate(requests):
        found |= serve(warm, [one])
        rows = warm.stats().computed_tokens - computed
        computed += rows
        if number:  # one more character is one more token at most, and so is each of the answer
            assert rows <= 1 + 64 + sampling.max_tokens
    assert computed < sum(len(one.token_ids) for one in requests) / 4
    for one in requests[::6]:
        cold = build_engine(hybrid, (0,), max_running=4, token_bytes=token_bytes)
        assert same(found[one.request_id, 0], serve(cold, [one])[one.request_id, 0])


def test_mixed_batches_over_the_kernels_have_the_bits_of_each_alone(hybrid: CpuRunner) -> None:
    sampling = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=1)
    shared = prompt(150, 1, TINY_VOCAB)
    requests = [
        request(f"{n}", shared[: 40 * n] + prompt(30 + n, n, TINY_VOCAB), sampling)
        for n in range(4)
    ]
    together = build_engine(hybrid, max_running=6, token_budget=48)
    found = serve(together, requests, after_step=preempting_every(7))
    again = serve(together, requests)
    for one in requests:
        cold = build_engine(hybrid, max_running=6, token_budget=512)
        expected = serve(cold, [one])[one.request_id, 0]
        for answers in (found, again):
            assert same(answers[one.request_id, 0], expected)
    check_states(together)
