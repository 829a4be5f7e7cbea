"""A step's bytes are those of the arrays it reads, and its operations those of loops that count."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from tiny_checkpoints import write_tiny

from midfill.kernels.cpu.kv_cache import KVCache, KVCacheDtype
from midfill.models.checkpoints.opening import open_model
from midfill.models.config import ModelConfig
from midfill.runners.cpu.packed_model import load_packed
from midfill_lab.bench.roofline.ceilings import Resource
from midfill_lab.bench.roofline.work import (
    ATTENTION,
    ModelSize,
    PartWork,
    Rows,
    Savings,
    size_of,
    step_work,
)

STEPS = {
    "decode": [Rows(1, 40)],
    "decode, 3 streams": [Rows(3, 23)],
    "prefill": [Rows(1, 0, 57)],
    "more tokens": [Rows(2, 30, 11, outputs=2)],
    "mixed": [Rows(4, 50), Rows(1, 8, 24, outputs=0)],
}


@pytest.fixture(scope="module", params=["llama", "gemma3", "starcoder2"])
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelConfig, ModelSize, dict[str, int]]:
    """The configuration, the sizes that work follows from, and bytes of each packed matrix."""
    checkpoint = open_model(write_tiny(request.param, tmp_path_factory.mktemp(request.param)))
    packed = load_packed(checkpoint, "q8")
    weights = packed.weights
    arrays = {
        "qkv": weights.qkv.packed,
        "output": weights.o.packed,
        "MLP in": weights.gate_up.up.packed,  # gate and up lie side by side in one array
        "MLP out": weights.down.packed,
        "head": weights.head.packed,
    }
    size = size_of(checkpoint.config, packed, KVCacheDtype.F16)
    return checkpoint.config, size, {name: array.nbytes for name, array in arrays.items()}


def by_name(parts: Sequence[PartWork]) -> dict[str, PartWork]:
    return {part.name: part for part in parts}


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_weights_are_read_once_as_they_are_stored(
    model: tuple[ModelConfig, ModelSize, dict[str, int]], rows: list[Rows]
) -> None:
    _, size, stored = model
    parts = by_name(step_work(size, rows))
    assert {name: parts[name].bytes for name in stored} == stored
    assert size.weight_bytes == sum(stored.values())


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_kv_is_read_once_per_stream_within_each_layers_window(
    model: tuple[ModelConfig, ModelSize, dict[str, int]], rows: list[Rows]
) -> None:
    config, size, _ = model
    one = KVCache.allocate(KVCacheDtype.F16, 1, config.head_dim)
    entry = sum(array.nbytes for array in one)  # K and V of a token in one head
    read = 0
    for layer in range(config.layers):
        window = config.window_of(layer) or 1 << 30
        for each in rows:
            places = range(each.context, each.context + each.rows)
            seen = {key for at in places for key in range(at + 1) if at - key < window}
            read += each.streams * len(seen) * config.kv_heads * entry
    assert by_name(step_work(size, rows))[ATTENTION].bytes == read


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS)
def test_operations_are_those_that_a_forward_pass_counts(
    model: tuple[ModelConfig, ModelSize, dict[str, int]], rows: list[Rows]
) -> None:
    config, size, _ = model
    queries, keys = config.query_heads * config.head_dim, config.kv_heads * config.head_dim
    halves = 2 if config.gated_mlp else 1
    shapes = {
        "qkv": (config.hidden, queries + 2 * keys),
        "output": (queries, config.hidden),
        "MLP in": (config.hidden, halves * config.ffn),
        "MLP out": (config.ffn, config.hidden),
    }
    counted = dict.fromkeys((*shapes, ATTENTION, "head"), 0)
    for each in rows:
        for layer in range(config.layers):
            window = config.window_of(layer) or 1 << 30
            for row in range(each.rows):
                for name, (inputs, outputs) in shapes.items():
                    counted[name] += each.streams * 2 * inputs * outputs
                at = each.context + row
                for _ in (key for key in range(at + 1) if at - key < window):
                    # A product of the query with the key, and one of its weight with the value.
                    counted[ATTENTION] += each.streams * 2 * 2 * queries
        counted["head"] += each.streams * each.outputs * 2 * config.hidden * config.vocab
    parts = by_name(step_work(size, rows))
    assert {name: parts[name].operations for name in counted} == counted


def test_float32_weights_are_multiplied_in_float32(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    checkpoint = open_model(write_tiny("llama", tmp_path_factory.mktemp("exact")))
    exact = size_of(checkpoint.config, load_packed(checkpoint, "f32"), KVCacheDtype.F32)
    rounded = size_of(checkpoint.config, load_packed(checkpoint, "q8"), KVCacheDtype.F32)
    assert {part.arithmetic for part in step_work(exact, [Rows(1, 5)])} == {Resource.FLOAT32}
    kinds = {part.name: part.arithmetic for part in step_work(rounded, [Rows(1, 5)])}
    assert kinds.pop(ATTENTION) is Resource.FLOAT32
    assert set(kinds.values()) == {Resource.INT8}
    assert exact.weight_bytes > 3 * rounded.weight_bytes


def test_work_grows_with_context_and_batch(
    model: tuple[ModelConfig, ModelSize, dict[str, int]],
) -> None:
    _, size, _ = model
    for steps in (
        [[Rows(2, context)] for context in range(0, 120, 7)],
        [[Rows(streams, 33)] for streams in range(1, 9)],
        [[Rows(1, 10, rows)] for rows in range(1, 60, 3)],
    ):
        works = [step_work(size, rows) for rows in steps]
        for before, after in pairwise(works):
            for smaller, larger in zip(before, after, strict=True):
                assert smaller.bytes <= larger.bytes
                assert smaller.operations <= larger.operations
        total = [sum(part.operations for part in work) for work in works]
        assert np.all(np.diff(total) >= 0)  # a window is full at some context
        assert total[0] < total[-1]


def test_a_method_saves_what_it_leaves_out(
    model: tuple[ModelConfig, ModelSize, dict[str, int]],
) -> None:
    _, size, _ = model
    full, kept = (
        by_name(step_work(size, [Rows(1, 64, 32)], savings))
        for savings in (Savings(), Savings(keys=0.25))
    )
    assert kept[ATTENTION].bytes == full[ATTENTION].bytes / 4
    assert kept[ATTENTION].operations == full[ATTENTION].operations / 4
    assert all(kept[name] == full[name] for name in full if name != ATTENTION)
    fewer = by_name(step_work(size, [Rows(1, 64, 32)], Savings(rows=0.5, pairs=0.25)))
    assert fewer["MLP in"].operations == full["MLP in"].operations / 2
    assert fewer["MLP in"].bytes == full["MLP in"].bytes
    assert fewer[ATTENTION].operations == full[ATTENTION].operations / 4
    assert fewer[ATTENTION].bytes == full[ATTENTION].bytes
    assert fewer["head"] == full["head"]


def test_an_empty_step_requires_nothing(
    model: tuple[ModelConfig, ModelSize, dict[str, int]],
) -> None:
    _, size, _ = model
    for rows in ([], [Rows(0, 100)], [Rows(1, 100, rows=0, outputs=0)]):
        assert all(part.bytes == part.operations == 0 for part in step_work(size, rows))


def test_of_experts_those_are_read_that_rows_are_sent_to(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    checkpoint = open_model(write_tiny("qwen2moe", tmp_path_factory.mktemp("experts")))
    config, packed = checkpoint.config, load_packed(checkpoint, "q8")
    experts, matrices = config.experts, packed.matrices
    assert experts is not None
    size = size_of(config, packed, KVCacheDtype.F16)
    one, two = (by_name(step_work(size, [Rows(1, 0, rows)])) for rows in (1, 2))
    stored = matrices["experts_in"].stored_bytes
    assert one["experts in"].bytes == pytest.approx(stored * 3 / 10)
    # The second row is sent to 3 of 10 experts, too, of which 7 in 10 are others.
    assert two["experts in"].bytes == pytest.approx(stored * (3 + 3 * 7 / 10) / 10)
    weights = config.layers * experts.per_token * config.hidden * experts.ffn
    assert one["experts out"].operations == pytest.approx(2 * weights)
    assert two["experts out"].operations == pytest.approx(4 * weights)
    assert one["router"].arithmetic is Resource.FLOAT32
    shared = [matrices[name].stored_bytes for name in ("shared_gate", "shared_up")]
    assert one["MLP in"].bytes == two["MLP in"].bytes == sum(shared)
    assert size.weight_bytes < packed.weight_bytes
