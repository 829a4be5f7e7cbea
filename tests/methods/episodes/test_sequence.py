"""EpisodicSequence in the engine: as computed by hand, bounded, and the same whatever is stored."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.kv.ragged import RaggedIndex
from midfill.methods.episodes.clustering import Episodes
from midfill.methods.episodes.method import EpisodeRule, EpisodicMethod, Scorer
from midfill.methods.episodes.sequence import EpisodicSequence
from midfill.methods.episodes.store import EpisodeCache, EpisodeStore
from midfill.methods.episodes.turns import TurnReader
from midfill.methods.evict.snapkv import SnapKV
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from serving import Answer, build_engine, preempting_every, request, same, serve, torch_runner

LINE, TOPICS, PER_TOPIC = 5, 3, 6
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=0)
READER = TurnReader(
    np.zeros(VOCAB, bool), np.arange(VOCAB) == LINE, np.zeros(VOCAB, bool), np.ones(VOCAB, np.int64)
)
INSTRUCTION = np.arange(250, 256, dtype=np.int32)
RULE = EpisodeRule(budget=24, block=32, episodes=TOPICS, turns=2, near=2)
METHOD = EpisodicMethod(RULE, READER, INSTRUCTION, np.zeros(3))


def with_rule(**changes: Any) -> EpisodicMethod:
    return replace(METHOD, rule=replace(RULE, **changes))


@pytest.fixture(scope="module")
def runner(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=400, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def turn(topic: int, length: int, seed: int) -> list[int]:
    """Return a turn of one topic's tokens."""
    first = 10 + PER_TOPIC * topic
    return [*random.Random(seed).choices(range(first, first + PER_TOPIC), k=length - 1), LINE]


