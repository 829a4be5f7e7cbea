"""LaCache against lists that tokens are deleted from one by one, and in the engine."""

import dataclasses

import numpy as np
import pytest
from fake_keys import CONFIG, ArrayCells, fake_queries

from midfill.errors import InvalidRequestError
from midfill.methods.evict.lacache import LaCache, Ladder, LadderCache
from midfill.methods.evict.method import SequenceKeys

SHAPES = [(30, 15, 0), (30, 8, 4), (32, 9, 3)]
SIZE, SINKS = 128, 4


def cache(shape: tuple[int, int, int], interval: int = 1, ladder: str = "modulo") -> LadderCache:
    layers, span, overlap = shape
    method = LaCache(
        budget=SIZE, span=span, overlap=overlap, sinks=SINKS, interval=interval, ladder=ladder
    )
    return LadderCache(method, Ladder(layers, span, overlap, SINKS, ladder))


class Naive:
    """A list of tokens per layer."""

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self.layers, span, overlap = shape
        self.block = 1 + int(np.ceil((self.layers - span) / (span - overlap)))
        self.kept = min(int(np.ceil(span / (span - overlap))), self.block)
        self.freed = self.block - self.kept
        self.size = SIZE + self.freed // 2
        self.cursor = SINKS
        self.tokens: list[list[int]] = [[] for _ in range(self.layers)]

    def append(self, token: int) -> None:
        for layer in self.tokens:
            layer.append(token)
        while len(self.tokens[0]) > self.size:
            if self.cursor + self.kept > self.size - self.layers:
                self.cursor = SINKS
            for number, layer in enumerate(self.tokens):
                offset = number % (self.freed + 1)
                for place in reversed(range(self.block)):
                    if not offset <= place < offset + self.kept:
                        del layer[self.cursor + place]
            self.cursor += self.kept


def advance(one: LadderCache, held: np.ndarray) -> np.ndarray:
    """What stays of the tokens [layers, n] that a cache holds."""
    config = dataclasses.replace(CONFIG, layers=len(held), kv_heads=1)
    nothing = np.zeros((0, 0), np.float32)
    cells = [np.arange(held.shape[1], dtype=np.int32)] * len(held)
    keys = SequenceKeys(config, cells, ArrayCells(nothing, nothing))
    selection = one.select(keys, fake_queries(0))
    if selection is None:
        return held
    assert selection.close_gaps, "distances are within the cache"
    kept = selection.kept.reshape(len(held), -1)
    return np.take_along_axis(held, kept, axis=1)


def intact(one: LadderCache) -> int:
    """How many of the newest tokens all layers keep: as many as layers, where one goes a block."""
    return one.ladder.layers - (one.ladder.freed - 1)


def grown(held: np.ndarray, first: int, count: int) -> np.ndarray:
    new = np.tile(np.arange(first, first + count, dtype=np.int32), (len(held), 1))
    return np.concatenate((held, new), axis=1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("interval", [1, 16])
def test_the_answer_is_compacted_as_token_by_token(
    shape: tuple[int, int, int], interval: int
) -> None:
    naive, one = Naive(shape), cache(shape, interval)
    held = np.zeros((shape[0], 0), np.int32)
    for token in range(0, 1504, interval):
        for each in range(token, token + interval):
            naive.append(each)
        held = advance(one, grown(held, token, interval))
        assert held.tolist() == naive.tokens
        newest = token + interval
        assert held.shape[1] <= naive.size
        assert (held[:, :SINKS] == np.arange(min(SINKS, newest))).all()
        assert (held[:, -intact(one) :] == np.arange(max(0, newest - intact(one)), newest)).all()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [SIZE + 1, 160, 200])
