"""KVShare: which text it takes, what it repairs before the answer, and while that is written."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_blend import NaiveBlend, dense_attention
from tiny_checkpoints import VOCAB

from midfill.arrays import Float64Array, Int64Array
from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.engine.scheduling.policies.highest_hit_rate import HighestHitRate
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.errors import InvalidRequestError
from midfill.kv.token_runs import find_runs
from midfill.methods.registry import resolve_method
from midfill.methods.reuse import sequence as blending
from midfill.methods.reuse.kvshare import KVShare, SharedSequence
from midfill.methods.reuse.method import LayerKV
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import (
    Answer,
    FixedCost,
    build_engine,
    preempting_every,
    request,
    same,
    serve,
    serve_waiting,
)

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
SHARE = KVShare(check_layer=0, ratio=0.2, eps=0.0, refresh=0)
WATCHING = replace(SHARE, refresh=4, period=4, above=0.0)


# --- the choice


@given(
    st.lists(st.tuples(*[st.integers(0, 4)] * 3), max_size=30),
    st.sampled_from([0.0, 0.15, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 2.0]),
    st.sampled_from(["both", "deviation", "attention"]),
)
def test_tokens_that_deviate_and_are_attended_to_are_repaired(
    rows: list[tuple[int, int, int]], ratio: float, eps: float, score: str
) -> None:
    method = KVShare(ratio=ratio, eps=eps, score=score)
    deviation, size, attention = np.array(rows, np.float64).reshape(-1, 3).T
    rank = {
        "both": lambda i: rows[i][0] * rows[i][2],
        "deviation": lambda i: rows[i][0],
        "attention": lambda i: rows[i][2],
    }[score]
    needy = [i for i in range(len(rows)) if rows[i][0] >= eps * rows[i][1]]
    ranked = sorted(needy, key=lambda i: (-rank(i), i))
    expected = sorted(ranked[: int(ratio * len(rows))])
    assert method.repaired(deviation, size, attention).tolist() == expected


# --- in the engine


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=900, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


@pytest.fixture(autouse=True, scope="module")
def blends_whatever_it_saves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blending, "_MIN_SAVED_ROWS", 0)
        yield


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5, VOCAB), k=length)


BODY = text(150, 1)
DONOR = [1, *BODY, 3]
EDITED = [2, *text(20, 5), *BODY[:60], 4, *BODY[61:110], *text(9, 6), *BODY[110:], *text(6, 7)]


def engine_of(runner: CpuRunner, method: KVShare = SHARE, **options: object) -> Engine:
    return build_engine(runner, methods={"share": method, "none": None}, **options)


def asked(name: str, tokens: list[int], method: str = "share", **fields: object) -> EngineRequest:
    return request(name, tokens, PARAMS, method=method, **fields)


def ask(engine: Engine, tokens: list[int], method: str = "share", **fields: object) -> Answer:
    return serve(engine, [asked("r", tokens, method, **fields)])["r", 0]


def exact(runner: CpuRunner, tokens: list[int]) -> Answer:
    return ask(engine_of(runner), tokens, "none")


def after(engine: Engine, *prompts: list[int]) -> Engine:
    for tokens in prompts:
        ask(engine, tokens, "none")
    return engine


@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_the_answer_begins_as_a_naive_repair_does(runner: CpuRunner, ratio: float) -> None:
    method = replace(SHARE, ratio=ratio, score="deviation")
    found = ask(after(engine_of(runner, method), DONOR), EDITED)
    ids = [np.array(each, np.int32) for each in (EDITED[:-1], DONOR)]
    runs = find_runs(ids[0], 0, ids[1:], method.min_run)
    places = {run.start + i: run.source_start + i for run in runs for i in range(run.length)}

    def choose(copied: Int64Array, old: LayerKV, new: LayerKV) -> set[int]:
        deviation = [((new.values[i] - old.values[i]) ** 2).sum() for i in range(len(copied))]
        ranked = sorted(range(len(copied)), key=lambda i: -deviation[i])
        return {int(copied[i]) for i in ranked[: int(ratio * len(copied))]}

    end = len(EDITED) - 1
    logits = NaiveBlend(runner, 400).logits(EDITED, DONOR, places, end, 1, choose)
    normed = logits - np.logaddexp.reduce(logits.astype(np.float64))
    assert found.tokens[0] == logits.argmax()
    assert found.logprobs[0].logprob == pytest.approx(normed.max(), abs=1e-5)


def test_everything_repaired_gives_the_bits_of_the_whole_prompt(runner: CpuRunner) -> None:
    method = replace(SHARE, ratio=1.0)
    assert same(ask(after(engine_of(runner, method), DONOR), EDITED), exact(runner, EDITED))


def test_a_donor_that_is_equal_up_to_the_last_token_is_an_exact_prefix(runner: CpuRunner) -> None:
    method = replace(SHARE, ratio=0.0)
    again = [*DONOR[:-1], 8]
    assert same(ask(after(engine_of(runner, method), DONOR), again), exact(runner, again))


def test_without_a_donor_the_prompt_is_computed(runner: CpuRunner) -> None:
    for donor in ([1, *text(80, 9)], [2, *text(100, 9), *BODY[:30]]):  # nothing, or too little
        engine = after(engine_of(runner), donor)
        assert same(ask(engine, EDITED), exact(runner, EDITED))
        assert engine.stats().reused_tokens == 0


def test_as_many_rows_run_as_the_ratio_says_and_text_after_an_edit_is_reused(
    runner: CpuRunner,
) -> None:
    engine = after(engine_of(runner), DONOR)
    before = engine.stats().computed_tokens
    ask(engine, EDITED)
    copied, repaired = 149, int(0.2 * 149)
    edited = len(EDITED) - 1 - copied
    rows = -(-(len(EDITED) - 1 + 2 * (edited + repaired)) // 3) + 1 + PARAMS.max_tokens - 1
    assert engine.stats().computed_tokens - before == rows
    assert engine.stats().reused_tokens == copied - repaired


def test_the_donor_is_the_text_that_most_can_be_taken_from(runner: CpuRunner) -> None:
    longest = [1, *BODY[20:80], *text(100, 30)]  # has the longest span of all, but fewer tokens
    engine = after(engine_of(runner), longest, [1, *BODY[80:140], 9, *BODY[:70]])
    ask(engine, [2, *BODY, 3])
    assert engine.stats().reused_tokens == 130 - int(0.2 * 130)


def test_trimmed_ends_of_spans_are_computed(runner: CpuRunner) -> None:
    engine = after(engine_of(runner, replace(SHARE, trim=2)), DONOR)
    ask(engine, [2, *BODY, 3])
    assert engine.stats().reused_tokens == 146 - int(0.2 * 146)


@dataclass(frozen=True)
class Recording(KVShare):
    """Keeps what it was shown last."""

    shown: list[Float64Array] = field(default_factory=list, hash=False, compare=False)

    def repaired(self, *shown: Float64Array) -> Int64Array:
        self.shown[:] = shown
        return super().repaired(*shown)


@pytest.mark.parametrize("budget", [5, 64, 512])
def test_attention_is_that_of_the_edited_rows(runner: CpuRunner, budget: int) -> None:
    method = Recording(check_layer=0, eps=0.0, refresh=0)
    ask(after(engine_of(runner, method, token_budget=budget), DONOR), EDITED)
    _, _, attention = method.shown
    weights = dense_attention(runner, EDITED)[0]  # the first layer sees nothing of copies
    copied = [*range(21, 81), *range(82, 131), *range(140, 180)]
    edited = [row for row in range(len(EDITED) - 1) if row not in copied]
    assert len(attention) == len(copied)
    np.testing.assert_allclose(attention, weights[edited][:, copied].sum(axis=0), rtol=1e-4)


@pytest.mark.parametrize("method", [SHARE, WATCHING], ids=["once", "twice"])
@pytest.mark.parametrize("budget", [5, 64, 512])
def test_chunks_and_other_requests_change_no_bit(
    runner: CpuRunner, method: KVShare, budget: int
) -> None:
    alone = ask(after(engine_of(runner, method, token_budget=512), DONOR), EDITED)
    engine = after(engine_of(runner, method, token_budget=budget, step_cost=FixedCost(0.0)), DONOR)
    others = [asked(f"o{seed}", [1, *text(20 * seed, 50 + seed)], "none") for seed in range(3)]
    found = serve(engine, others, arrivals={2: [asked("r", EDITED)]})
    assert same(found["r", 0], alone)
    assert same(found["o2", 0], exact(runner, [1, *text(40, 52)]))


def test_rows_that_the_answer_attends_to_are_repaired_while_it_is_written(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[int]] = []
    run_rows = SharedSequence.run_rows

    def record(self, sequence, rows, hidden, first, end):  # type: ignore[no-untyped-def]
        if sequence.computed > sequence.prompt_length:
            ran.append(rows.tolist())
        return run_rows(self, sequence, rows, hidden, first, end)

    monkeypatch.setattr(SharedSequence, "run_rows", record)
    engine = after(engine_of(runner, WATCHING), DONOR)
    before = engine.stats().computed_tokens
    ask(engine, EDITED)
    assert len(ran) == (PARAMS.max_tokens - 1) // WATCHING.period
    assert all(len(rows) == WATCHING.refresh for rows in ran)
    every = [row for rows in ran for row in rows]
    assert len(set(every)) == len(every), "none is repaired twice"
    once = after(engine_of(runner), DONOR)
    started = once.stats().computed_tokens
    ask(once, EDITED)
    extra = engine.stats().computed_tokens - before - (once.stats().computed_tokens - started)
    assert extra == len(every)


def test_all_copied_rows_repaired_while_writing_are_those_of_the_whole_prompt(
    runner: CpuRunner,
) -> None:
    """Where nothing else was computed over them, and all are repaired at once."""
    prompt = [2, *BODY, 3]
    method = replace(WATCHING, ratio=0.0, refresh=1000, period=1)
    for repairs, each in ((True, method), (False, replace(method, refresh=0))):
        engine = after(engine_of(runner, each), DONOR)
        engine.add(asked("r", prompt))
        while engine._queues.sequences_of("r")[0].length < len(prompt) + 3:
            engine.step()
        (sequence,) = engine._queues.sequences_of("r")
        assert isinstance(sequence.method, SharedSequence)
        found = sequence.method.read_kv(sequence.held.slots[: len(prompt) - 1], 2)
        serve(engine)
        ask(engine, prompt, "none")
        slots = engine._queues.pool.cache.find("", np.array(prompt[:-1], np.int32))
        expected = sequence.method.read_kv(slots, 2)
        assert np.array_equal(found.values, expected.values) == repairs
        assert np.array_equal(found.keys, expected.keys) == repairs


def test_kv_that_is_repaired_later_is_not_cached(runner: CpuRunner) -> None:
    engine = after(engine_of(runner, WATCHING), DONOR)
    ask(engine, EDITED)
    assert ask(engine, [*EDITED, 5], "none").cached_tokens == 0
    assert ask(engine, [*EDITED, 5, 6]).cached_tokens > 0  # what has just been computed


def test_answers_to_one_prompt_share_its_kv_and_it_stays_as_it_is(runner: CpuRunner) -> None:
    three = EngineSamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0, n=3)
    single = ask(after(engine_of(runner), DONOR), EDITED)
    engine = after(engine_of(runner, WATCHING), DONOR)
    found = serve(engine, [request("r", EDITED, three, method="share")])
    assert all(same(found["r", index], single) for index in range(3))


def test_another_tenant_finds_nothing(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), DONOR)
    assert same(ask(engine, EDITED, tenant="bob"), exact(runner, EDITED))
    assert engine.stats().reused_tokens == 0


@pytest.mark.parametrize("tokens", [[7], [7, 8], [2, *BODY[:4]], [2, *BODY], [1, *text(30, 70)]])
def test_short_prompts_and_all_or_nothing_reused(runner: CpuRunner, tokens: list[int]) -> None:
    engine = after(engine_of(runner, replace(SHARE, ratio=1.0)), DONOR)
    assert same(ask(engine, tokens), exact(runner, tokens))


def test_a_donor_that_is_evicted_while_a_request_waits_is_not_used(llama: Checkpoint) -> None:
    runner = CpuRunner.load(llama, slots=330, threads=1, weights="f32", kv_cache_dtype="f32")
    engine = after(engine_of(runner, batching=SarathiServe(128, 1)), DONOR)
    filler = asked("f", [7, *text(290, 8)], "none")
    found, estimates = serve_waiting(engine, [filler, asked("r", EDITED)])
    assert estimates[0] > 0, "it was there on arrival"
    assert same(found["r", 0], exact(runner, EDITED))
    assert engine.stats().reused_tokens == 0
    runner.close()


@pytest.mark.parametrize("steps", [3, 8])
def test_preempted_or_cancelled_at_any_step_it_leaves_no_slot_behind(
    runner: CpuRunner, steps: int
) -> None:
    engine = after(engine_of(runner, WATCHING, token_budget=16), DONOR)
    prompts = [asked("r", EDITED), asked("s", [2, *BODY, 3])]
    found = serve(engine, prompts, after_step=preempting_every(steps))
    assert len(found["r", 0].tokens) == PARAMS.max_tokens
    for step in range(2, 40, 6):
        engine = after(engine_of(runner, WATCHING, token_budget=16), DONOR)
        found = serve(engine, [asked("r", EDITED)], cancellations={step: "r"})
        assert found["r", 0].finish_reason in ("cancelled", "length")


def test_the_queue_order_counts_what_it_can_take_and_changes_no_answer(runner: CpuRunner) -> None:
    by_hits = OrderedAdmission(SarathiServe(128, 1), HighestHitRate())
    engine = after(engine_of(runner, batching=by_hits), DONOR)
    ends: list[str] = []

    def note(one: Engine) -> None:
        for name in ("new", "edited"):
            if name not in ends and not one._queues.sequences_of(name):
                ends.append(name)

    prompts = {"busy": [9, 9], "new": [1, *text(120, 80)], "edited": EDITED}
    found = serve(
        engine, [asked(name, tokens) for name, tokens in prompts.items()], after_step=note
    )
    assert ends == ["edited", "new"]
    assert same(found["edited", 0], ask(after(engine_of(runner), DONOR), EDITED))
    assert same(found["new", 0], exact(runner, prompts["new"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("ratio=1.5", "ratio must be from 0 to 1, not 1.5"),
        ("share=nan", "share must be from 0 to 1, not nan"),
        ("score=luck", "score must be one of both, deviation, attention, not 'luck'"),
        ("period=0", "period must be at least 1, not 0"),
        ("eps=-1", "eps must be 0 or more, not -1"),
        ("refresh=-1", "refresh must be 0 or more, not -1"),
    ],
)
def test_bad_options_are_one_clear_line(options: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_method(f"kvshare:{options}")
