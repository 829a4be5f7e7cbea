"""Lists of sparse prefill against loops over single keys, and what the methods choose."""

from dataclasses import dataclass

import numpy as np
import pytest
from naive_probe import NaiveProbe

from midfill.errors import InvalidRequestError
from midfill.methods.sparse_prefill.flexprefill import (
    FlexPrefill,
    choose_pairs,
    covering,
    cross_pairs,
    divergence,
)
from midfill.methods.sparse_prefill.method import ChunkRule
from midfill.methods.sparse_prefill.minference import (
    CANDIDATES,
    HeadPatterns,
    Pattern,
    Shape,
    choose_patterns,
    pattern_mask,
)
from midfill.methods.sparse_prefill.patterns import block_lists, cross_mask, largest
from midfill.runners.forward.attention import QUERY_BLOCK, SpanLists, query_blocks

RNG = np.random.default_rng


@dataclass
class Setting:
    first: int
    rows: int

    @property
    def keys(self) -> int:
        return self.first + self.rows

    def probe(self, seed: int = 0, heads: int = 4, kv_heads: int = 2) -> NaiveProbe:
        rng = RNG(seed)
        queries = rng.normal(size=(self.rows, heads, 16)).astype(np.float32)
        keys = rng.normal(size=(self.keys, kv_heads, 16)).astype(np.float32)
        return NaiveProbe(0, queries, keys, 0.25)


SETTINGS = [Setting(0, 1), Setting(0, 64), Setting(0, 130), Setting(64, 65), Setting(320, 100)]
each_setting = pytest.mark.parametrize("at", SETTINGS, ids=str)


@each_setting
def test_columns_and_diagonals_are_those_of_a_loop_over_rows(at: Setting) -> None:
    rng = RNG(1)
    columns, diagonals = rng.random((2, 3, at.keys)) < 0.05
    diagonals[:, 0] = True
    mask = cross_mask(columns, diagonals, at.first, at.rows)
    expected = np.zeros((query_blocks(at.rows), 3, at.keys), bool)
    for block in range(len(expected)):
        start = at.first + block * QUERY_BLOCK
        for row in range(start, start + QUERY_BLOCK):
            for key in range(min(row + 1, at.keys)):
                expected[block, :, key] |= columns[:, key] | (
                    diagonals[:, row - key] if row - key < at.keys else False
                )
    # A column is listed in the whole block if its key comes before the block's end.
    np.testing.assert_array_equal(mask, expected)
    listed = SpanLists.from_mask(mask).mask(at.rows, at.keys)
    for row in range(at.rows):
        seen = at.first + row + 1
        ideal = columns[:, :seen] | diagonals[:, :seen][:, ::-1]
        assert (listed[:, row, :seen] | ~ideal).all()
        assert not listed[:, row, seen:].any()


