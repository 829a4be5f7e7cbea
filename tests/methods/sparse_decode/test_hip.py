"""HiP: what its options mean, and which are refused."""

import pytest
from fake_keys import CONFIG

from midfill.errors import InvalidRequestError
from midfill.methods.registry import resolve_method
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_decode.hip import Hip
from midfill.methods.sparse_decode.method import ChosenPages
from midfill.runners.forward.page_selection import Search
from midfill.runners.forward.tree_search import TreeRule

MODEL = ServedModel(config=CONFIG, digest="d")


def test_k_is_blocks_and_the_first_layers_are_dense() -> None:
    method = resolve_method("hip:k=64,block=4,window=32,sinks=8,dense_layers=1,refresh=2")
    assert isinstance(method, Hip)
    ready = method.for_model(MODEL)
    assert ready == ChosenPages(TreeRule(16, 4, 32, 8, Search.CENTRES), 2, dense_layers=1)
    heads = ready.choosing_heads(CONFIG)
    assert not heads[0].any()
    assert heads[1:].all()


def test_defaults_are_those_of_the_reference() -> None:
    assert Hip().for_model(MODEL) == ChosenPages(TreeRule(256, 2, 256, 16), 8, dense_layers=3)


def test_all_layers_may_be_dense() -> None:
    assert not Hip(dense_layers=99).for_model(MODEL).choosing_heads(CONFIG).any()


def test_a_node_may_be_scored_by_its_first_block() -> None:
    assert Hip(representative="first").tree_rule.search is Search.FIRSTS


@pytest.mark.parametrize(
    ("specification", "error"),
    [
        ("hip:k=5", "k must be a multiple of block, 2, from 0 on, not 5"),
        ("hip:k=-2", "k must be a multiple of block, 2, from 0 on, not -2"),
        ("hip:block=0", "block must be at least 1, not 0"),
        ("hip:window=0", "window must be at least 1, not 0"),
        ("hip:sinks=-1", "sinks must be at least 0, not -1"),
        ("hip:dense_layers=-1", "dense_layers must be at least 0, not -1"),
        ("hip:refresh=0", "refresh must be at least 1, not 0"),
        ("hip:representative=last", "representative must be centre or first, not 'last'"),
    ],
)
def test_nonsense_is_refused(specification: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        resolve_method(specification)


@pytest.mark.parametrize("dtype", ["i8", "i4"])
def test_quantised_pools_are_refused(dtype: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"hip: .* f16, bf16 or f32, not {dtype} "):
        Hip().for_model(ServedModel(CONFIG, kv_cache_dtype=dtype))
