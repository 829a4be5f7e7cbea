"""HiP while prompts are computed: what blocks of rows read, and which options are refused."""

import numpy as np
import pytest
from fake_keys import CONFIG
from naive_probe import NaiveProbe

from midfill.errors import InvalidRequestError
from midfill.methods.registry import resolve_method
from midfill.methods.served_model import ServedModel
from midfill.methods.sparse_decode.hip import Hip
from midfill.methods.sparse_prefill.hip_prefill import HipPrefill, listed_keys
from midfill.methods.tree_options import TreeSearch
from midfill.runners.forward.attention import SpanLists
from midfill.runners.forward.page_selection import Search, all_pages
from midfill.runners.forward.tree_search import TreeRule

METHOD = HipPrefill(k=32, window=24, sinks=4, dense_layers=1, chunk=128, dense=0)


def probe(layer: int, first: int, rows: int) -> NaiveProbe:
    rng = np.random.default_rng([layer, first])
    queries, keys = rng.normal(size=(rows, 4, 8)), rng.normal(size=(first + rows, 2, 8))
    return NaiveProbe(layer, queries, keys, 1.0)


def test_lists_are_sinks_blocks_and_a_window_for_each_block_of_rows() -> None:
    first, rows, rule = 200, 100, TreeRule(3, block=2, window=24, sinks=4)
    chosen = np.zeros((2, 1, 4), np.int32)
    chosen[0, 0] = 177, 1, 5, 86  # the last block's second key lies in the window
    chosen[1, 0] = all_pages(rule)
    found = listed_keys(chosen, rule, first, rows)
    expected = np.zeros((2, 1, 300), bool)
    expected[0, 0, [0, 1, 2, 3, 6, 7, 14, 15, 176]] = True
    expected[0, 0, 177:264] = True
    expected[1, 0] = True
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(("first", "rows"), [(128, 128), (256, 64), (256, 100)])
def test_every_row_reads_its_window_the_sinks_and_what_its_block_chose(
    first: int, rows: int
) -> None:
    looked = probe(1, first, rows)
    listed = METHOD.plan(looked).mask(rows, first + rows)
    chosen = looked.search(METHOD.tree_rule, 2)
    for head in range(4):
        for row in range(rows):
            seen, own = first + row + 1, chosen[row // 64, head]
            read = set(np.flatnonzero(listed[head, row]).tolist())
            window = set(range(max(first + row // 64 * 64 + 1 - 24, 0), seen))
            blocks = {4 + 2 * int(block) + i for block in own[1:] for i in (0, 1)}
            assert read == set(range(4)) | window | {key for key in blocks if key < own[0]}


def test_prompts_and_answers_search_by_the_same_rule() -> None:
    options = {"k": 64, "window": 32, "sinks": 8, "block": 4, "representative": "first"}
    rules = [each(**options).tree_rule for each in (TreeSearch, HipPrefill, Hip)]
    assert rules == [TreeRule(16, 4, 32, 8, Search.FIRSTS)] * 3


def test_the_first_layers_are_dense() -> None:
    found = METHOD.plan(probe(0, 256, 128))
    expected = SpanLists.of_everything(4, 256, 128)
    assert np.array_equal(found.spans, expected.spans)
    assert np.array_equal(found.indptr, expected.indptr)


def test_short_prompts_and_the_rest_of_a_chunk_are_dense() -> None:
    method = HipPrefill(dense=1024)
    assert method.is_dense(0, 1024)
    assert method.is_dense(2048, 63)
    assert not method.is_dense(1024, 64)


def test_what_is_shared_names_all_hyper_parameters() -> None:
    assert HipPrefill(k=64).variant != HipPrefill(k=66).variant
    assert "chunk=1024" in HipPrefill().variant


@pytest.mark.parametrize(
    ("specification", "error"),
    [
        ("hip-prefill:k=5", "k must be a multiple of block, 2, from 0 on, not 5"),
        ("hip-prefill:chunk=100", "chunk must be a multiple of 64, not 100"),
        ("hip-prefill:window=0", "window must be at least 1, not 0"),
    ],
)
def test_nonsense_is_refused(specification: str, error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        resolve_method(specification)


def test_quantised_pools_are_refused() -> None:
    message = "hip-prefill: chooses among keys as they are and needs a KV cache of f16, bf16 or f32"
    with pytest.raises(InvalidRequestError, match=message):
        METHOD.for_model(ServedModel(CONFIG, kv_cache_dtype="i4"))
    assert METHOD.for_model(ServedModel(CONFIG, kv_cache_dtype="bf16")) == METHOD
