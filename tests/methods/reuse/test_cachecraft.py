"""Cache-Craft: what its formulas give, what it keeps of chunks, and what it recomputes."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from naive_blend import NaiveBlend, dense_attention
from tiny_checkpoints import VOCAB

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.errors import InvalidRequestError
from midfill.kv.donor_index import DonorIndex
from midfill.methods.registry import resolve_method
from midfill.methods.reuse import cachecraft
from midfill.methods.reuse import sequence as blending
from midfill.methods.reuse.cachecraft import (
    CacheCraft,
    Variant,
    VariantStore,
    _digest,
    context_impact,
    order_penalty,
    prefix_overlap,
)
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answer, build_engine, preempting_every, request, same, serve, serve_waiting

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
CRAFT = CacheCraft(every=1)


# --- formulas


def test_impact_is_that_of_the_paper() -> None:
    # Attention 6 to 3 tokens and 2 to 5, of 4 tokens, which pay 8 to themselves.
    external = 6 / (4 * 3) + 2 / (4 * 5)
    internal = 8 / 16
    expected = 1 / (1 + np.exp(-external / internal))
    assert context_impact([6, 2], [3, 5], 8, 4) == pytest.approx(expected)
    assert context_impact([0, 0], [3, 5], 8, 4) == 0.5
    assert context_impact([1], [3], 0, 4) == 1.0
    assert context_impact([], [], 0, 1) == 0.5


def test_overlap_counts_attention_and_not_chunks() -> None:
    old, inter = [b"a", b"b", b"c"], [6.0, 1.0, 3.0]
    assert prefix_overlap(old, inter, [b"a"]) == pytest.approx(0.6)
    assert prefix_overlap(old, inter, [b"c", b"b"]) == pytest.approx(0.4)
    assert prefix_overlap(old, inter, [b"c", b"x", b"b", b"y"]) == pytest.approx(0.4)
    assert prefix_overlap(old, inter, [b"x"]) == 0.0
    assert prefix_overlap([], [], []) == 1.0
    assert prefix_overlap([], [], [b"a"]) == 0.0


def test_swapping_two_common_chunks_changes_the_penalty_alone() -> None:
    old, inter = [b"a", b"b", b"c"], [6.0, 1.0, 3.0]
    assert order_penalty(old, [b"a", b"b", b"c"]) == 0.0
    assert order_penalty(old, [b"b", b"a", b"c"]) == pytest.approx(1 / 3)
    assert order_penalty(old, [b"c", b"b", b"a"]) == 1.0
    assert order_penalty(old, [b"a", b"x"]) == 0.0, "one common chunk has no order"
    assert prefix_overlap(old, inter, [b"b", b"a", b"c"]) == 1.0


def variant(prefix: str, inter: list[float], impact: float = 0.75, **fields: object) -> Variant:
    chunks = tuple(each.encode() for each in prefix)
    return Variant(chunks, tuple(inter), impact, np.zeros(4, np.float32), 0, 0, 1, **fields)


def test_overhead_by_hand() -> None:
    found = variant("abc", [6, 1, 3])
    assert found.overhead([b"a", b"b", b"c"], 1.0) == 0.0
    assert found.overhead([b"a", b"c"], 1.0) == pytest.approx(0.75 * 0.1)
    assert found.overhead([b"c", b"a"], 1.0) == pytest.approx(0.75)
    assert found.overhead([b"x"], 0.5) == pytest.approx(0.375)
    assert found.overhead([b"x"], 2.0) == 1.0
    assert found.overhead([b"x"], 0.0) == 0.0


@given(st.lists(st.integers(0, 3), max_size=20), st.floats(0, 1))
def test_the_tokens_that_look_back_most_are_repaired(scores: list[int], overhead: float) -> None:
    count = int(np.ceil(overhead * len(scores)))
    ranked = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    found = CRAFT.repaired(np.array(scores, np.float32), overhead)
    assert found.tolist() == sorted(ranked[:count])


# --- variants


def index_with(slots: int) -> DonorIndex:
    index = DonorIndex(slots)
    index.added("ann", np.arange(slots, dtype=np.int32), np.arange(slots, dtype=np.int32), -1)
    return index


def test_the_variant_with_the_better_prefix_is_chosen() -> None:
    store, index = VariantStore(CRAFT), index_with(4)
    first, second = variant("ab", [1, 9]), variant("ac", [1, 9])
    for each in (first, second):
        store.add("ann", b"k", each)
    found = store.best("ann", b"k", [b"a", b"c"], index)
    assert found == (second, 0.0)
    assert store.best("bob", b"k", [b"a", b"c"], index) is None


def test_a_variant_behind_the_same_prefix_takes_the_place_of_the_last() -> None:
    store = VariantStore(CRAFT)
    for impact in (0.6, 0.7):
        store.add("ann", b"k", variant("ab", [1, 9], impact))
    assert [each.impact for each in store.variants("ann", b"k")] == [0.7]


def test_the_variant_of_least_worth_is_forgotten() -> None:
    store = VariantStore(replace(CRAFT, variants=2))
    one, two, three = (variant(prefix, [1]) for prefix in "abc")
    store.add("ann", b"k", one)
    store.add("ann", b"k", two)
    store.use(one, 0.5)
    store.add("ann", b"k", three)
    assert store.variants("ann", b"k") == [one, three]


def test_cheap_variants_are_worth_more_and_worth_decays() -> None:
    store = VariantStore(replace(CRAFT, variants=2, decay=0.5))
    one, two, three = (variant(prefix, [1]) for prefix in "abc")
    store.add("ann", b"k", one)
    store.add("ann", b"k", two)
    store.use(one, 0.0)
    for _ in range(8):
        store.use(two, 1.0)
    store.add("ann", b"k", three)
    assert store.variants("ann", b"k") == [two, three], "it was used long ago"


def test_there_are_never_more_chunks_than_allowed_and_their_bytes_are_counted() -> None:
    store = VariantStore(replace(CRAFT, chunks=3))
    for number in range(9):
        store.add("ann", b"%d" % number, variant("a", [1]))
        store.use(store.variants("ann", b"%d" % number)[0], 1.0 - number / 10)
        assert len(store) <= 3
    assert store.nbytes == 3 * (16 + 1 + 8)


def test_variants_whose_text_is_evicted_are_forgotten() -> None:
    store, index = VariantStore(CRAFT), index_with(4)
    store.add("ann", b"k", variant("a", [1]))
    index.removed(np.arange(4, dtype=np.int32))
    assert store.best("ann", b"k", [b"a"], index) is None
    assert len(store) == 0


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


SYSTEM, QUESTION = [1, *text(11, 90)], text(20, 91)
CHUNKS = {name: text(30, seed) for seed, name in enumerate("ABCD")} | {"t": [9]}


@dataclass(frozen=True)
class Shown:
    tokens: list[int]
    bounds: tuple[int, ...]

    def asked(self, name: str = "r", method: str = "craft", **fields: object) -> EngineRequest:
        return request(name, self.tokens, PARAMS, method=method, contexts=self.bounds, **fields)


def shown(order: str, question: list[int] = QUESTION, system: list[int] = SYSTEM) -> Shown:
    tokens, bounds = list(system), [len(system)]
    for name in order:
        tokens += CHUNKS[name]
        bounds.append(len(tokens))
    return Shown(tokens + question, tuple(bounds))


def engine_of(runner: CpuRunner, method: CacheCraft = CRAFT, **options: object) -> Engine:
    return build_engine(runner, methods={"craft": method, "none": None}, **options)


def ask(engine: Engine, prompt: Shown, method: str = "craft", **fields: object) -> Answer:
    return serve(engine, [prompt.asked(method=method, **fields)])["r", 0]


def exact(runner: CpuRunner, prompt: Shown) -> Answer:
    return ask(engine_of(runner), prompt, "none")


def store_of(engine: Engine, method: CacheCraft = CRAFT) -> VariantStore:
    kind = next(kind for kind in engine._methods._kinds if isinstance(kind, blending.ReuseKind))
    return kind.state_of(method.statistics, lambda: VariantStore(method))


@pytest.mark.parametrize("budget", [7, 64, 512])
def test_statistics_are_sums_of_the_whole_attention_matrix(runner: CpuRunner, budget: int) -> None:
    prompt = shown("AtB")
    engine = engine_of(runner, token_budget=budget)
    ask(engine, prompt)
    attention = dense_attention(runner, prompt.tokens)
    bounds = (0, *prompt.bounds)
    for number, name in enumerate("AtB"):
        start, end = bounds[number + 1], bounds[number + 2]
        rows = attention[:, start:end]
        inter = [rows[:, :, a:b].sum(axis=(1, 2)).mean() for a, b in pairwise(bounds[: number + 2])]
        intra = rows[:, :, start:end].sum(axis=(1, 2)).mean()
        (found,) = variants_of(engine, CHUNKS[name])
        assert found.inter == pytest.approx(inter, rel=1e-4)
        np.testing.assert_allclose(found.scores, rows[:, :, :start].sum(axis=2).mean(0), rtol=1e-4)
        sizes = [b - a for a, b in pairwise(bounds[: number + 2])]
        impact = context_impact(inter, sizes, intra, end - start)
        assert found.impact == pytest.approx(impact, rel=1e-4)


def variants_of(engine: Engine, chunk: list[int], method: CacheCraft = CRAFT) -> list[Variant]:
    return store_of(engine, method).variants("", _digest(np.array(chunk, np.int32)))


def rows_computed(engine: Engine, prompt: Shown) -> tuple[int, int]:
    """Return (rows times layers / layers, reused tokens) of a prompt."""
    before = engine.stats()
    ask(engine, prompt)
    after = engine.stats()
    return (
        after.computed_tokens - before.computed_tokens,
        after.reused_tokens - before.reused_tokens,
    )


def test_an_identical_prefix_needs_no_repair(runner: CpuRunner) -> None:
    engine = engine_of(runner)
    first, other = shown("AB"), shown("AB", text(20, 77))
    ask(engine, first)
    (found,) = variants_of(engine, CHUNKS["B"])
    assert found.overhead(found.prefix, 1.0) == 0.0
    assert same(ask(engine, other), exact(runner, other))


def test_a_share_of_one_gives_the_bits_of_the_whole_prompt(runner: CpuRunner) -> None:
    method = CacheCraft(every=1, alpha=1000.0)
    engine = engine_of(runner, method)
    ask(engine, shown("ABC"))
    other = shown("CBA", system=[2, *SYSTEM[1:]])  # no chunk has seen any of its prefix
    assert same(ask(engine, other), exact(runner, other))
    assert engine.stats().reused_tokens == 0


class RepairsAll(CacheCraft):
    def repaired(self, scores: np.ndarray, overhead: float) -> np.ndarray:
        return np.arange(len(scores))


@pytest.mark.parametrize("budget", [9, 512])
def test_all_copied_tokens_repaired_give_the_bits_of_the_whole_prompt(
    runner: CpuRunner, budget: int
) -> None:
    engine = engine_of(runner, RepairsAll(every=1), token_budget=budget)
    ask(engine, shown("ABC"))
    found = ask(engine, shown("CDBA"))
    assert same(found, exact(runner, shown("CDBA")))


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_as_many_rows_run_as_the_shares_say(runner: CpuRunner, alpha: float) -> None:
    method = CacheCraft(every=1, alpha=alpha)
    engine = engine_of(runner, method)
    ask(engine, shown("AB"))
    prompt = shown("DBA")  # D is new
    ids = [SYSTEM, CHUNKS["D"], CHUNKS["B"]]
    prefix = [_digest(np.array(each, np.int32)) for each in ids]
    again = 0
    for name, before in (("B", prefix[:2]), ("A", prefix)):
        (found,) = variants_of(engine, CHUNKS[name], method)
        overhead = found.overhead(before, alpha)
        again += int(np.ceil(overhead * 30))
    rows, reused = rows_computed(engine, prompt)
    assert reused == 60 - again
    assert rows == 30 + again + len(QUESTION) + PARAMS.max_tokens - 1


def test_the_answer_begins_as_a_naive_repair_does(runner: CpuRunner) -> None:
    """One row of one layer at a time, over copies that are turned by hand."""
    engine = engine_of(runner)
    first, prompt = shown("AB"), shown("BA")
    ask(engine, first)
    prefix = [SYSTEM]
    again: set[int] = set()
    places: dict[int, int] = {}
    for number, name in enumerate("BA"):
        ids = [_digest(np.array(each, np.int32)) for each in prefix]
        (found,) = variants_of(engine, CHUNKS[name])
        chosen = CRAFT.repaired(found.scores, found.overhead(ids, 1.0))
        again |= {prompt.bounds[number] + int(token) for token in chosen}
        places |= {prompt.bounds[number] + i: found.start + i for i in range(30)}
        prefix.append(CHUNKS[name])
    answer = ask(engine, prompt)
    end, source = prompt.bounds[-1], first.tokens
    logits = NaiveBlend(runner, 400).logits(prompt.tokens, source, places, end, 0, lambda *_: again)
    normed = logits - np.logaddexp.reduce(logits.astype(np.float64))
    assert answer.tokens[0] == logits.argmax()
    assert answer.logprobs[0].logprob == pytest.approx(normed.max(), abs=1e-5)
    assert 0 < len(again) < 60


def test_a_chunk_computed_behind_reused_ones_is_reused_as_well(runner: CpuRunner) -> None:
    engine = engine_of(runner)
    ask(engine, shown("AB"))
    ask(engine, shown("BC"))
    assert len(variants_of(engine, CHUNKS["C"])) == 1
    _, reused = rows_computed(engine, shown("DC"))
    assert reused > 0


def test_reused_chunks_make_no_variant(runner: CpuRunner) -> None:
    engine = engine_of(runner)
    ask(engine, shown("AB"))
    ask(engine, shown("BA"))
    assert [len(variants_of(engine, CHUNKS[name])) for name in "AB"] == [1, 1]


def test_edges(runner: CpuRunner) -> None:
    """A chunk of one token, one that occurs twice, none that is known, alpha 0."""
    for alpha in (0.0, 1.0):
        engine = engine_of(runner, CacheCraft(every=1, alpha=alpha))
        assert same(ask(engine, shown("D")), exact(runner, shown("D")))
        assert same(ask(engine, shown("AtA")), exact(runner, shown("AtA")))
        for order in ("tDA", "AA", "DtAA"):
            assert len(ask(engine, shown(order)).tokens) == PARAMS.max_tokens


def test_chunks_that_share_a_digest_copy_nothing_of_each_other(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cachecraft, "_digest", lambda tokens: b"")
    engine = engine_of(runner, CacheCraft(every=1, alpha=0.0))
    ask(engine, shown("AB"))
    assert same(ask(engine, shown("CD")), exact(runner, shown("CD")))
    assert engine.stats().reused_tokens == 0
    ask(engine, shown("DC"))
    assert engine.stats().reused_tokens > 0, "equal text is still found"


def test_blended_kv_is_found_by_no_request_that_expects_exact_kv(runner: CpuRunner) -> None:
    engine = engine_of(runner)
    ask(engine, shown("AB"))
    ask(engine, shown("BA"))
    assert same(ask(engine, shown("BA"), "none"), exact(runner, shown("BA")))


def test_another_tenant_reuses_nothing(runner: CpuRunner) -> None:
    engine = engine_of(runner)
    ask(engine, shown("AB"))
    assert same(ask(engine, shown("BA"), tenant="bob"), exact(runner, shown("BA")))


def test_prompts_without_files_are_served_as_ever(runner: CpuRunner) -> None:
    engine = engine_of(runner)
    plain = Shown(shown("AB").tokens, ())
    assert same(ask(engine, plain), exact(runner, plain))
    assert len(store_of(engine)) == 0


@pytest.mark.parametrize("budget", [5, 64, 512])
def test_chunks_and_other_requests_change_no_bit(runner: CpuRunner, budget: int) -> None:
    engines = [engine_of(runner, token_budget=size) for size in (512, budget)]
    for engine in engines:
        ask(engine, shown("ABC"))
    alone = ask(engines[0], shown("DCA"))
    others = [request(f"o{seed}", [1, *text(20 * seed, 50 + seed)], PARAMS) for seed in range(3)]
    found = serve(engines[1], others, arrivals={2: [shown("DCA").asked()]})
    assert same(found["r", 0], alone)


def test_text_that_is_evicted_while_a_request_waits_is_computed(llama: Checkpoint) -> None:
    runner = CpuRunner.load(llama, slots=240, threads=1, weights="f32", kv_cache_dtype="f32")
    engine = engine_of(runner, batching=SarathiServe(128, 1))
    ask(engine, shown("AB"))
    filler = Shown([7, *text(200, 8)], ())
    found, estimates = serve_waiting(engine, [filler.asked("f", "none"), shown("BA").asked()])
    assert estimates[0] > 0, "it was there on arrival"
    assert same(found["r", 0], exact(runner, shown("BA")))
    assert engine.stats().reused_tokens == 0
    runner.close()


@pytest.mark.parametrize("steps", [2, 5])
def test_preempted_and_cancelled_requests_leave_no_slot_behind(
    runner: CpuRunner, steps: int
) -> None:
    engine = engine_of(runner, token_budget=16)
    ask(engine, shown("ABC"))
    prompts = [shown("CBA").asked("r"), shown("BCA").asked("s")]
    found = serve(engine, prompts, after_step=preempting_every(steps), cancellations={6: "s"})
    assert len(found["r", 0].tokens) == PARAMS.max_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("alpha=-1", "alpha must be 0 or more, not -1"),
        ("alpha=nan", "alpha must be 0 or more, not nan"),
        ("every=0", "every must be at least 1, not 0"),
        ("variants=0", "variants must be at least 1, not 0"),
        ("decay=0", "decay must be above 0 and at most 1, not 0"),
    ],
)
def test_bad_options_are_one_clear_line(options: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        resolve_method(f"cachecraft:{options}")
