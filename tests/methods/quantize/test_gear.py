"""GEAR: backbone, outliers and low rank against plain loops."""

from dataclasses import replace

import numpy as np
import pytest
from mixed_keys import CONFIG, DIM, HEADS, KV_HEADS, MixedKeys, bytes_per_head

from midfill.errors import InvalidRequestError
from midfill.kv.quantized import QuantizedBlock, QuantizedVectors, unpack_stream
from midfill.methods.evict.selection import Selection
from midfill.methods.quantize.gear import Gear, extremes, low_rank
from midfill.methods.served_model import ServedModel

NOTHING = np.zeros((0, 0, 0, 0), np.float32)
TOKENS = 128


def select(method: Gear, mixed: MixedKeys) -> Selection:
    found = method.start(CONFIG).select(mixed.view(), NOTHING)
    assert found is not None
    return found


def layer_vectors(
    tokens: int = TOKENS, seed: int = 0, outliers: float = 0.01
) -> tuple[np.ndarray, np.ndarray]:
    """Keys with channels of their own sizes, and values, with a share of outliers in both.

    Returns:
        float32 [KV_HEADS, tokens, DIM] each, of numbers that float16 has.
    """
    rng = np.random.default_rng(seed)
    keys, values = rng.normal(size=(2, KV_HEADS, tokens, DIM))
    keys = keys * rng.uniform(0.1, 4, size=(KV_HEADS, 1, DIM)) + rng.normal(size=(KV_HEADS, 1, DIM))
    for part in (keys, values):
        part[rng.random(part.shape) < outliers] *= 8
    return tuple(part.astype(np.float16).astype(np.float32) for part in (keys, values))  # type: ignore[return-value]


