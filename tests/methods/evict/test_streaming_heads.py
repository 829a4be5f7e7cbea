"""Streaming heads: what they keep, and that the engine attends over just that."""

import random

import numpy as np
import pytest
from fake_keys import CONFIG, DIM, KV_HEADS, LAYERS, fake_keys, fake_queries, kept_of
from streaming_decoder import streaming_logprobs
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.methods.evict.streaming_heads import HeadSplit, StreamingRule
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from midfill.runners.torch.runner import TorchRunner, load_torch_runner
from serving import FixedCost, build_engine, request, serve

HEADS = LAYERS * KV_HEADS
MIXED = tuple(head % 5 == 0 for head in range(HEADS))
TINY_MIXED = (True, False, False, False, False, True)  # layers with one, none and one of two heads


def split(retrieval: tuple[bool, ...] = MIXED, **fields: object) -> HeadSplit:
    defaults = {"sinks": 2, "recent": 8, "interval": 3, "mean": True}
    return HeadSplit(StreamingRule(**(defaults | fields)), retrieval)


def test_retrieval_heads_keep_all_and_others_sinks_recent_keys_and_a_mean() -> None:
    keys, store = fake_keys(40)
    selection = split().start(CONFIG).select(keys, fake_queries(0))
    assert selection is not None
    assert selection.added is not None
    selection.check(keys.counts)
    place = 0
    for head in range(HEADS):
        kept = kept_of(selection, *divmod(head, KV_HEADS))
        added = selection.added.indptr[head + 1] - selection.added.indptr[head]
        if MIXED[head]:
            assert kept == list(range(40))
            assert added == 0
            continue
        assert kept == [0, 1, *range(32, 40)]
        assert added == 1
        dropped = slice(head * 40 + 2, head * 40 + 32)
        found = selection.added
        np.testing.assert_allclose(found.keys[place], store.keys[dropped].mean(0), atol=1e-6)
        np.testing.assert_allclose(found.values[place], store.values[dropped].mean(0), atol=1e-6)
        assert found.terms is not None
        assert found.terms.score_bias[place] == pytest.approx(np.log(30))
        place += 1


@pytest.mark.parametrize("tokens", [1, 2, 3, 10])
def test_short_texts_keep_everything(tokens: int) -> None:
    keys, _ = fake_keys(tokens)
    assert split().start(CONFIG).select(keys, fake_queries(0)) is None


def test_without_streaming_heads_nothing_is_dropped() -> None:
    keys, _ = fake_keys(40)
    assert split((True,) * HEADS).start(CONFIG).select(keys, fake_queries(0)) is None


def softmax_over(
    query: np.ndarray, keys: np.ndarray, values: np.ndarray, bias: np.ndarray
) -> np.ndarray:
    weights = np.exp(keys @ query / DIM**0.5 + bias)
    return weights @ values / weights.sum()


@pytest.mark.parametrize("weighted", [True, False])
def test_equal_keys_lose_nothing_if_the_mean_counts_as_many(weighted: bool) -> None:
    keys, store = fake_keys(40)
    store.keys.reshape(HEADS, 40, DIM)[:, 2:32] = np.linspace(-1, 1, DIM)
    selection = split((False,) * HEADS).start(CONFIG).select(keys, fake_queries(0))
    assert selection is not None
    assert selection.added is not None
    assert selection.added.terms is not None
    query = fake_queries(1)[0, 0, 0]
    for head in range(HEADS):
        kept = store.read(keys.cells(head)[kept_of(selection, *divmod(head, KV_HEADS))])
        bias = np.zeros(len(kept[0]) + 1)
        bias[0] = selection.added.terms.score_bias[head] if weighted else 0.0
        joined = [
            np.concatenate((each[head : head + 1], rest))
            for each, rest in zip((selection.added.keys, selection.added.values), kept, strict=True)
        ]
        exact = softmax_over(query, *store.read(keys.cells(head)), np.zeros(40))
        close = np.allclose(softmax_over(query, *joined, bias), exact, atol=1e-5)
        assert close is weighted


