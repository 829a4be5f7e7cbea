"""Nulls of MiKV and GEAR: as many bytes as their methods, on something else."""

from dataclasses import replace

import numpy as np
import pytest
from mixed_keys import CONFIG, DIM, HEADS, KV_HEADS, MixedKeys, bytes_per_head, made_queries

from midfill.errors import InvalidRequestError
from midfill.methods.evict.method import CompressionMethod
from midfill.methods.evict.selection import Selection
from midfill.methods.quantize.gear import Gear
from midfill.methods.quantize.mikv import MiKV
from midfill.methods.served_model import ServedModel
from midfill_lab.bench.methods.nulls import NULLS, make_null
from midfill_lab.bench.methods.spent_bits import bits_per_number, bytes_per_token

TOKENS = 200
SERVED = ServedModel(CONFIG)
MIKV = "mikv:ratio=0.3,low=2"


def select(method: CompressionMethod, seed: int = 0) -> Selection:
    mixed = MixedKeys(TOKENS, seed)
    mixed.grow(0, TOKENS)
    found = method.start(CONFIG).select(mixed.view(), made_queries(64))
    assert found is not None
    return found


def spent(selection: Selection) -> float:
    """Return the bytes per head."""
    if selection.quantized is None:
        return len(selection.kept) * DIM * 4 / HEADS
    return bytes_per_head(selection)


@pytest.mark.parametrize("specification", [MIKV, f"{MIKV},high=8", "mikv:low=4,ratio=0.1"])
@pytest.mark.parametrize("title", NULLS["mikv"])
def test_mikvs_nulls_take_as_many_bytes(specification: str, title: str) -> None:
    own, null = (select(make_null(specification, each, SERVED)) for each in ("no balancer", title))
    balancers = 2 * 2 * DIM
    assert abs(spent(null) - spent(own)) < 4 * DIM + balancers, "a token and balancers apart"


def test_what_is_important_is_drawn_or_reversed_and_the_newest_tokens_stay() -> None:
    kept = {
        title: np.split(found.kept, found.indptr[1:-1])
        for title in ("no balancer", "random split", "reversed score")
        for found in [select(make_null(MIKV, title, SERVED))]
    }
    for heads in kept.values():
        for head in heads:
            assert len(head) == 60
            assert head[-30:].tolist() == list(range(TOKENS - 30, TOKENS))
    for one, other in zip(kept["no balancer"], kept["reversed score"], strict=True):
        assert not set(one[:-30]) & set(other[:-30])
    drawn = [head.tolist() for head in kept["random split"]]
    assert len({tuple(head) for head in drawn}) == HEADS
    again = select(make_null(MIKV, "random split", SERVED))
    assert [head.tolist() for head in np.split(again.kept, again.indptr[1:-1])] == drawn
    assert select(make_null(MIKV, "random split", SERVED), seed=1).kept.tolist() != (
        again.kept.tolist()
    )


def test_uniform_bits_are_the_most_that_fit_and_the_rest_keeps_the_newest_tokens() -> None:
    method = make_null(MIKV, "uniform bits", SERVED)
    assert isinstance(method, MiKV)
    # 16 bits of three tokens in ten, 2 + 2 of the others: 7.6, of which 4 + 2 leave 1.6 of 10.
    assert (method.low, method.recent) == (4, 1.0)
    assert method.ratio == pytest.approx(0.16)
    assert bits_per_number(method, CONFIG) == pytest.approx(7.6)
    for head in np.split(select(method).kept, select(method).indptr[1:-1]):
        assert head.tolist() == list(range(TOKENS - 32, TOKENS))


@pytest.mark.parametrize("title", ["random directions", "random outliers"])
def test_gears_corrections_are_as_large_and_correct_less(title: str) -> None:
    rng = np.random.default_rng(0)
    keys, values = rng.standard_t(3, size=(2, KV_HEADS, 64, DIM)).astype(np.float32)
    null = make_null("gear", title, SERVED)
    assert isinstance(null, Gear)
    sizes, errors = [], []
    for method in (Gear(), null):
        blocks = method.encode(keys, values, 4)
        sizes.append(sum(len(block.data) for block in blocks))
        decoded = np.stack([block.decode(DIM)[0] for block in blocks])
        errors.append(np.linalg.norm(decoded - keys))
    assert sizes[0] == sizes[1]
    assert errors[0] < 0.97 * errors[1]


def test_gears_backbone_alone_is_the_dearest_that_costs_no_more() -> None:
    """With 64 channels: three bits, or groups of 32, instead of rank 4."""
    config = replace(CONFIG, head_dim=64)
    served = ServedModel(config)
    own = Gear(bits=2, outliers=0)
    wider = make_null("gear:bits=2,outliers=0", "wider codes", served)
    smaller = make_null("gear:bits=2,outliers=0", "smaller groups", served)
    assert wider == replace(own, bits=3, rank=0, later_rank=0)
    assert isinstance(smaller, Gear)
    assert (smaller.bits, smaller.rank, smaller.outliers) == (2, 0, 0)
    assert 0.9 < bytes_per_token(smaller, config) / bytes_per_token(own, config) <= 1


def test_nothing_to_spend_otherwise_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="low tier is as large"):
        make_null("mikv:ratio=1", "eviction", SERVED)