@each_setting
def test_block_lists_are_those_of_a_loop_over_blocks(at: Setting) -> None:
    blocks = -(-at.keys // 64)
    pairs = RNG(2).random((query_blocks(at.rows), 2, blocks)) < 0.5
    lists = block_lists(pairs, 64, at.first, at.rows)
    for unit in range(len(pairs) * 2):
        end = at.first + min(at.rows, (unit // 2 + 1) * QUERY_BLOCK)
        expected = [
            key
            for block in np.flatnonzero(pairs[unit // 2, unit % 2])
            for key in range(block * 64, min(block * 64 + 64, end))
        ]
        spans = lists.spans[lists.indptr[unit] : lists.indptr[unit + 1]].tolist()
        assert [key for start, stop in spans for key in range(start, stop)] == expected


def test_largest_takes_the_first_of_equal_scores() -> None:
    scores = np.array([[1, 3, 2, 3, 2], [0, 0, 0, 0, 0]], np.float32)
    found = largest(scores, np.array([3, 2]))
    assert found.tolist() == [[False, True, True, True, False], [True, True, False, False, False]]


@pytest.mark.parametrize("number", range(len(CANDIDATES)))
@each_setting
def test_patterns_of_full_size_list_everything(at: Setting, number: int) -> None:
    pattern = Pattern(CANDIDATES[number].shape, 1.0, 1.0)
    mask = pattern_mask(at.probe(), (pattern,) * 4)
    listed = SpanLists.from_mask(mask).mask(at.rows, at.keys)
    assert listed.sum() == 4 * np.tri(at.rows, at.keys, at.first).sum()


@each_setting
@pytest.mark.parametrize("shape", Shape)
def test_every_row_attends_to_itself(at: Setting, shape: Shape) -> None:
    patterns = HeadPatterns("", ChunkRule(64, 0), ((Pattern(shape, 0.0, 0.0),) * 4,))
    for lists in (patterns.plan(at.probe()), FlexPrefill(least=1, gamma=0).plan(at.probe())):
        listed = lists.mask(at.rows, at.keys)
        assert listed[:, np.arange(at.rows), at.first + np.arange(at.rows)].all()


@pytest.mark.parametrize("shape", Shape)
def test_numbers_that_are_none_leave_every_row_its_own_key(shape: Shape) -> None:
    at = Setting(192, 100)
    probe = at.probe()
    probe._keys[100:] = np.nan
    patterns = HeadPatterns("", ChunkRule(64, 0), ((Pattern(shape, 0.2, 0.2),) * 4,))
    for method in (patterns, FlexPrefill(least=64), FlexPrefill(least=64, tau=1)):
        with np.errstate(invalid="ignore"):
            listed = method.plan(probe).mask(at.rows, at.keys)
        assert listed[:, np.arange(at.rows), at.first + np.arange(at.rows)].all()


def planted(at: Setting, column: int | None, distance: int | None) -> NaiveProbe:
    """Queries whose attention goes to one key, or to the key so far before each."""
    rng = RNG(3)
    codes = rng.normal(size=(at.keys, 64)).astype(np.float32)
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    rows = at.first + np.arange(at.rows)
    target = codes[
        [column] * at.rows if column is not None else np.maximum(rows - (distance or 0), 0)
    ]
    return NaiveProbe(0, target[:, None] * 40, codes[:, None], 1.0)


def test_a_planted_column_and_a_planted_diagonal_are_found() -> None:
    at = Setting(1024, 256)
    # A few more than the first keys and the nearest ones, which are always taken.
    pattern = (Pattern(Shape.VERTICAL_SLASH, 40 / at.keys, 110 / at.keys),)
    for column in (200, 511, 1000):
        mask = pattern_mask(planted(at, column, None), pattern)
        assert mask[:, 0, column].all()
    columns, diagonals = planted(at, None, 137).masses(64)
    assert diagonals[0].argmax() == 137
    lists = SpanLists.from_mask(pattern_mask(planted(at, None, 137), pattern))
    listed = lists.mask(at.rows, at.keys)
    assert all(listed[0, row, at.first + row - 137] for row in range(at.rows))
    assert listed[0].mean() < 0.5
    assert columns.shape == diagonals.shape


def test_tables_name_patterns_and_their_sizes() -> None:
    tables = {"pattern": np.array([[3.0, 0.0]]), "size": np.array([[2.0, 0.5]])}
    ((slash, shape_a),) = choose_patterns(tables, 1.5)
    assert slash == Pattern(CANDIDATES[3].shape, *(3 * one for one in CANDIDATES[3][1:]))
    assert shape_a == Pattern(Shape.A, *(0.75 * one for one in CANDIDATES[0][1:]))


def test_covering_counts_the_largest_weights() -> None:
    weights = np.array([[0.1, 0.5, 0.2, 0.2], [0.25, 0.25, 0.25, 0.25]], np.float32)
    assert covering(weights, 0.6).tolist() == [2, 3]
    assert covering(weights, 0.0).tolist() == [1, 1]
    assert covering(weights, 1.0).tolist() == [4, 4]


def test_divergence_is_symmetric_zero_for_equals_and_never_nan() -> None:
    rng = RNG(4)
    p, q = rng.dirichlet(np.ones(8), size=(2, 5)).astype(np.float32)
    p[:, 0] = 0
    p /= p.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(divergence(p, q), divergence(q, p), rtol=1e-5)
    np.testing.assert_allclose(divergence(p, p), 0, atol=1e-4)
    apart = divergence(np.eye(2, dtype=np.float32), np.eye(2, dtype=np.float32)[::-1])
    np.testing.assert_allclose(apart, np.sqrt(np.log(2)), rtol=1e-5)


@pytest.mark.parametrize("blocks", [2, 3, 7])
def test_cross_pairs_are_those_of_a_triple_loop(blocks: int) -> None:
    rng = RNG(blocks)
    columns, diagonals = rng.random((2, 2, blocks)) < 0.4
    own = np.arange(blocks // 2, blocks)
    found = cross_pairs(columns, diagonals, own)
    for place, row in enumerate(own):
        for head in range(2):
            for column in range(blocks):
                expected = column <= row and (
                    columns[head, column] or diagonals[head, row - column] or column in (0, row)
                )
                assert found[place, head, column] == expected


def naive_best_pairs(probe: NaiveProbe, head: int, gamma: float, size: int) -> set[tuple[int, int]]:
    """Pairs (block of rows, block of keys) of one head, taken one by one, the largest first."""
    queries = probe.mean_queries(size)[head]
    keys = probe.mean_keys(size)[head // (probe.query_heads // probe.kv_heads)]
    weights = {}
    for place, query in enumerate(queries):
        own = probe.first // size + place
        powers = [np.exp(float(query @ keys[block]) * probe.scale) for block in range(own + 1)]
        for block, power in enumerate(powers):
            weights[own, block] = power / sum(powers)
    taken, covered = set(), 0.0
    for pair in sorted(weights, key=lambda pair: -weights[pair]):
        covered += weights[pair]
        if taken and covered > gamma * len(queries):
            break
        taken.add(pair)
    return taken


@pytest.mark.parametrize("at", [Setting(0, 448), Setting(256, 130)], ids=str)
@pytest.mark.parametrize("gamma", [0.3, 0.6, 0.9])
def test_the_best_pairs_are_those_of_a_loop_that_takes_the_largest_first(
    at: Setting, gamma: float
) -> None:
    probe = at.probe(8)
    probe._queries *= 6  # rows differ in what they attend to
    found = choose_pairs(probe, FlexPrefill(gamma=gamma, tau=1.0, least=64))
    first, masses = at.first // 64, probe.masses(min(64, at.rows))
    for head in range(probe.query_heads):
        column, distance = (
            max(range(0, at.keys, 64), key=lambda start: own[start : start + 64].sum()) // 64
            for own in (mass[head] for mass in masses)
        )
        beside = {
            (row, key)
            for row in range(first, first + len(found))
            for key in range(row + 1)
            if key in (0, row, column, row - distance)
        }
        pairs = {(first + int(row), int(key)) for row, key in np.argwhere(found[:, head])}
        assert pairs == naive_best_pairs(probe, head, gamma, 64) | beside


def test_the_attention_inside_the_chosen_blocks_grows_with_gamma() -> None:
    """Counted columns cover gamma; blocks that hold as many columns promise nothing."""
    at = Setting(1024, 256)
    probe = at.probe(9)
    probe._queries *= 4
    columns, diagonals = probe.masses(64)
    inside = []
    for gamma in (0.3, 0.6, 0.9, 1.0):
        for mass in (columns / 64, diagonals / 64):
            counts = covering(mass, min(gamma, 0.999))
            best = -np.sort(-mass, axis=1)
            covered = [row[:count].sum() for row, count in zip(best, counts, strict=True)]
            assert min(covered) >= min(gamma, 0.999)
        pairs = choose_pairs(probe, FlexPrefill(gamma=gamma, tau=0.0, least=64))
        listed = block_lists(pairs, 64, at.first, at.rows).mask(at.rows, at.keys)
        rows = at.rows - 64
        weights = probe_weights(probe, 64)
        inside.append(float((weights * listed[:, rows:]).sum() / weights.sum()))
    assert inside == sorted(inside)
    assert inside[0] < inside[-2] < 0.9 < inside[-1] == pytest.approx(1)


def probe_weights(probe: NaiveProbe, rows: int) -> np.ndarray:
    """Softmax weights [heads, rows, keys] of the last rows."""
    keys = probe._keys.repeat(probe.query_heads // probe.kv_heads, axis=1)
    scores = np.einsum("qhd,khd->hqk", probe._queries[-rows:], keys) * probe.scale
    seen = np.tri(rows, len(keys), len(keys) - rows, dtype=bool)
    powers = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    return powers / powers.sum(-1, keepdims=True)


def test_flexprefill_covers_more_with_gamma_and_all_with_1() -> None:
    at = Setting(512, 256)
    counts = [
        int(choose_pairs(at.probe(5), FlexPrefill(gamma=gamma, least=64)).sum())
        for gamma in (0.3, 0.5, 0.8, 0.9, 0.95, 1.0)
    ]
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]
    lists = FlexPrefill(gamma=1.0).plan(at.probe(5))
    listed = lists.mask(at.rows, at.keys)
    assert listed.sum() == 4 * np.tri(at.rows, at.keys, at.first).sum()


def test_tau_decides_whether_pooled_estimates_are_trusted() -> None:
    at = Setting(512, 256)
    never = choose_pairs(at.probe(6), FlexPrefill(gamma=0.5, tau=0.0, least=64))
    always = choose_pairs(at.probe(6), FlexPrefill(gamma=0.5, tau=1.0, least=64))
    assert (never != always).any()
    repeated = choose_pairs(planted(at, 300, None), FlexPrefill(gamma=0.5, tau=0.0, least=64))
    assert repeated.mean() < never.mean(), "attention to one key needs fewer blocks"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"gamma": 1.5}, "gamma"),
        ({"tau": -1.0}, "tau"),
        ({"least": 0}, "least"),
        ({"block": 32}, "block must be 64 or 128"),
        ({"chunk": 100}, "multiple"),
        ({"chunk": 64, "block": 128}, "multiple of block"),
        ({"dense": -1}, "dense"),
    ],
)
def test_options_out_of_range_are_named(options: dict[str, float], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        FlexPrefill(**options)  # type: ignore[arg-type]


def test_short_chunks_and_early_ones_are_dense() -> None:
    rule = ChunkRule(256, 512)
    assert rule.is_dense(0, 256)
    assert rule.is_dense(256, 256)
    assert not rule.is_dense(512, 256)
    assert rule.is_dense(512, 63)
    assert FlexPrefill(least=1024, dense=0, chunk=256).is_dense(768, 256)