def test_the_running_mean_is_the_mean_of_all_that_was_dropped() -> None:
    method = split(interval=1)
    compressor, head, length = method.start(CONFIG), MIXED.index(False), 30
    history, store = fake_keys(240)
    held = [np.arange(length, dtype=np.int32) + 240 * each for each in range(HEADS)]
    while length <= 230:
        keys = type(history)(CONFIG, held, store)
        before = compressor.dropped
        selection = compressor.select(keys, fake_queries(0))
        assert selection is not None
        assert selection.added is not None
        dropped = method.rule.excess(length)
        assert compressor.dropped == dropped > before
        expected = store.keys[head * 240 + 2 : head * 240 + 2 + dropped].mean(0)
        np.testing.assert_allclose(selection.added.keys[0], expected, atol=1e-4)
        due = length + method.interval
        # The cell of the mean comes first; what is in it doesn't matter, so any will do.
        held = [
            np.concatenate(
                (
                    np.zeros(int(not MIXED[each]), np.int32),
                    held[each][kept_of(selection, *divmod(each, KV_HEADS))],
                    np.arange(length, due, dtype=np.int32) + 240 * each,
                )
            )
            for each in range(HEADS)
        ]
        length = due


@pytest.fixture(scope="module", params=["torch", "cpu"])
def runners(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Runner, TorchRunner]:
    folder = write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")
    checkpoint = open_checkpoint(folder)
    reference = load_torch_runner(checkpoint, slots=256)
    if request.param == "torch":
        return load_torch_runner(checkpoint, slots=256), reference
    return CpuRunner.load(checkpoint, slots=256, threads=1, weights="f32"), reference


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize(
    ("tokens", "interval", "retrieval"),
    [
        (40, 1, TINY_MIXED),
        (40, 7, TINY_MIXED),
        (40, 0, TINY_MIXED),
        (10, 4, (False,) * 6),
        (40, 5, (True,) * 6),
    ],
)
def test_answers_are_computed_over_what_heads_keep(
    runners: tuple[Runner, TorchRunner],
    mean: bool,
    tokens: int,
    interval: int,
    retrieval: tuple[bool, ...],
) -> None:
    runner, reference = runners
    method = split(retrieval, mean=mean, interval=interval)
    prompt = random.Random(tokens).choices(range(1, VOCAB), k=tokens)
    params = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
    engine = build_engine(runner, method=method, step_cost=FixedCost(0.0))
    answer = serve(engine, [request("r", prompt, params)])["r", 0]
    assert len(answer.tokens) == 40
    expected = streaming_logprobs(reference, [*prompt, *answer.tokens], tokens, method)
    found = [one.logprob for one in answer.logprobs]
    rows = expected[range(40), answer.tokens]
    np.testing.assert_allclose(found, rows.numpy(), atol=2e-4)


@pytest.mark.parametrize("mean", [True, False])
def test_slots_are_held_for_what_the_heads_keep_and_no_more(
    runners: tuple[Runner, TorchRunner], mean: bool
) -> None:
    held: list[int] = []

    def record(engine: Engine) -> None:
        stats = engine.stats()
        held.append(stats.slots_total - stats.slots_free - stats.slots_cached)

    method = split(TINY_MIXED, mean=mean, interval=4)
    prompt = random.Random(0).choices(range(1, VOCAB), k=100)
    params = EngineSamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    serve(
        build_engine(runners[0], method=method), [request("r", prompt, params)], after_step=record
    )
    kept = [2 * 100 + 4 * (2 + 8 + mean), 2 * 104 + 4 * (2 + 8 + mean)]
    slots = [-(-cells // 6) for cells in kept]
    assert held[0] == slots[0]
    assert held[3] == slots[0] + 3
    assert held[4] == slots[1], "four tokens on, streaming heads have dropped four"