def test_a_prompt_that_one_sweep_fits_is_compacted_as_token_by_token(
    shape: tuple[int, int, int], tokens: int
) -> None:
    naive, one = Naive(shape), cache(shape)
    for token in range(tokens):
        naive.append(token)
    held = advance(one, grown(np.zeros((shape[0], 0), np.int32), 0, tokens))
    assert held.tolist() == naive.tokens
    assert one.cursor == naive.cursor


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("ladder", ["modulo", "contiguous"])
@pytest.mark.parametrize("tokens", [133, 222, 223, 224, 316, 317, 500, 1500, 8000])
def test_prompts_of_any_length_keep_sinks_newest_tokens_and_samples_of_everything(
    shape: tuple[int, int, int], ladder: str, tokens: int
) -> None:
    one = cache(shape, ladder=ladder)
    held = advance(one, grown(np.zeros((shape[0], 0), np.int32), 0, tokens))
    assert one.size - one.ladder.freed < held.shape[1] <= one.size
    assert (np.diff(held, axis=1) > 0).all(), "no token is named twice"
    assert (held[:, :SINKS] == np.arange(SINKS)).all()
    assert (held[:, -intact(one) :] == np.arange(tokens - intact(one), tokens)).all()
    everything = np.unique(held)
    assert len(everything) > held.shape[1], "layers keep different tokens"
    assert np.diff(everything).max() <= max(2, tokens // 20), "no long gap"


def test_layers_together_keep_every_token_of_a_long_prompt() -> None:
    held = advance(cache((30, 15, 0)), grown(np.zeros((30, 0), np.int32), 0, 1500))
    assert len(np.unique(held)) == 1500


def test_random_deletion_in_each_layer_leaves_holes_where_the_ladder_leaves_none() -> None:
    held = advance(cache((30, 15, 0)), grown(np.zeros((30, 0), np.int32), 0, 1500))
    rng = np.random.default_rng(0)
    middle = np.arange(SINKS, 1500 - 30)
    count = held.shape[1] - SINKS - 30
    random = np.unique([rng.choice(middle, count, replace=False) for _ in held])
    assert set(middle) <= set(held.reshape(-1).tolist())
    assert len(set(middle) - set(random.tolist())) > 50


@pytest.mark.parametrize("shape", SHAPES)
def test_over_20_000_tokens_it_stays_as_small_and_older_text_is_thinner(
    shape: tuple[int, int, int],
) -> None:
    one = cache(shape, interval=50)
    held = advance(one, grown(np.zeros((shape[0], 0), np.int32), 0, 1600))
    for token in range(1600, 20_000, 50):
        held = advance(one, grown(held, token, 50))
        assert one.size - one.ladder.freed < held.shape[1] <= one.size
        assert one.cursor <= one.size
    assert (held[:, :SINKS] == np.arange(SINKS)).all()
    gaps = np.diff(held[:, SINKS:], axis=1).mean(axis=0)
    assert gaps[: len(gaps) // 3].mean() > 2 * gaps[-(len(gaps) // 3) :].mean()


@pytest.mark.parametrize(
    ("shape", "sizes"),
    [((32, 16, 0), (2, 1, 1)), ((32, 9, 3), (5, 2, 3)), ((32, 8, 4), (7, 2, 5))],
)
def test_blocks_are_the_papers(shape: tuple[int, int, int], sizes: tuple[int, int, int]) -> None:
    ladder = Ladder(*shape, SINKS)
    assert (ladder.block, ladder.kept, ladder.freed) == sizes


def test_one_ladder_rises_from_the_first_layer_to_the_last() -> None:
    found = Ladder(30, 8, 4, SINKS, "contiguous").first_kept().tolist()
    assert found == sorted(found)
    assert (found[0], found[-1]) == (0, 5)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"budget": 9}, "budget must be above 9"),  # 4 sinks, 4 layers, a step
        ({"span": 4}, "span must be below the model's 4 layers"),
        ({"span": 1, "overlap": 1}, "overlap must be below the span"),
        ({"span": 1.5}, "span must be a number of layers"),
        ({"overlap": -1}, "overlap"),
        ({"ladder": "spiral"}, "ladder must be one of modulo, contiguous"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, object], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        LaCache(**fields).start(CONFIG)  # type: ignore[arg-type]
