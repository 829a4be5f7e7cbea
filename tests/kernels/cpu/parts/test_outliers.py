"""Outliers are added to entries, scores and sums as NumPy adds them."""

import numpy as np
import pytest
from quantized_cells import placed

from midfill.kernels.cpu.parts.outliers import add_to_entries, add_to_scores, add_to_sums
from midfill.kernels.cpu.parts.quantized import cut_quantized, outliers_at, quantized_scratch_size
from midfill.kernels.cpu.segment_rows import SEGMENT
from midfill.kv.quantized import QuantizedVectors
from midfill.kv.quantized_layout import OUTLIERS

ROWS = 3
each_part = pytest.mark.parametrize(
    ("tokens", "first", "count"), [(300, 20, 256), (70, 0, 70), (300, 299, 1), (1, 0, 1)]
)
in_any_cells = pytest.mark.parametrize("scattered", [False, True])


def outliers(tokens: int, dim: int, share: float = 0.1) -> QuantizedVectors:
    """Vectors of which only outliers are more than 0."""
    rng = np.random.default_rng([tokens, dim])
    places = np.sort(rng.choice(tokens * dim, int(share * tokens * dim), replace=False))
    values = rng.normal(size=len(places)).astype(np.float16)
    codes = np.zeros((tokens, dim), np.uint8)
    nothing = np.zeros(dim, np.float16)
    return QuantizedVectors(
        codes, 4, channel_zero=nothing, outlier_places=places.astype(np.uint16), outliers=values
    )


def stored(one: QuantizedVectors, *, scattered: bool) -> tuple[object, int, int, np.ndarray]:
    """The block, where its outliers are, how many, and scratch."""
    tokens, dim = one.codes.shape
    source, fields = placed(one, scattered=scattered)
    scratch = cut_quantized(np.full(quantized_scratch_size(dim), np.nan, np.float32), dim)
    return source, outliers_at(fields, tokens, dim), int(fields[OUTLIERS]), scratch.raw


@in_any_cells
@each_part
@pytest.mark.parametrize("dim", [64, 96])
def test_they_are_added(tokens: int, first: int, count: int, dim: int, scattered: bool) -> None:
    one, rng = outliers(tokens, dim), np.random.default_rng(0)
    exact = one.decode()[first : first + count]
    source, at, number, raw = stored(one, scattered=scattered)
    where = source, at, number, first, count, dim, raw

    entries = rng.normal(size=count * dim).astype(np.float32)
    expected = entries.reshape(count, dim) + exact
    add_to_entries(*where, entries)
    np.testing.assert_allclose(entries.reshape(count, dim), expected, atol=1e-6)

    queries = rng.normal(size=(ROWS, dim)).astype(np.float32)
    scores = rng.normal(size=(ROWS, SEGMENT)).astype(np.float32)
    expected = scores[:, :count] + queries @ exact.T
    add_to_scores(*where, queries.reshape(-1), ROWS, scores.reshape(-1))
    np.testing.assert_allclose(scores[:, :count], expected, atol=1e-5)

    weights = rng.random((ROWS, SEGMENT)).astype(np.float32)
    sums = rng.normal(size=(ROWS, dim)).astype(np.float32)
    expected = sums + weights[:, :count] @ exact
    add_to_sums(*where, weights.reshape(-1), ROWS, sums.reshape(-1))
    np.testing.assert_allclose(sums, expected, atol=2e-5)