def streams(block: QuantizedBlock) -> tuple[QuantizedVectors, QuantizedVectors]:
    parts = block.fields[: len(block.fields) // 2], block.fields[len(block.fields) // 2 :]
    keys, values = (unpack_stream(block.data, part, block.tokens, DIM) for part in parts)
    return keys, values


def errors(method: Gear, rank: int = 4) -> tuple[float, float]:
    """Return the Frobenius norms of what a layer's keys and values lose."""
    keys, values = layer_vectors()
    decoded = [block.decode(DIM) for block in method.encode(keys, values, rank)]
    return tuple(  # type: ignore[return-value]
        float(np.linalg.norm(np.stack(found) - exact))
        for found, exact in zip(zip(*decoded, strict=True), (keys, values), strict=True)
    )


def test_the_backbone_is_by_channel_for_keys_and_by_token_for_values() -> None:
    """Without corrections, against a loop over single numbers."""
    keys, values = layer_vectors(16)
    method = Gear(bits=2, outliers=0, group=16)
    for head, block in enumerate(method.encode(keys, values, 0)):
        found_keys, found_values = block.decode(DIM)
        for token, channel in np.ndindex(16, DIM):
            group = slice(channel // 16 * 16, channel // 16 * 16 + 16)
            for found, exact, vector in (
                (found_keys, keys, keys[head, :, channel]),
                (found_values, values, values[head, token, group]),
            ):
                low, step = vector.min(), (vector.max() - vector.min()) / 3
                steps = (exact[head, token, channel] - low) / step
                if abs(steps % 1 - 0.5) > 0.01:
                    expected = low + step * round(float(steps))
                    assert found[token, channel] == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_outliers_are_the_largest_and_smallest_of_each_vector_and_stay_as_they_were() -> None:
    """Of a key's channel over the block, and of a token's values in all heads of the layer."""
    keys, values = layer_vectors()
    method = Gear(outliers=0.05)
    blocks = [streams(block) for block in method.encode(keys, values, 4)]
    per_channel, per_token = round(0.05 * TOKENS / 2), round(0.05 * KV_HEADS * DIM / 2)
    expected = [np.zeros((KV_HEADS, TOKENS, DIM), bool) for _ in range(2)]
    for head, channel in np.ndindex(KV_HEADS, DIM):
        order = np.argsort(keys[head, :, channel])
        expected[0][head, order[[*range(per_channel), *range(-per_channel, 0)]], channel] = True
    for token in range(TOKENS):
        order = np.argsort(values[:, token].reshape(-1))
        for place in order[[*range(per_token), *range(-per_token, 0)]]:
            expected[1][place // DIM, token, place % DIM] = True
    for head, both in enumerate(blocks):
        for stream, exact, outliers in zip(both, (keys, values), expected, strict=True):
            assert stream.outlier_places is not None
            places = stream.outlier_places.astype(int)
            # float16 has equal numbers, of which either may be the outlier.
            chosen = np.sort(exact[head].reshape(-1)[places])
            assert chosen.tolist() == np.sort(exact[head][outliers[head]]).tolist()
            found = stream.decode().reshape(-1)[places]
            np.testing.assert_allclose(found, exact[head].reshape(-1)[places], rtol=2e-3, atol=2e-3)


def test_outliers_do_not_widen_the_range_of_the_codes() -> None:
    keys, values = layer_vectors()
    plain, without = (Gear(outliers=share).encode(keys, values, 0)[0] for share in (0, 0.1))
    for one, other in zip(streams(plain), streams(without), strict=True):
        scales = [
            each.channel_scale if each.token_terms is None else each.token_terms[..., 0]
            for each in (one, other)
        ]
        assert scales[1].astype(float).mean() < 0.8 * scales[0].astype(float).mean()  # type: ignore[union-attr]


def test_the_residual_counts_no_outlier_twice() -> None:
    """The low rank is of what the backbone gets wrong elsewhere."""
    keys, values = layer_vectors()

    class Recording(Gear):
        def factors(self, residual: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
            seen.append(residual)
            return super().factors(residual, rank)

    seen: list[np.ndarray] = []
    blocks = Recording(outliers=0.05).encode(keys, values, 2)
    for part, exact in enumerate((keys, values)):
        for head, block in enumerate(blocks):
            stream = streams(block)[part]
            backbone = replace(
                stream, basis=None, coefficients=None, outlier_places=None, outliers=None
            )
            expected = exact[head] - backbone.decode()
            assert stream.outlier_places is not None
            expected.reshape(-1)[stream.outlier_places] = 0
            np.testing.assert_allclose(seen[part][head], expected, atol=1e-6)


def test_each_correction_takes_some_of_the_error_off() -> None:
    plain, sparse, low, both = (
        errors(Gear(outliers=share), rank) for share, rank in ((0, 0), (0.02, 0), (0, 4), (0.02, 4))
    )
    for part in range(2):
        assert plain[part] > sparse[part] > both[part]
        assert plain[part] > low[part]


def test_the_error_falls_with_the_rank_and_with_the_bits() -> None:
    by_rank = np.array([errors(Gear(outliers=0), rank) for rank in range(0, 17, 2)])
    by_bits = np.array([errors(Gear(bits=bits)) for bits in (2, 3, 4, 8)])
    for found in (by_rank, by_bits):
        assert (np.diff(found, axis=0) < 0).all()


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_power_iterations_are_within_a_twentieth_of_the_best_rank(rank: int) -> None:
    keys, values = layer_vectors(outliers=0)
    backbones = Gear(outliers=0).encode(keys, values, 0)
    decoded = [block.decode(DIM) for block in backbones]
    for part, exact in enumerate((keys, values)):
        residual = exact - np.stack([each[part] for each in decoded])
        coefficients, basis = low_rank(residual, rank)
        for head in range(KV_HEADS):
            found = np.linalg.norm(residual[head] - coefficients[head] @ basis[head])
            best = np.linalg.norm(np.linalg.svd(residual[head])[1][rank:])
            assert best * (1 - 1e-5) <= found <= 1.05 * best


def test_the_full_rank_gives_a_matrix_back() -> None:
    keys, _ = layer_vectors(20)
    for count, rank in ((20, 20), (3, 3), (1, 1)):
        coefficients, basis = low_rank(keys[:, :count], rank)
        np.testing.assert_allclose(coefficients @ basis, keys[:, :count], atol=1e-4)


def test_all_outliers_give_all_numbers_back() -> None:
    for tokens in (1, 5, 64):
        keys, values = layer_vectors(tokens)
        for head, block in enumerate(Gear(outliers=1).encode(keys, values, 2)):
            found = block.decode(DIM)
            np.testing.assert_allclose(found[0], keys[head], rtol=2e-3, atol=1e-3)
            np.testing.assert_allclose(found[1], values[head], rtol=2e-3, atol=1e-3)


def test_three_products_are_attention_over_the_sum() -> None:
    """q (D + L + S)^T and p (D + L + S), term by term, are what decoded blocks give."""
    keys, values = layer_vectors()
    block = Gear(outliers=0.02).encode(keys, values, 4)[1]
    query = np.random.default_rng(1).normal(size=DIM)
    found_keys, found_values = block.decode(DIM)
    scores = products(streams(block)[0], query, transposed=True)
    np.testing.assert_allclose(scores, found_keys @ query, atol=1e-4)
    weights = np.exp(scores / np.sqrt(DIM)) / np.exp(scores / np.sqrt(DIM)).sum()
    expected = weights @ found_values
    np.testing.assert_allclose(
        products(streams(block)[1], weights, transposed=False), expected, atol=1e-5
    )


def products(stream: QuantizedVectors, vector: np.ndarray, *, transposed: bool) -> np.ndarray:
    """Return what D, L and S give by themselves, added up."""
    backbone = replace(stream, basis=None, coefficients=None, outlier_places=None, outliers=None)
    assert stream.outlier_places is not None
    assert stream.outliers is not None
    assert stream.coefficients is not None
    assert stream.basis is not None
    sparse = np.zeros(stream.codes.size)
    sparse[stream.outlier_places] = stream.outliers
    sparse = sparse.reshape(stream.codes.shape)
    coefficients, basis = (part.astype(np.float64) for part in (stream.coefficients, stream.basis))
    if transposed:
        return backbone.decode() @ vector + coefficients @ (basis @ vector) + sparse @ vector
    return vector @ backbone.decode() + (vector @ coefficients) @ basis + vector @ sparse


def formula(method: Gear, tokens: int, rank: int) -> float:
    """Bytes of a block's keys and values of one head, on average over the layer's heads."""
    codes = 2 * tokens * DIM * method.bits / 8
    backbone = 4 * DIM + 4 * tokens * max(DIM // method.group, 1)
    per_channel = int(method.outliers * tokens / 2 + 0.5)
    per_token = int(method.outliers * KV_HEADS * DIM / 2 + 0.5)
    outliers = 4 * 2 * (per_channel * DIM + per_token * tokens / KV_HEADS)
    return codes + backbone + 2 * 2 * rank * (tokens + DIM) + outliers


@pytest.mark.parametrize(
    "method",
    [Gear(), Gear(outliers=0), Gear(bits=2, rank=2), Gear(block=64), Gear(bits=3, group=16)],
)
def test_bytes_are_those_of_the_formula(method: Gear) -> None:
    """768 tokens in whole blocks, 20 in the buffer."""
    mixed = MixedKeys(788)
    mixed.grow(0, 788)
    blocks = 768 // method.block
    expected = blocks * formula(method, method.block, method.rank) + 20 * DIM * 4
    assert bytes_per_head(select(method, mixed)) == pytest.approx(expected)


def test_two_bits_and_rank_two_are_below_a_third_of_float16() -> None:
    """With 64 channels, 1,024 tokens, whole cells; outliers and rank 4 make it 27%."""
    rng = np.random.default_rng(0)
    keys, values = rng.normal(size=(2, 3, 256, 64)).astype(np.float32)
    for method, rank, expected in (
        (Gear(bits=2, outliers=0), 2, 0.184),
        (Gear(bits=2, outliers=0), 4, 0.223),
        (Gear(bits=2), 4, 0.267),
        (Gear(), 4, 0.392),
    ):
        cells = [block.cells(256) for block in method.encode(keys, values, rank)]
        assert np.mean(cells) / 256 == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize("outliers", [0.0, 0.05])
def test_a_layers_blocks_have_the_bytes_of_each_made_alone(outliers: float) -> None:
    method, mixed = Gear(block=64, buffer=20, outliers=outliers), MixedKeys(190)
    mixed.grow(0, 190)
    keys, selection = mixed.view(), select(method, mixed)
    assert selection.quantized is not None
    for layer in range(HEADS // KV_HEADS):
        heads = range(layer * KV_HEADS, (layer + 1) * KV_HEADS)
        for place, (start, end) in enumerate(((0, 64), (64, 128), (128, 180))):
            numbers = np.arange(start, end, dtype=np.int32)
            read = [keys.read(head, numbers) for head in heads]
            alone = method.encode(*(np.stack(part) for part in zip(*read, strict=True)), rank=4)
            for head, block in zip(heads, alone, strict=True):
                found = selection.quantized[head][place]
                assert (found.tokens, found.fields) == (block.tokens, block.fields)
                assert np.array_equal(found.data, block.data)


@pytest.mark.parametrize("axis", [-1, -2])
def test_extremes_are_those_of_each_vector_alone_though_numbers_are_equal(axis: int) -> None:
    vectors = np.random.default_rng(0).integers(-9, 9, (3, 40, 48)).astype(np.float32)
    vectors[0, :20] += np.random.default_rng(1).normal(size=(20, 48))
    found = np.moveaxis(extremes(vectors, 3, axis), axis, -1)
    for place in np.ndindex(found.shape[:-1]):
        vector = np.moveaxis(vectors, axis, -1)[place]
        order = np.argpartition(vector, (2, len(vector) - 3))
        expected = [*order[:3], *order[-3:]]
        assert np.flatnonzero(found[place]).tolist() == sorted(expected)


def test_a_prompt_is_compressed_in_blocks_and_the_rest_waits_in_the_buffer() -> None:
    method = Gear(block=64, buffer=20)
    mixed = MixedKeys(250)
    mixed.grow(0, 190)
    compressor = method.start(CONFIG)
    for end, tokens, ranks in ((190, [64, 64, 52], [4] * 3), (210, [20], [2]), (230, [20], [2])):
        mixed.grow(max(map(max, mixed.exact)) + 1, end)  # type: ignore[arg-type]
        selection = compressor.select(mixed.view(), NOTHING)
        assert selection is not None
        assert selection.quantized is not None
        for blocks in selection.quantized:
            assert [block.tokens for block in blocks] == tokens
            for block, rank in zip(blocks, ranks, strict=True):
                basis = streams(block)[0].basis
                assert basis is not None
                assert len(basis) == rank
        mixed.apply(selection)
        for head in range(HEADS):
            assert mixed.exact[head] == list(range(end - 10, end))
            assert mixed.quantized[head] == list(range(end - 10))


def test_fewer_tokens_than_the_buffer_stay_as_they_are() -> None:
    mixed = MixedKeys(63)
    mixed.grow(0, 63)
    assert Gear().start(CONFIG).select(mixed.view(), NOTHING) is None


def test_a_prompt_in_the_buffer_leaves_the_answers_rank_to_its_first_block() -> None:
    mixed = MixedKeys(70)
    mixed.grow(0, 40)
    compressor = Gear().start(CONFIG)
    assert compressor.select(mixed.view(), NOTHING) is None
    other = compressor.fork()
    mixed.grow(40, 70)
    for each in (compressor, other):
        selection = each.select(mixed.view(), NOTHING)
        assert selection is not None
        assert selection.quantized is not None
        basis = streams(selection.quantized[0][0])[0].basis
        assert basis is not None
        assert len(basis) == 2


def test_equal_keys_give_equal_bytes() -> None:
    """The power iterations begin with the same directions, whatever was computed before."""
    keys, values = layer_vectors()
    one = Gear().encode(keys, values, 4)
    np.random.default_rng().random(100)
    alone = Gear().encode(keys, values, 4)
    assert [block.data.tolist() for block in one] == [block.data.tolist() for block in alone]


@pytest.mark.parametrize("tokens", [1, 2, 3, 64])
@pytest.mark.parametrize("outliers", [0.0, 0.001, 0.02])
def test_constant_vectors_and_few_tokens_are_given_back(tokens: int, outliers: float) -> None:
    keys = np.full((KV_HEADS, tokens, DIM), 0.5, np.float32)
    values = np.full((KV_HEADS, tokens, DIM), -2.0, np.float32)
    for block in Gear(outliers=outliers).encode(keys, values, 4):
        found = block.decode(DIM)
        np.testing.assert_allclose(found[0], keys[0], atol=1e-3)
        np.testing.assert_allclose(found[1], values[0], atol=1e-3)


def test_so_few_outliers_that_they_round_to_none_are_none() -> None:
    keys, values = layer_vectors(32)
    one, other = (Gear(outliers=share).encode(keys, values, 2) for share in (0.001, 0))
    assert [block.data.tolist() for block in one] == [block.data.tolist() for block in other]


def test_extremes_are_as_many_as_asked_for_or_all() -> None:
    numbers = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)
    assert not extremes(numbers, 0, 1).any()
    assert extremes(numbers, 5, 1).all()
    for row, found in zip(numbers, extremes(numbers, 2, 1), strict=True):
        assert sorted(row[found]) == [*sorted(row)[:2], *sorted(row)[-2:]]
    assert (extremes(numbers, 1, 0).sum(axis=0) == 2).all()


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"bits": 5}, "bits must be 2, 3, 4 or 8"),
        ({"rank": 17}, "rank must be from 0 to 16"),
        ({"later_rank": -1}, "later_rank must be"),
        ({"outliers": 1.5}, "outliers must be a share"),
        ({"block": 0}, "block must be a number of tokens"),
        ({"buffer": 0}, "buffer must be a number of tokens"),
        ({"group": 24}, "group must be a multiple of 16"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, float], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        Gear(**fields)  # type: ignore[arg-type]


def test_blocks_whose_outliers_have_no_places_are_refused() -> None:
    served = ServedModel(replace(CONFIG, head_dim=256))
    with pytest.raises(InvalidRequestError, match="at most 256 tokens in this model, not 512"):
        Gear(block=512).for_model(served)
    assert Gear(block=512, outliers=0).for_model(served).block == 512
    assert Gear().for_model(served) == Gear()
    with pytest.raises(InvalidRequestError, match="gear quantises keys itself"):
        Gear().for_model(ServedModel(CONFIG, kv_cache_dtype="i4"))
