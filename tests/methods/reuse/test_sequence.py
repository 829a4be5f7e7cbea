"""Prompts made of text that stands elsewhere in the cache, on a tiny model."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from naive_blend import NaiveBlend
from tiny_checkpoints import VOCAB, write_variant

from midfill.arrays import Int64Array
from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.kv import donor_index
from midfill.kv.pool import KVPool
from midfill.kv.token_runs import find_runs
from midfill.methods.reuse import sequence as blending
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.reuse.method import LayerKV
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import (
    Answer,
    FixedCost,
    build_engine,
    preempting_every,
    request,
    same,
    serve,
    serve_waiting,
    torch_runner,
)

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
BLEND = CacheBlend(ratio=0.2, check_layer=0, min_run=8)
ALL = replace(BLEND, ratio=1.0)


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=900, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def small_pool(llama: Checkpoint) -> Iterator[CpuRunner]:
    """Room for about two prompts, so that requests wait, are preempted and evict sources."""
    runner = CpuRunner.load(llama, slots=330, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


@pytest.fixture(autouse=True, scope="module")
def blends_whatever_it_saves() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blending, "_MIN_SAVED_ROWS", 0)
        yield


def text(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(5, VOCAB), k=length)


HEAD, BODY, TAIL = text(40, 1), text(120, 2), text(60, 3)
FIRST = [1, *HEAD, *BODY, 2, *TAIL, 3]
JUMP = [1, *HEAD, *TAIL, 2, *BODY, 3, *text(9, 4)]


def ask(engine: Engine, tokens: list[int], method: str = "blend", **fields: object) -> Answer:
    return serve(engine, [asked("r", tokens, method, **fields)])["r", 0]


def asked(name: str, tokens: list[int], method: str = "blend", **fields: object) -> EngineRequest:
    return request(name, tokens, PARAMS, method=method, **fields)


def engine_of(runner: Runner, method: object = BLEND, **options: object) -> Engine:
    return build_engine(runner, methods={"blend": method, "none": None}, **options)


def after(engine: Engine, *prompts: list[int]) -> Engine:
    """The engine once it has answered some prompts in full."""
    for tokens in prompts:
        ask(engine, tokens, "none")
    return engine


def exact(runner: CpuRunner, tokens: list[int]) -> Answer:
    return ask(engine_of(runner), tokens, "none")


def naive_logits(
    runner: CpuRunner, tokens: list[int], source: list[int], prefix: int, method: CacheBlend
) -> np.ndarray:
    ids = [np.array(one, np.int32) for one in (tokens[:-1], source)]
    runs = find_runs(ids[0], prefix, ids[1:], method.min_run)
    places = {run.start + i: run.source_start + i for run in runs for i in range(run.length)}

    def choose(copied: Int64Array, old: LayerKV, new: LayerKV) -> set[int]:
        deviation = [((new.values[i] - old.values[i]) ** 2).sum() for i in range(len(copied))]
        ranked = sorted(range(len(copied)), key=lambda i: -deviation[i])
        return {int(copied[i]) for i in ranked[: method.recomputed(len(copied))]}

    blend = NaiveBlend(runner, 400)
    return blend.logits(tokens, source, places, runs[-1].end, method.check_layer + 1, choose)


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.6, 1.0])
def test_the_answer_begins_as_the_naive_blend_does(runner: CpuRunner, ratio: float) -> None:
    method = replace(BLEND, ratio=ratio)
    found = ask(after(engine_of(runner, method), FIRST), JUMP)
    # The naive prefix is computed like everything else, which gives the same KV.
    logits = naive_logits(runner, JUMP, FIRST, 1 + len(HEAD), method)
    assert found.tokens[0] == logits.argmax()
    normed = logits - np.logaddexp.reduce(logits.astype(np.float64))
    assert found.logprobs[0].logprob == pytest.approx(normed.max(), abs=1e-6)


def test_all_tokens_computed_again_give_the_bits_of_the_whole_prompt(runner: CpuRunner) -> None:
    for source in (FIRST, JUMP[60:], [9, *BODY]):
        found = ask(after(engine_of(runner, ALL), source), JUMP)
        assert same(found, exact(runner, JUMP))


def test_tokens_that_keep_foreign_kv_change_the_answer(runner: CpuRunner) -> None:
    found = ask(after(engine_of(runner), FIRST), JUMP)
    assert found.logprobs[0] != exact(runner, JUMP).logprobs[0]


def test_as_many_rows_run_as_the_method_says(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), FIRST)
    before = engine.stats().computed_tokens
    serve(engine, [asked("r", JUMP)])
    copied = len(TAIL) + len(BODY)
    blended = copied + 1
    deep = 1 + BLEND.recomputed(copied)
    # In the first of three layers all rows, in two the chosen ones; then the end, and the answer.
    ordinary = len(JUMP) - 1 - len(HEAD) - blended + PARAMS.max_tokens - 1
    expected = -(-(blended + 2 * deep) // 3) + ordinary
    assert engine.stats().computed_tokens - before == pytest.approx(expected, abs=2)
    assert engine.stats().reused_tokens == copied - BLEND.recomputed(copied)


def test_what_was_copied_is_reported(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), FIRST)
    engine.add(asked("r", JUMP))
    outputs = []
    while engine.has_work():
        outputs += engine.step()
    copied = len(TAIL) + len(BODY)
    assert {one.reused_tokens for one in outputs} == {copied - BLEND.recomputed(copied)}
    assert {one.cached_tokens for one in outputs} == {1 + len(HEAD)}


def test_the_next_keystroke_continues_on_blended_kv(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), FIRST)
    answer = ask(engine, JUMP)
    before = engine.stats().computed_tokens
    typed = JUMP + answer.tokens[:3]
    engine.add(asked("r", typed))
    outputs = engine.step()
    assert outputs[0].token_ids == answer.tokens[3:4]
    assert outputs[0].logprobs == answer.logprobs[3:4]
    assert engine.stats().computed_tokens - before == 1
    assert outputs[0].cached_tokens == 1 + len(HEAD)
    assert outputs[0].reused_tokens == len(typed) - 1 - 1 - len(HEAD)
    found = serve(engine)
    assert found["r", 0].tokens[: len(answer.tokens) - 4] == answer.tokens[4:]


def test_once_a_prompt_is_cached_the_next_keystroke_is_exact(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), FIRST)
    ask(engine, JUMP)
    typed = [*JUMP, 7, 8]
    found = ask(after(engine, JUMP), typed)
    assert found.cached_tokens == len(JUMP)
    assert same(found, exact(runner, typed))


def test_a_branch_goes_with_the_exact_prefix_that_it_continues(llama: Checkpoint) -> None:
    runner = CpuRunner.load(llama, slots=700, threads=1, weights="f32", kv_cache_dtype="f32")
    engine = after(engine_of(runner, replace(BLEND, ratio=0.0)), FIRST)
    ask(engine, JUMP)
    after(engine, *([seed, *text(330, seed)] for seed in (21, 22)))  # evicts all of it
    found = ask(engine, [*JUMP, 7])
    assert found.cached_tokens == 0
    assert same(found, exact(runner, [*JUMP, 7]))
    runner.close()


def test_a_request_finds_only_branches_of_its_own_method(runner: CpuRunner) -> None:
    methods = {"blend": BLEND, "all": ALL, "none": None}
    engine = after(build_engine(runner, methods=methods), FIRST)
    ask(engine, JUMP)
    typed = [*JUMP, 7]
    assert same(ask(engine, typed, "all"), exact(runner, typed))


def test_another_tenant_finds_no_branch(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), FIRST)
    ask(engine, JUMP)
    found = ask(engine, [*JUMP, 7], tenant="bob")
    assert found.cached_tokens == 0
    assert same(found, exact(runner, [*JUMP, 7]))


def test_blended_kv_is_found_by_no_request_that_expects_exact_kv(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), FIRST)
    ask(engine, JUMP)
    again = ask(engine, JUMP, "none")
    assert again.cached_tokens == 1 + len(HEAD)
    assert same(again, exact(runner, JUMP))


def test_a_prompt_that_was_computed_meanwhile_is_exact(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), FIRST)
    ask(engine, JUMP)
    assert same(ask(after(engine, JUMP), JUMP), exact(runner, JUMP))


def test_nothing_is_copied_from_other_tenants(runner: CpuRunner) -> None:
    engine = after(engine_of(runner), FIRST)
    assert same(ask(engine, JUMP, tenant="bob"), exact(runner, JUMP))


def test_a_changed_token_is_computed(runner: CpuRunner) -> None:
    changed = JUMP.copy()
    changed[1 + len(HEAD) + len(TAIL)] = 4  # between the two
    method = replace(BLEND, ratio=0.0)
    ask(engine := after(engine_of(runner, method), FIRST), changed)
    assert engine.stats().reused_tokens == len(TAIL) + len(BODY)
    changed[150] = 4  # now within the body as well
    ask(engine := after(engine_of(runner, method), FIRST), changed)
    assert engine.stats().reused_tokens == len(TAIL) + len(BODY) - 1


@pytest.mark.parametrize(
    "tokens",
    [[1], [1, *text(300, 9)], [1, 1, 1, 1], [1, *text(7, 9)]],
    ids=["one token", "new text", "a token again", "less than a run"],
)
def test_prompts_without_known_text_are_computed(runner: CpuRunner, tokens: list[int]) -> None:
    assert same(ask(after(engine_of(runner), FIRST), tokens), exact(runner, tokens))


def test_an_empty_cache_changes_nothing(runner: CpuRunner) -> None:
    assert same(ask(engine_of(runner), JUMP), exact(runner, JUMP))


def test_text_may_occur_twice(runner: CpuRunner) -> None:
    twice = [1, *BODY, 2, *BODY, 3]
    source = [9, *BODY]
    assert same(ask(after(engine_of(runner, ALL), source), twice), exact(runner, twice))
    ask(engine := after(engine_of(runner, replace(BLEND, ratio=0.0)), source), twice)
    assert engine.stats().reused_tokens == 2 * len(BODY)


@dataclass(frozen=True)
class Recording(CacheBlend):
    """Keeps what it was shown last."""

    shown: list[LayerKV] = field(default_factory=list, hash=False, compare=False)

    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        self.shown[:] = copied, computed
        return super().select(copied, computed)


def shown(runner: CpuRunner, layer: int, sources: list[list[int]], tokens: list[int]) -> LayerKV:
    """Return by how much KV of copied tokens is off in a layer: computed minus copied."""
    method = Recording(ratio=0.2, check_layer=layer, min_run=8)
    ask(after(engine_of(runner, method), *sources), tokens)
    copied, computed = method.shown
    return LayerKV(computed.keys - copied.keys, computed.values - copied.values)


def test_in_the_first_layer_copied_kv_is_that_of_its_new_place(runner: CpuRunner) -> None:
    first = shown(runner, 0, [FIRST], JUMP)
    assert len(first.keys) == len(TAIL) + len(BODY)
    np.testing.assert_allclose(first.keys, 0, atol=1e-4)
    np.testing.assert_allclose(first.values, 0, atol=1e-5)
    second = shown(runner, 1, [FIRST], JUMP)
    assert np.square(second.keys).sum(axis=(1, 2)).mean() > 0.1
    assert np.square(second.values).sum(axis=(1, 2)).mean() > 0.1


def test_keys_that_are_not_turned_are_those_of_no_place(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = type(runner.cells).take
    monkeypatch.setattr(
        type(runner.cells), "take", lambda cells, at, shift, *rest: take(cells, at, None, *rest)
    )
    first = shown(runner, 0, [FIRST], JUMP)
    assert np.square(first.keys).sum(axis=(1, 2)).mean() > 0.1


def test_a_changed_token_changes_deviations_of_later_text_only(runner: CpuRunner) -> None:
    sources = [[7, *BODY], [9, *TAIL]]
    between = text(10, 31)
    found = []
    for token in between[4], 4:
        changed = [*between[:4], token, *between[5:]]
        found.append(shown(runner, 1, sources, [1, *BODY, *changed, *TAIL, 3]).values)
    np.testing.assert_array_equal(found[0][: len(BODY)], found[1][: len(BODY)])
    assert (found[0][len(BODY) :] != found[1][len(BODY) :]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("budget", [3, 17, 128, 512])
def test_chunks_and_other_requests_change_no_bit(runner: CpuRunner, budget: int) -> None:
    alone = ask(after(engine_of(runner, token_budget=512), FIRST), JUMP)
    engine = after(engine_of(runner, token_budget=budget), FIRST)
    others = {f"o{seed}": [1, *text(12 * seed, 50 + seed)] for seed in range(3)}
    found = serve(
        engine,
        [asked(name, tokens, "none") for name, tokens in others.items()],
        arrivals={2: [asked("r", JUMP)]},
    )
    assert same(found["r", 0], alone)
    for name, tokens in others.items():
        assert same(found[name, 0], exact(runner, tokens))


def test_decodes_go_on_while_a_prompt_is_blended(runner: CpuRunner) -> None:
    engine = after(engine_of(runner, token_budget=16), FIRST)
    engine.add(asked("decoding", [1, 5, 6], "none"))
    engine.step()
    engine.add(asked("r", JUMP))
    steps, blends = 0, True
    while blends:
        outputs = engine.step()
        steps += 1
        assert [output.request_id for output in outputs if output.token_ids] == ["decoding"]
        sequence = engine._queues.sequences_of("r")[0]
        blends = sequence.method.blends
    assert steps > 2
    serve(engine)


def test_answers_to_one_prompt_share_its_blended_kv(runner: CpuRunner) -> None:
    single = ask(after(engine_of(runner), FIRST), JUMP)
    three = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0, n=3)
    engine = after(engine_of(runner), FIRST)
    most = []

    def held(one: Engine) -> None:
        most.append(sum(s.kv.owned for s in one._queues.running if s.kv is not None))

    found = serve(engine, [request("r", JUMP, three, method="blend")], after_step=held)
    assert all(same(found["r", index], single) for index in range(3))
    assert max(most) < 2 * len(JUMP)


@pytest.mark.parametrize("method", [BLEND, ALL], ids=["some", "all"])
@pytest.mark.parametrize("steps", [3, 8, 13])
def test_preempted_answers_end_and_leave_no_slot_behind(
    runner: CpuRunner, method: CacheBlend, steps: int
) -> None:
    engine = after(engine_of(runner, method, token_budget=16), FIRST)
    prompts = {"r": JUMP, "s": [1, *BODY, 2, *HEAD, 3]}
    requests = [asked(name, tokens) for name, tokens in prompts.items()]
    found = serve(engine, requests, after_step=preempting_every(steps))
    assert engine.stats().preemptions > 0
    for name, tokens in prompts.items():
        assert len(found[name, 0].tokens) == 8
        if method is ALL:
            assert same(found[name, 0], exact(runner, tokens))


def test_cancelled_at_any_step_it_leaves_no_slot_behind(runner: CpuRunner) -> None:
    pair = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, n=2)
    for step in range(10):
        engine = after(engine_of(runner, token_budget=16), FIRST)
        cancelled = "r" if step % 2 else ("r", 1)
        found = serve(
            engine, [request("r", JUMP, pair, method="blend")], cancellations={step: cancelled}
        )
        assert found["r", 1].finish_reason == "cancelled"


def test_a_small_pool_evicts_sources_and_still_answers(llama: Checkpoint) -> None:
    runner = CpuRunner.load(llama, slots=300, threads=1, weights="f32", kv_cache_dtype="f32")
    engine = engine_of(runner, ALL)
    for seed in range(4):
        ask(engine, [1, *text(90, seed), 2, *BODY], "none")
        tokens = [1, *text(40, 30 + seed), *BODY, *text(5, seed)]
        found = ask(engine, tokens)
        expected = exact(runner, tokens)
        engine = engine_of(runner, ALL)
        assert same(found, expected)
    runner.close()


def test_text_that_is_evicted_while_a_request_waits_is_computed(small_pool: CpuRunner) -> None:
    engine = after(engine_of(small_pool, batching=SarathiServe(128, 1)), FIRST)
    filler = asked("f", [7, *text(290, 8)], "none")
    found, estimates = serve_waiting(engine, [filler, asked("r", JUMP)])
    assert estimates[0] > len(BODY), "all of it was there on arrival"
    assert same(found["r", 0], exact(small_pool, JUMP))
    assert engine.stats().reused_tokens == 0


def test_windows_that_share_a_hash_change_no_answer(runner: CpuRunner) -> None:
    alone = ask(after(engine_of(runner), FIRST), JUMP)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(donor_index, "_FACTOR", np.uint64(0))  # all windows have one hash
        patch.setattr(donor_index, "_MAX_PLACES", 10_000)
        assert same(ask(after(engine_of(runner), FIRST, [1, *text(90, 5)]), JUMP), alone)


def test_beside_prompts_that_prefill_by_layers_it_is_blended_in_chunks(runner: CpuRunner) -> None:
    alone = ask(after(engine_of(runner), FIRST), JUMP)
    engine = after(engine_of(runner, token_budget=16, by_layers=True), FIRST)
    assert engine.stats().layered_prompts == 1
    assert same(ask(engine, JUMP), alone)


@pytest.mark.parametrize("budget", [24, 128])
def test_drafts_change_no_bit(runner: CpuRunner, budget: int) -> None:
    typed = [*JUMP, *BODY[:6]]  # the body goes on like that, so drafts are proposed
    engines = [
        after(engine_of(runner, token_budget=budget, step_cost=cost), FIRST)
        for cost in (None, FixedCost(0.0))
    ]
    for tokens in (JUMP, typed):
        plain, drafted = (ask(engine, tokens) for engine in engines)
        assert same(drafted, plain)
    assert engines[1].stats().draft_tokens > 0


PIECES = [text(30, seed) for seed in range(60, 65)]
MADE_OF_PIECES = st.lists(st.integers(0, 4), min_size=1, max_size=5).map(
    lambda order: [1, *(token for piece in order for token in PIECES[piece])]
)


@given(
    prompts=st.lists(st.tuples(MADE_OF_PIECES, st.integers(0, 30)), min_size=2, max_size=6),
    cancelled=st.dictionaries(st.integers(1, 30), st.integers(0, 5), max_size=2),
    budget=st.sampled_from([7, 40, 128]),
    cost=st.sampled_from([None, FixedCost(0.0)]),
)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_order_of_requests_gives_whole_prompts_their_bits(
    small_pool: CpuRunner,
    prompts: list[tuple[list[int], int]],
    cancelled: dict[int, int],
    budget: int,
    cost: FixedCost | None,
) -> None:
    """With all tokens computed again, wherever KV is copied from leaves no trace."""
    engine = engine_of(small_pool, ALL, token_budget=budget, step_cost=cost)
    arrivals: dict[int, list[EngineRequest]] = {}
    for number, (tokens, step) in enumerate(prompts):
        arrivals.setdefault(step, []).append(asked(f"r{number}", tokens))
    cancellations = {step: f"r{number}" for step, number in cancelled.items()}
    found = serve(engine, arrivals=arrivals, cancellations=cancellations)
    for number, (tokens, _) in enumerate(prompts):
        answer = found[f"r{number}", 0]
        whole = exact(small_pool, tokens)
        count = len(answer.tokens)
        assert answer.tokens == whole.tokens[:count]
        assert answer.logprobs == whole.logprobs[:count]
        assert answer.finish_reason == "cancelled" or count == len(whole.tokens)


class Failing(CacheBlend):
    def select(self, copied: LayerKV, computed: LayerKV) -> Int64Array:
        raise RuntimeError("no choice")


def test_a_method_that_fails_ends_its_request_alone(runner: CpuRunner) -> None:
    failing = Failing(ratio=0.2, check_layer=0, min_run=8)
    engine = after(engine_of(runner, failing), FIRST)
    found = serve(engine, [asked("r", JUMP), asked("other", [1, *BODY], "none")])
    assert found["r", 0].finish_reason == "error"
    assert found["r", 0].error == "the method of reuse failed: no choice"
    assert same(found["other", 0], exact(runner, [1, *BODY]))


def test_memory_is_that_of_the_index_and_of_what_methods_remember(runner: CpuRunner) -> None:
    kind = blending.ReuseKind(runner, KVPool(runner.slots))
    assert kind.nbytes == 0
    remembered = kind.state_of(BLEND, lambda: np.zeros(5))
    assert kind.state_of(BLEND, lambda: np.zeros(9)) is remembered
    assert kind.nbytes == 40
    index = kind.donors.nbytes
    assert kind.nbytes == 40 + index > 40 + 30 * runner.slots


def test_scored_prompts_are_computed(runner: CpuRunner) -> None:
    scored = EngineSamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=0)
    engine = after(engine_of(runner), FIRST)
    serve(engine, [request("r", JUMP, scored, method="blend")])
    assert engine.stats().reused_tokens == 0


@pytest.mark.parametrize("kv", ["f16", "i8", "i4"])
def test_other_formats_of_kv(llama: Checkpoint, kv: str) -> None:
    runner = CpuRunner.load(llama, slots=900, threads=2, weights="f32", kv_cache_dtype=kv)
    assert same(ask(after(engine_of(runner, ALL), FIRST), JUMP), exact(runner, JUMP))
    chunked = ask(after(engine_of(runner, token_budget=16), FIRST), JUMP)
    assert same(chunked, ask(after(engine_of(runner, token_budget=512), FIRST), JUMP))
    runner.close()


@pytest.mark.parametrize("name", ["gemma3", "mistral", "llama-yarn"])
def test_windows_and_stretched_positions_on_both_runners(
    tmp_path_factory: pytest.TempPathFactory, name: str
) -> None:
    checkpoint = open_checkpoint(write_variant(name, tmp_path_factory.mktemp("tiny") / name))
    cpu = CpuRunner.load(checkpoint, slots=900, threads=1, weights="f32", kv_cache_dtype="f32")
    assert same(ask(after(engine_of(cpu, ALL), FIRST), JUMP), exact(cpu, JUMP))
    first = ask(after(engine_of(cpu), FIRST), JUMP)
    other = ask(after(engine_of(torch_runner(checkpoint, slots=900)), FIRST), JUMP)
    for score, reference in zip(other.logprobs[:1], first.logprobs[:1], strict=True):
        assert score.logprob == pytest.approx(reference.logprob, abs=1e-3)
    cpu.close()


@pytest.mark.parametrize("ratio", [0.1, 0.5])
def test_by_the_caret_the_nearest_tokens_are_computed_again(
    runner: CpuRunner, ratio: float
) -> None:
    method = replace(BLEND, ratio=ratio, order="caret")
    # The caret is behind TAIL: its text, and what follows it, BODY.
    start = 2 + len(HEAD) + len(TAIL)
    before, after_ = ((1, start - 1),), ((start, start + len(BODY)),)
    engine = after(engine_of(runner, method), FIRST)
    found = ask(engine, JUMP, before_caret=before, after_caret=after_)
    ids = [np.array(one, np.int32) for one in (JUMP[:-1], FIRST)]
    runs = find_runs(ids[0], 1 + len(HEAD), ids[1:], method.min_run)
    places = {run.start + i: run.source_start + i for run in runs for i in range(run.length)}

    def choose(copied: Int64Array, old: LayerKV, new: LayerKV) -> set[int]:
        def distance(at: int) -> int:
            return start - 2 - at if at < start else at - start

        ranked = sorted(copied.tolist(), key=distance)
        return set(ranked[: method.recomputed(len(copied))])

    blend = NaiveBlend(runner, 400)
    logits = blend.logits(JUMP, FIRST, places, runs[-1].end, method.check_layer + 1, choose)
    normed = logits - np.logaddexp.reduce(logits.astype(np.float64))
    assert found.tokens[0] == logits.argmax()
    assert found.logprobs[0].logprob == pytest.approx(normed.max(), abs=1e-6)


def test_without_a_caret_the_last_tokens_are_the_nearest(runner: CpuRunner) -> None:
    method = replace(BLEND, ratio=0.2, order="caret")
    told = ask(after(engine_of(runner, method), FIRST), JUMP, before_caret=((0, len(JUMP)),))
    assert same(ask(after(engine_of(runner, method), FIRST), JUMP), told)