def history(turns: int, seed: int = 0) -> list[int]:
    """Return turns of 10 tokens, six of a topic after six of another."""
    return [
        token
        for number in range(turns)
        for token in turn(number // 6 % TOPICS, 10, 100 * seed + number)
    ]


def question(topic: int, seed: int = 0) -> list[int]:
    return [*turn(topic, 7, 1000 + seed), 300, 301]


HISTORY = history(18)


def ask(engine: Engine, tokens: list[int], **fields: Any) -> Answer:
    return serve(engine, [request("r", tokens, PARAMS, **fields)])["r", 0]


def alone(runner: Runner, tokens: list[int], method: Any = METHOD, **fields: Any) -> Answer:
    return ask(build_engine(runner, method=method), tokens, **fields)


def store_of(engine: Engine) -> EpisodeStore:
    return engine._methods._episodes._state.store(RULE.memory)


def stored(engine: Engine, kind: type = EpisodeCache) -> list[Any]:
    return [each for each in store_of(engine)._held.values() if isinstance(each, kind)]


@dataclass
class Hand:
    """A greedy answer by loops: token i lies in slot i and stays there.

    Attributes:
        tokens: of the answer.
        held: of each head, the positions that are left of the history.
    """

    tokens: list[int]
    held: list[list[int]]

    @classmethod
    def compute(cls, runner: Runner, tokens: list[int], length: int, patch: list[int]) -> "Hand":
        config = runner.config
        heads, group = config.layers * config.kv_heads, config.query_heads // config.kv_heads
        held: list[list[int]] = [[] for _ in range(heads)]

        def run(ids: list[int], first: int, since: int) -> tuple[np.ndarray, np.ndarray]:
            """Run rows from position ``first`` on over what is held and tokens since ``since``."""
            listed = [head * runner.slots + p for head in range(heads) for p in held[head]]
            indptr = np.cumsum([0, *map(len, held)]).astype(np.int32)
            plan = AttentionPlan(RaggedIndex(np.array(listed, np.int32), indptr))
            slots = np.arange(since, first + len(ids), dtype=np.int32)
            rows = np.arange(first, first + len(ids), dtype=np.int32)
            numbers = np.arange(len(ids), dtype=np.int32)
            batch = ForwardBatch(
                np.array(ids, np.int32), rows, rows, np.array([0, len(ids)], np.int32),
                np.array([0, len(slots)], np.int32), slots, numbers[-1:],
                observed_rows=numbers, attention=(plan if listed else None,),
            )  # fmt: skip
            logits = runner.logits_ops.to_numpy(runner.forward(batch)[0])
            return logits, runner.observed_queries(batch)

        for start in range(0, length, RULE.block):
            end = min(start + RULE.block, length)
            run(tokens[start:end], start, start)
            _, queries = run(patch, end, start)
            for head in range(heads):
                held[head] += range(start, end)
            scores: list[dict[tuple[int, int], float]] = [{} for _ in range(config.layers)]
            for head in range(heads):
                layer, kv_head = divmod(head, config.kv_heads)
                cells = np.array([head * runner.slots + p for p in held[head]], np.int32)
                keys = runner.cells.read_keys(cells).astype(np.float64)
                best = np.zeros(len(keys))
                for row in range(len(patch)):
                    for query in queries[layer, row, kv_head * group : (kv_head + 1) * group]:
                        weights = np.exp(keys @ query.astype(np.float64) * config.score_scale)
                        best = np.maximum(best, weights / weights.sum())
                for position, score in zip(held[head], best, strict=True):
                    scores[layer][head, position] = np.inf if position < RULE.sinks else score
            kept = {
                pair
                for of_layer in scores
                for pair in sorted(of_layer, key=lambda pair: -of_layer[pair])[
                    : int(RULE.budget) * config.kv_heads
                ]
            }
            held = [[p for p in own if (head, p) in kept] for head, own in enumerate(held)]
        logits, _ = run(tokens[length:], length, length)
        found = [int(logits.argmax())]
        for place in range(len(tokens), len(tokens) + PARAMS.max_tokens - 1):
            logits, _ = run(found[-1:], place, length)
            found.append(int(logits.argmax()))
        return cls(found, held)


def patch_of(runner: Runner, tokens: list[int], topic: int) -> list[int]:
    """Return the instruction and the windows that represent a topic's episode."""
    engine = build_engine(runner, method=METHOD)
    ask(engine, tokens + question(topic))
    (episodes,) = stored(engine, Episodes)
    ((_, number),) = (key for key in store_of(engine)._held if isinstance(key[1], int))  # type: ignore[index]
    found = INSTRUCTION.tolist()
    room = RULE.block - len(found)
    chosen = []
    for window in episodes.representatives[number].tolist():
        if room >= 20:
            chosen.append(window)
            room -= 20
    for window in sorted(chosen):
        found += tokens[20 * window : 20 * window + 20]
    return found


@pytest.mark.parametrize("turns", [18, 17])
def test_answers_are_those_computed_by_hand(runner: CpuRunner, turns: int) -> None:
    text = HISTORY[: 10 * turns]
    for topic in range(TOPICS):
        patch = patch_of(runner, text, topic)
        hand = Hand.compute(runner, text + question(topic), len(text), patch)
        engine = build_engine(runner, method=METHOD)
        found = ask(engine, text + question(topic))
        assert found.tokens == hand.tokens
        (cache,) = stored(engine)
        numbers = np.split(cache.numbers, cache.indptr[1:-1])
        assert [own.tolist() for own in numbers] == hand.held
        again = ask(engine, text + question(topic))  # from the store
        assert same(again, found)


def test_torch_gives_the_answer_that_is_computed_by_hand_with_it(llama: Checkpoint) -> None:
    torch = torch_runner(llama, slots=400)
    patch = patch_of(torch, HISTORY, 1)
    hand = Hand.compute(torch, HISTORY + question(1), len(HISTORY), patch)
    assert alone(torch, HISTORY + question(1)).tokens == hand.tokens


@pytest.mark.parametrize("dtype", ["f32", "f16", "i8"])
def test_a_budget_of_everything_gives_the_bits_of_the_whole_kv(
    llama: Checkpoint, dtype: Any
) -> None:
    runner = CpuRunner.load(llama, slots=500, threads=2, weights="f32", kv_cache_dtype=dtype)
    method = replace(with_rule(budget=len(HISTORY)), always=True)
    engine = build_engine(runner, method=method)
    for topic in range(TOPICS):
        expected = alone(runner, HISTORY + question(topic), None)
        assert same(ask(engine, HISTORY + question(topic)), expected)
        assert same(ask(engine, HISTORY + question(topic)), expected)  # restored
        assert ask(engine, HISTORY + question(topic)).cached_tokens == len(HISTORY)
    assert len(stored(engine)) == TOPICS
    runner.close()


def test_windowed_layers_keep_what_their_windows_show(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("tiny") / "gemma3"
    checkpoint = open_checkpoint(write_variant("gemma3", folder))
    runner = CpuRunner.load(checkpoint, slots=500, threads=1, weights="f32", kv_cache_dtype="f32")
    kind = build_engine(runner)._methods._episodes._state.eviction.full_layers
    assert kind.is_part
    similarity = np.zeros(kind.config.layers)
    whole = replace(with_rule(budget=len(HISTORY)), always=True, similarity=similarity)
    engine = build_engine(runner, method=whole)
    for _ in range(2):
        expected = alone(runner, HISTORY + question(1), None)
        assert same(ask(engine, HISTORY + question(1)), expected)
    small = build_engine(runner, method=replace(METHOD, similarity=similarity))
    held = MostHeld(small)
    first = ask(small, HISTORY + question(1))
    assert held.slots < 150
    assert same(ask(small, HISTORY + question(1)), first)
    runner.close()


def test_scoring_leaves_no_trace(runner: CpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def watched(
        self: EpisodicSequence, kv: Any, point: int, done: int, rows: np.ndarray
    ) -> np.ndarray:
        heads = self._state.eviction.keys(kv, point)
        cells = np.concatenate([heads.cells(head) for head in range(heads.heads)])
        before = runner.cells.dump(cells)
        queries = run_patch(self, kv, point, done, rows)
        for array, after in zip(before, runner.cells.dump(cells), strict=True):
            np.testing.assert_array_equal(array, after)
        ran.append((point, done, len(rows)))
        return queries

    run_patch = EpisodicSequence._run_patch
    monkeypatch.setattr(EpisodicSequence, "_run_patch", watched)
    monkeypatch.setattr("midfill.methods.episodes.sequence._PART", 20)
    ask(build_engine(runner, method=METHOD), HISTORY + question(0))
    points = (32, 64, 96, 128, 160, 180)
    assert ran == [(point, *part) for point in points for part in ((0, 20), (20, 6))]


def test_others_wait_for_a_part_of_the_scoring_prompt_per_step(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midfill.methods.episodes.sequence._PART", 8)
    extra: list[int] = []
    run_patch = EpisodicSequence._run_patch

    def watched(self: EpisodicSequence, *args: Any) -> np.ndarray:
        extra[-1] += len(args[-1])
        return run_patch(self, *args)

    monkeypatch.setattr(EpisodicSequence, "_run_patch", watched)
    engine = build_engine(runner, token_budget=16, methods={"e": METHOD, "": None})
    answering = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    engine.add(request("other", HISTORY[:5], answering, method=""))
    engine.step()
    engine.add(request("r", HISTORY + question(0), PARAMS, method="e"))
    for _ in range(38):
        extra.append(0)
        tokens = [len(one.token_ids) for one in engine.step() if one.request_id == "other"]
        assert tokens == [1], "the other answer goes on in every step"
    assert max(extra) == 8
    assert extra.count(8) >= 6, "in three steps of 8 and one of 2 per block"
    engine.cancel("r")


@pytest.mark.parametrize("pooled", [True, False])
def test_as_many_keys_stay_as_the_budgets_say(runner: CpuRunner, pooled: bool) -> None:
    layers, kv_heads = runner.config.layers, runner.config.kv_heads
    similarity = np.linspace(0, 1, layers)
    method = replace(with_rule(pooled=pooled), similarity=similarity, alpha=1.1)
    budgets = method.budgets(len(HISTORY))
    assert len(set(budgets.tolist())) > 1
    engine = build_engine(runner, method=method)
    ask(engine, HISTORY + question(0))
    (cache,) = stored(engine)
    sizes = np.diff(cache.indptr).reshape(layers, kv_heads)
    assert sizes.sum(axis=1).tolist() == (budgets * kv_heads).tolist()
    if not pooled:
        assert (sizes == budgets[:, None]).all()
    assert cache.slots == -(-int(budgets.sum()) // layers) <= RULE.budget
    for own in np.split(cache.numbers, cache.indptr[1:-1]):
        assert own[:4].tolist() == [0, 1, 2, 3]


class MostHeld:
    """Records the most slots that are neither free nor evictable, at every allocation."""

    def __init__(self, engine: Engine) -> None:
        self.slots = 0
        pool = engine._queues.pool
        allocate = pool.slots.allocate

        def recording(count: int) -> np.ndarray:
            allocated = allocate(count)
            self.slots = max(self.slots, pool.slots.total - pool.available)
            return allocated

        pool.slots.allocate = recording  # type: ignore[method-assign]


@pytest.mark.parametrize("chunk", [7, 512])
def test_the_peak_is_bounded_however_long_the_history_is(runner: CpuRunner, chunk: int) -> None:
    peaks = {"episodes": [], "at the end": []}
    for turns in (12, 18, 24, 33):
        for name, method in (("episodes", METHOD), ("at the end", SnapKV(24, window=8))):
            engine = build_engine(runner, token_budget=chunk, method=method)
            held = MostHeld(engine)
            ask(engine, history(turns) + question(0))
            peaks[name].append(held.slots)
    patch = 6 + 20  # the instruction and the one window that a block has room for
    assert max(peaks["episodes"]) <= RULE.budget + RULE.block + patch
    assert len(set(peaks["episodes"])) == 1
    assert peaks["at the end"][0] > 120
    assert peaks["at the end"][-1] > 330


def test_a_history_may_exceed_the_pool(llama: Checkpoint, runner: CpuRunner) -> None:
    small = CpuRunner.load(llama, slots=90, threads=1, weights="f32", kv_cache_dtype="f32")
    expected = [alone(runner, HISTORY + question(topic)) for topic in range(TOPICS)]
    engine = build_engine(small, methods={"": None, "episodes": METHOD})
    requests = [
        request(f"{topic}", HISTORY + question(topic), PARAMS, method="episodes")
        for topic in range(TOPICS)
    ]
    answers = serve(engine, requests)  # one after the other: two don't fit
    for topic in range(TOPICS):
        assert same(answers[f"{topic}", 0], expected[topic])
    with pytest.raises(InvalidRequestError, match="at most 90 fit"):
        engine.add(request("r", HISTORY + question(0), PARAMS, method=""))
    small.close()


def test_a_pool_that_two_blocks_exceed_is_refused(llama: Checkpoint) -> None:
    small = CpuRunner.load(llama, slots=80, threads=1, weights="f32", kv_cache_dtype="f32")
    with pytest.raises(InvalidRequestError, match="take 88 tokens of KV, and the cache has 80"):
        build_engine(small, method=METHOD).add(request("r", HISTORY + question(0), PARAMS))
    small.close()


def test_an_answer_ends_where_the_pool_does(llama: Checkpoint) -> None:
    small = CpuRunner.load(llama, slots=90, threads=1, weights="f32", kv_cache_dtype="f32")
    long = EngineSamplingParams(temperature=0.0, max_tokens=500, ignore_eos=True)
    found = serve(
        build_engine(small, method=METHOD), [request("r", HISTORY + question(0), long)]
    )["r", 0]  # fmt: skip
    assert found.finish_reason == "length"
    assert len(found.tokens) == 90 - 24 - len(question(0))
    small.close()


def test_ten_questions_in_any_order_are_answered_as_if_each_was_the_first(
    runner: CpuRunner,
) -> None:
    asked = [HISTORY + question(number % TOPICS, seed=number) for number in range(10)]
    fresh = [alone(runner, one) for one in asked]
    assert len({tuple(one.tokens) for one in fresh}) > 1
    engine = build_engine(runner, method=METHOD)
    order = random.Random(0).sample(range(10), 10) + random.Random(1).sample(range(10), 10)
    for number in order:
        assert same(ask(engine, asked[number]), fresh[number])


def test_a_second_question_computes_nothing_of_the_history(runner: CpuRunner) -> None:
    engine = build_engine(runner, method=METHOD)

    def computed(tokens: list[int], **fields: Any) -> tuple[int, int]:
        before = engine.stats().computed_tokens
        found = ask(engine, tokens, **fields)
        return engine.stats().computed_tokens - before, found.cached_tokens

    first, cached = computed(HISTORY + question(0))
    assert first == len(HISTORY) + 6 * 26 + len(question(0)) + PARAMS.max_tokens - 1
    assert cached == 0
    answering = len(question(0)) + PARAMS.max_tokens - 1
    assert computed(HISTORY + question(0, seed=1)) == (answering, len(HISTORY))
    # Another topic's cache is computed when it is first asked for, all but the exact beginning.
    other, _ = computed(HISTORY + question(1))
    assert other == first - 31
    assert computed(HISTORY + question(1, seed=1)) == (answering, len(HISTORY))
    # Another tenant finds nothing, another conversation neither.
    assert computed(HISTORY + question(0, seed=1), tenant="b") == (first, 0)
    assert computed(history(18, seed=1) + question(0))[0] >= first - 31


def test_questions_go_to_their_topics_cache(runner: CpuRunner) -> None:
    engine = build_engine(runner, method=METHOD)
    right = []
    for number in range(12):
        ask(engine, HISTORY + question(number % TOPICS, seed=number))
        (episodes,) = stored(engine, Episodes)
        last = next(key for key in reversed(store_of(engine)._held) if isinstance(key[1], int))  # type: ignore[index]
        own = episodes.labels[3 * (number % TOPICS) : 3 * (number % TOPICS) + 3]
        right.append(np.bincount(own).argmax() == last[1])  # type: ignore[index]
    assert np.mean(right) > 0.9
    assert len(stored(engine)) == TOPICS


class TopicEncoder:
    """Encodes texts by how many of their tokens are each topic's.

    Attributes:
        read: the texts.
    """

    def __init__(self) -> None:
        self.read: list[list[int]] = []

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        self.read.append(tokens.tolist())
        found = np.bincount(np.clip((tokens - 10) // PER_TOPIC, 0, TOPICS), minlength=TOPICS + 1)
        return found / np.linalg.norm(found)


def test_an_encoder_sends_questions_to_their_topics(runner: CpuRunner) -> None:
    encoder = TopicEncoder()
    engine = build_engine(runner, methods={"e": replace(METHOD, encode=encoder), "": METHOD})
    for topic in (0, 1, 2, 0):
        ask(engine, HISTORY + question(topic, seed=5), method="e")
    windows = [HISTORY[start : start + 20] for start in range(0, len(HISTORY), 20)]
    asked = [question(topic, seed=5) for topic in (0, 1, 2, 0)]
    assert encoder.read == [*windows, *asked], "each window and each question once"
    (episodes,) = stored(engine, Episodes)
    assert episodes.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    numbers = [key[1] for key in store_of(engine)._held if isinstance(key[1], int)]  # type: ignore[index]
    assert numbers == [1, 2, 0], "the last one used is the last"
    ask(engine, HISTORY + question(0, seed=5), method="")
    assert len(stored(engine)) == 4, "caches of token embeddings are others"


def test_an_encoder_reads_a_bounded_part_per_step(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midfill.methods.episodes.sequence._PART", 11)
    encoder = TopicEncoder()
    engine = build_engine(runner, method=replace(METHOD, encode=encoder))
    engine.add(request("r", HISTORY + question(0), PARAMS))
    read = [0]
    while engine.has_work() and len(encoder.read) < 10:
        engine.step()
        read.append(len(encoder.read))
    assert np.diff(read).max() == 2, "44 tokens are two windows of 20; one is always read"
    assert read.count(0) > 1, "nothing before the first block's end"
    engine.cancel("r")


def test_a_history_without_differences_is_one_episode(runner: CpuRunner) -> None:
    same_for_all = replace(METHOD, encode=lambda _: np.ones(1))
    engine = build_engine(runner, method=same_for_all)
    for topic in range(TOPICS):
        ask(engine, HISTORY + question(topic))
    assert len(stored(engine)) == 1
    (episodes,) = stored(engine, Episodes)
    assert episodes.labels.tolist() == [0] * 9


def test_other_caches_and_other_scorers_give_other_keys(runner: CpuRunner) -> None:
    kept = set()
    for method in (
        METHOD,
        replace(METHOD, route="next"),
        *(replace(METHOD, scorer=scorer) for scorer in ("summary", "window", "random")),
    ):
        engine = build_engine(runner, method=method)
        ask(engine, HISTORY + question(0))
        (cache,) = stored(engine)
        assert cache.slots == RULE.budget
        kept.add(cache.numbers.tobytes())
    assert len(kept) == 5


def test_methods_share_no_caches_unless_they_are_the_same(runner: CpuRunner) -> None:
    same_as = replace(METHOD)
    other = with_rule(near=1)
    engine = build_engine(runner, methods={"a": METHOD, "b": same_as, "c": other})
    for name, count in (("a", 1), ("b", 1), ("c", 2)):
        ask(engine, HISTORY + question(0), method=name)
        assert len(stored(engine)) == count


def test_memory_is_bounded(runner: CpuRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    keep, most = EpisodeStore.keep, [0]

    def limited(self: EpisodeStore, key: Any, found: Any) -> None:
        assert self._limit == RULE.memory << 20
        monkeypatch.setattr(self, "_limit", 100_000)
        keep(self, key, found)
        monkeypatch.setattr(self, "_limit", RULE.memory << 20)
        most[0] = max(most[0], self.nbytes)

    monkeypatch.setattr(EpisodeStore, "keep", limited)
    engine = build_engine(runner, method=METHOD)
    fresh = {}
    for seed in (0, 1, 2, 3, 0, 1):
        found = ask(engine, history(18, seed) + question(0))
        assert same(fresh.setdefault(seed, found), found)
    assert most[0] <= 100_000
    assert 0 < len(stored(engine)) < 4
    assert engine.take_parked_bytes() == max(each.nbytes for each in stored(engine))


@pytest.mark.parametrize(
    ("budget", "steps", "part", "encode"),
    [(5, 70, 64, None), (17, 47, 9, TopicEncoder()), (512, 12, 64, None)],
)
def test_chunks_company_and_preemption_change_nothing(
    runner: CpuRunner,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    steps: int,
    part: int,
    encode: TopicEncoder | None,
) -> None:
    method = replace(METHOD, encode=encode)
    asked = [HISTORY + question(topic) for topic in range(2)]
    expected = [alone(runner, one, method) for one in asked]
    plain = alone(runner, HISTORY[7:90], None)
    monkeypatch.setattr("midfill.methods.episodes.sequence._PART", part)
    engine = build_engine(runner, token_budget=budget, methods={"e": method, "": None})
    requests = [request(f"{n}", one, PARAMS, method="e") for n, one in enumerate(asked)]
    requests.insert(1, request("plain", HISTORY[7:90], PARAMS, method=""))
    answers = serve(engine, requests, after_step=preempting_every(steps))
    assert engine.stats().preemptions > 0
    assert same(answers["plain", 0], plain)
    for number, one in enumerate(expected):
        assert same(answers[f"{number}", 0], one)


@pytest.mark.parametrize("scorer", ["episode", "summary", "window", "random"])
def test_what_is_cached_changes_no_bit(runner: CpuRunner, scorer: Scorer) -> None:
    method = replace(METHOD, scorer=scorer)
    expected = alone(runner, HISTORY + question(0), method)
    engine = build_engine(runner, methods={"e": method, "": None})
    ask(engine, HISTORY + question(1), method="")
    assert same(ask(engine, HISTORY + question(0), method="e"), expected)


def test_several_answers_are_each_as_if_alone(runner: CpuRunner) -> None:
    params = replace_params(n=3, temperature=1.0, seed=3)
    found = serve(
        build_engine(runner, method=METHOD), [request("r", HISTORY + question(0), params)]
    )  # fmt: skip
    again = serve(
        build_engine(runner, method=METHOD, max_running=1),
        [request("r", HISTORY + question(0), params)],
    )
    assert len(found) == 3
    assert all(same(found[key], again[key]) for key in found)
    assert len({tuple(each.tokens) for each in found.values()}) > 1


def replace_params(**changes: Any) -> EngineSamplingParams:
    fields = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, "logprobs": 0} | changes
    return EngineSamplingParams(**fields)  # type: ignore[arg-type]


def test_prompts_are_scored_whatever_is_stored(runner: CpuRunner) -> None:
    engine = build_engine(runner, method=METHOD)
    scored = replace_params(prompt_logprobs=0)
    found = []
    for _ in range(2):
        engine.add(request("r", HISTORY + question(0), scored))
        logprobs = []
        while engine.has_work():
            for output in engine.step():
                logprobs += output.prompt_logprobs or []
        found.append(logprobs)
        ask(engine, HISTORY + question(0))
    assert len(found[0]) == len(HISTORY + question(0)) - 1
    assert found[0] == found[1]


def test_a_request_that_is_cancelled_at_any_step_leaves_no_slot(runner: CpuRunner) -> None:
    for step in range(1, 16):
        engine = build_engine(runner, token_budget=16, method=METHOD)
        serve(engine, [request("r", HISTORY + question(0), PARAMS)], cancellations={step: "r"})


def test_exact_kv_is_shared_and_compressed_kv_is_not(runner: CpuRunner) -> None:
    engine = build_engine(runner, methods={"e": METHOD, "": None})
    ask(engine, HISTORY + question(0), method="e")
    expected = alone(runner, HISTORY + question(0), None)
    found = ask(engine, HISTORY + question(0), method="")
    assert same(found, expected)
    assert found.cached_tokens == RULE.block  # the first block, before anything was evicted


@pytest.mark.parametrize(
    ("tokens", "why"),
    [
        ([*HISTORY[:9], 300, 301], "there is no turn"),
        ([*turn(0, 40, 0), 300], "the only turn is the question"),
        (history(2) + question(0), "the history fits the budget"),
    ],
)
def test_prompts_without_a_history_are_served_as_without_the_method(
    runner: CpuRunner, tokens: list[int], why: str
) -> None:
    engine = build_engine(runner, method=METHOD)
    assert same(ask(engine, tokens), alone(runner, tokens, None)), why
    assert not stored(engine)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (turn(0, 90, 0), "one turn"),
        (turn(0, 27, 0), "shorter than a block"),
        (turn(0, 30, 0) + turn(1, 30, 1) + turn(2, 30, 2), "fewer windows than episodes"),
        (turn(0, 10, 0) * 9, "windows that are all the same"),
        ([LINE] * 40 + turn(0, 10, 0), "empty lines"),
    ],
)
def test_odd_histories_are_compressed_all_the_same(
    runner: CpuRunner, text: list[int], why: str
) -> None:
    engine = build_engine(runner, method=METHOD)
    found = ask(engine, text + question(0))
    (cache,) = stored(engine)
    assert cache.tokens == len(text), why
    assert cache.slots == RULE.budget
    assert same(ask(engine, text + question(0)), found)
    assert ask(engine, text + question(0)).cached_tokens == len(text)


def test_a_given_end_of_the_history_counts(runner: CpuRunner) -> None:
    engine = build_engine(runner, method=METHOD)
    found = ask(engine, HISTORY + question(0), compress_after=75)
    (cache,) = stored(engine)
    assert cache.tokens == 75
    again = ask(engine, HISTORY + question(0), compress_after=75)
    assert again.cached_tokens == 75
    assert same(again, found)


def test_a_system_prompt_stays_whole_or_is_refused(runner: CpuRunner) -> None:
    system = turn(3, 20, 7)
    engine = build_engine(runner, method=with_rule(system=True))
    ask(engine, system + HISTORY + question(0))
    (cache,) = stored(engine)
    for own in np.split(cache.numbers, cache.indptr[1:-1]):
        assert own[:20].tolist() == list(range(20))
    with pytest.raises(InvalidRequestError, match="the system prompt has 30 tokens, and a layer"):
        engine.add(request("r", turn(3, 30, 7) + HISTORY + question(0), PARAMS))
    assert not engine.has_work()


def test_a_conversation_that_grows_is_computed_again_once_per_block(runner: CpuRunner) -> None:
    engine = build_engine(runner, method=with_rule(grows=True))
    cached = []
    for turns in range(16, 23):
        text = history(turns) + question(0)
        found = ask(engine, text)
        cached.append(found.cached_tokens)
        assert same(found, alone(runner, text, with_rule(grows=True)))
    assert {each.tokens for each in stored(engine)} == {160, 192}
    assert cached[1:4] == [160] * 3
    assert cached[5:] == [192] * 2


def test_methods_that_change_what_it_relies_on_are_refused(runner: CpuRunner) -> None:
    from midfill.methods.method import CombinedMethod

    pair = CombinedMethod((("epicache", METHOD), ("snapkv", SnapKV(24, window=8))))
    engine = build_engine(runner, methods={"both": pair})
    with pytest.raises(InvalidRequestError, match="can't stand together"):
        engine.add(request("r", HISTORY + question(0), PARAMS, method="both"))


def test_a_failure_ends_the_request_alone(
    runner: CpuRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no scores")

    monkeypatch.setattr("midfill.methods.episodes.sequence.cached_scores", broken)
    engine = build_engine(runner, methods={"e": METHOD, "": None})
    requests: list[EngineRequest] = [
        request("bad", HISTORY + question(0), PARAMS, method="e"),
        request("good", HISTORY[:50], PARAMS, method=""),
    ]
    answers = serve(engine, requests)
    assert answers["bad", 0].error == "the method of episodes failed: no scores"
    assert same(answers["good", 0], alone(runner, HISTORY[:50], None))


def test_a_request_with_less_memory_takes_nothing_from_others(runner: CpuRunner) -> None:
    engine = build_engine(runner, method=METHOD)
    ask(engine, history(18, 0) + question(0))
    held = len(stored(engine))
    engine._methods._episodes._state.store(RULE.memory // 2).keep("other", stored(engine)[0])
    assert len(stored(engine)) == held > 0
