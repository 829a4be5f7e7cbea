"""Models in which some layers have a sliding window: what methods see, and what is kept."""

from dataclasses import replace

import numpy as np
import pytest
from fake_keys import CONFIG, KV_HEADS, LAYERS, fake_keys, fake_queries

from midfill.kv.quantized import QuantizedBlock
from midfill.kv.ragged import KeyTerms
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import AddedKeys, Selection
from midfill.methods.quantize.quantizers import quantize_tokens

MIXED = replace(CONFIG, sliding_window=6, windowed_layers=(0, 2))
FULL = (1, 3)
TOKENS = 20


def keys_of() -> SequenceKeys:
    keys, _ = fake_keys(TOKENS)
    return keys.of_heads(MIXED, np.arange(keys.heads))


@pytest.mark.parametrize("windowed", [None, (), tuple(range(LAYERS))])
def test_layers_that_are_alike_are_all_shown(windowed: tuple[int, ...] | None) -> None:
    config = replace(CONFIG, sliding_window=6 if windowed else None, windowed_layers=windowed)
    layers, keys, queries = FullLayers(config), keys_of(), fake_queries(4)
    assert layers.config == config
    assert layers.keys(keys) is keys
    assert layers.queries(queries) is queries
    selection = Selection.of_tokens(np.arange(5, dtype=np.int32), keys.heads)
    assert layers.complete(selection, keys.counts) is selection


def test_a_method_sees_a_model_of_the_layers_without_a_window() -> None:
    layers, keys, queries = FullLayers(MIXED), keys_of(), fake_queries(4)
    assert layers.config.layers == len(FULL)
    assert {layers.config.window_of(layer) for layer in range(len(FULL))} == {None}
    seen = layers.keys(keys)
    assert seen.config == layers.config
    assert seen.heads == len(FULL) * KV_HEADS
    for place, layer in enumerate(FULL):
        np.testing.assert_array_equal(layers.queries(queries)[place], queries[layer])
        for head in range(KV_HEADS):
            found = seen.cells(place * KV_HEADS + head)
            np.testing.assert_array_equal(found, keys.cells(layer * KV_HEADS + head))
    nothing = np.zeros((0, 0, 0, 0), np.float32)
    assert layers.queries(nothing) is nothing


def test_the_other_layers_keep_what_a_later_row_sees() -> None:
    layers, keys = FullLayers(MIXED), keys_of()
    chosen = [np.array([1, head, 15], np.int32) for head in range(3, 3 + 2 * KV_HEADS)]
    terms = KeyTerms.neutral(3 * len(chosen))
    terms.score_bias[:] = np.arange(len(terms.score_bias))
    added = AddedKeys(
        np.ones((1, 8), np.float32),
        np.ones((1, 8), np.float32),
        np.array([0, 0, 0, 0, 1, 1, 1], np.int32),  # the first head of the second layer seen
    )
    selection = replace(Selection.of_heads(chosen, added), terms=terms)
    whole = layers.complete(selection, keys.counts)
    whole.check(keys.counts)
    kept = np.split(whole.kept, whole.indptr[1:-1])
    biases = np.split(whole.terms.score_bias, whole.indptr[1:-1]) if whole.terms else []
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            number = layer * KV_HEADS + head
            if layer in FULL:
                place = FULL.index(layer) * KV_HEADS + head
                assert kept[number].tolist() == chosen[place].tolist()
                assert biases[number].tolist() == [3 * place, 3 * place + 1, 3 * place + 2]
            else:
                assert kept[number].tolist() == [15, 16, 17, 18, 19], "row 20 sees 15 to 20"
                assert not biases[number].any()
    assert whole.added is not None
    assert np.flatnonzero(np.diff(whole.added.indptr)).tolist() == [3 * KV_HEADS]


def test_gaps_stay_open_since_layers_hold_different_numbers_of_keys() -> None:
    layers, keys = FullLayers(MIXED), keys_of()
    tokens = Selection.of_tokens(np.arange(12, 20, dtype=np.int32), len(FULL) * KV_HEADS)
    assert not layers.complete(replace(tokens, close_gaps=True), keys.counts).close_gaps


def test_blocks_are_those_of_the_layers_that_a_method_sees() -> None:
    layers, keys = FullLayers(MIXED), keys_of()
    numbers = np.arange(len(FULL) * KV_HEADS, dtype=np.float32)
    vectors = np.broadcast_to(numbers[:, None, None], (len(numbers), 16, 16))
    blocks = QuantizedBlock.of_several(quantize_tokens(vectors, 8), quantize_tokens(vectors, 8))
    kept = [np.arange(16, TOKENS, dtype=np.int32)] * len(numbers)
    selection = Selection.of_heads(kept, quantized=[[block] for block in blocks])
    whole = layers.complete(selection, keys.counts)
    whole.check(keys.counts)
    assert whole.quantized is not None
    of_layers = [whole.quantized[layer * KV_HEADS] for layer in range(LAYERS)]
    assert [len(each) for each in of_layers] == [0, 1, 0, 1]
    assert of_layers[3][0] is blocks[KV_HEADS]
