"""Nulls of methods that quantise: as many bytes, spent the same way whatever else runs."""

from dataclasses import replace

import numpy as np
import pytest
from fake_keys import CONFIG, ArrayCells

from midfill.errors import InvalidRequestError
from midfill.methods.evict.method import CompressionMethod, RecallingMethod, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.method import ModelSpecific
from midfill.methods.quantize.zipcache import ZipCache
from midfill.methods.registry import resolve_method
from midfill.methods.served_model import ServedModel
from midfill_lab.bench.methods.nulls import NULLS, make_null

COUNT, DIM = 512, 64
HEAD = replace(CONFIG, layers=1, kv_heads=2, query_heads=2, head_dim=DIM)
SERVED = ServedModel(config=HEAD)
SPECIFICATIONS = {"kivi": "kivi:residual=0", "zipcache": "zipcache:recent=1"}
ALL = [(name, title) for name in SPECIFICATIONS for title in NULLS[name]]
each_null = pytest.mark.parametrize(("name", "title"), ALL)


def own(name: str) -> CompressionMethod:
    method = resolve_method(SPECIFICATIONS[name])
    assert isinstance(method, ModelSpecific)
    found = method.for_model(SERVED)
    assert isinstance(found, CompressionMethod)
    return found


def null(name: str, title: str) -> CompressionMethod:
    return make_null(SPECIFICATIONS[name], title, SERVED)


def select(method: CompressionMethod, seed: int = 0) -> Selection:
    """What it does with a prompt all of whose queries come at its end."""
    rng = np.random.default_rng(seed)
    arrays = rng.normal(size=(2, 2 * COUNT, DIM)).astype(np.float32)
    cells = np.arange(2 * COUNT, dtype=np.int32).reshape(2, COUNT)
    keys = SequenceKeys(HEAD, list(cells), ArrayCells(arrays[0], arrays[1]))
    compressor = method.start(HEAD)
    if isinstance(method, RecallingMethod):
        _, compressor = method.recall(rng.integers(0, 99, COUNT).astype(np.int32), "")
    found = compressor.select(keys, rng.normal(size=(1, COUNT, 2, DIM)).astype(np.float32))
    assert found is not None
    found.check(keys.counts)
    return found


def data_of(selection: Selection) -> bytes:
    assert selection.quantized is not None
    return b"".join(block.data.tobytes() for head in selection.quantized for block in head)


@each_null
def test_a_null_takes_as_many_bytes_as_its_method(name: str, title: str) -> None:
    expected, found = (len(data_of(select(one))) for one in (own(name), null(name, title)))
    if title == "uniform bits":
        assert 0.9 * expected < found <= expected
    else:
        assert found == pytest.approx(expected, rel=0.02)


@each_null
def test_a_null_gives_other_bytes_and_always_the_same_ones(name: str, title: str) -> None:
    method = null(name, title)
    found = data_of(select(method))
    assert found != data_of(select(own(name)))
    assert found == data_of(select(method)) == data_of(select(null(name, title)))


def test_a_random_split_is_another_in_each_head_and_prompt() -> None:
    method = null("zipcache", "random split")
    assert isinstance(method, ZipCache)
    rng, probes = np.random.default_rng(0), np.arange(COUNT, dtype=np.int32)
    splits = [
        method.split(method.saliency(rng.random(COUNT, np.float32), probes))[0] for _ in range(2)
    ]
    assert len(splits[0]) == len(splits[1]) == pytest.approx(0.6 * COUNT, abs=1)
    shared = len(np.intersect1d(*splits))
    assert shared == pytest.approx(0.36 * COUNT, abs=0.06 * COUNT)


def test_accumulated_attention_is_that_of_all_rows_undivided() -> None:
    method = null("zipcache", "accumulated score")
    assert isinstance(method, ZipCache)
    assert method.probes(np.arange(200, dtype=np.int32)).tolist() == list(range(200))
    received = np.random.default_rng(0).random(200, np.float32)
    probes = np.arange(200, dtype=np.int32)
    assert method.saliency(received, probes).tolist() == received.tolist()


@pytest.mark.parametrize(
    ("options", "bits"),
    [("", 3), ("salient=0.4", 2), ("salient=0.5,high=8,low=4", 4), ("salient=1,high=8", 8)],
)
def test_bits_are_spread_uniformly_by_their_average(options: str, bits: int) -> None:
    method = make_null(f"zipcache:{options}" if options else "zipcache", "uniform bits", SERVED)
    assert isinstance(method, ZipCache)
    assert (method.high, method.salient) == (bits, 1)


def test_exact_tokens_cannot_be_spread() -> None:
    with pytest.raises(InvalidRequestError, match=r"zipcache: .* have high at most 8"):
        make_null("zipcache:high=16", "uniform bits", SERVED)
