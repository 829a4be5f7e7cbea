"""Rows that attend to quantised blocks, and so to what these stand for."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from tiny_checkpoints import VOCAB, write_variant

from midfill.kv.quantized import (
    QuantizedBlock,
    QuantizedBlocks,
    QuantizedVectors,
    cell_arrays,
)
from midfill.kv.quantized_layout import BITS_PER_CODE
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from serving import torch_runner

BEFORE, ROWS, SLOTS = 440, 40, 2300
QUANTIZED = 600
"""At most so many of a head's first keys are in blocks."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="module", params=[("f32", 1), ("f16", 2), ("bf16", 2)])
def cpu(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Iterator[CpuRunner]:
    kv, threads = request.param
    runner = CpuRunner.load(
        checkpoint, slots=SLOTS, threads=threads, weights="f32", kv_cache_dtype=kv
    )
    yield runner
    runner.close()


def batch(first: int, rows: int, cells: RaggedIndex | None = None) -> ForwardBatch:
    """Rows of one request whose token i is in slot i; with cells, these are the tokens before."""
    numbers = np.arange(first, first + rows, dtype=np.int32)
    slots = np.arange(0 if cells is None else BEFORE, first + rows, dtype=np.int32)
    tokens = np.random.default_rng(0).integers(1, VOCAB, 1000).astype(np.int32)
    return ForwardBatch(
        token_ids=tokens[numbers],
        positions=numbers,
        write_slots=numbers,
        query_indptr=np.array([0, rows], np.int32),
        kv_indptr=np.array([0, len(slots)], np.int32),
        kv_slots=slots,
        logit_rows=np.arange(rows, dtype=np.int32),
        attention=() if cells is None else (AttentionPlan(cells),),
    )


OUTLIERS, PER_TOKEN, PER_CHANNEL, ZEROS, RANK = 1, 2, 4, 8, 16
"""Terms by the bits of a number."""
PLAIN = (PER_TOKEN, PER_CHANNEL, PER_CHANNEL + ZEROS, PER_TOKEN + ZEROS)
"""Terms without a low rank and outliers, which take further products."""


def vectors(rng: np.random.Generator, count: int, dim: int, number: int) -> QuantizedVectors:
    """Random vectors that have the terms which the bits of ``number`` name."""

    def halves(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float16)

    bits = BITS_PER_CODE[number % 5]
    codes = rng.integers(0, 2**bits, (count, dim)).astype(np.uint8)
    small = np.float16(2 / 2**bits)
    per_token = number & PER_TOKEN
    some = 3 * (number & OUTLIERS)
    outliers = np.sort(rng.choice(count * dim, some, replace=False)).astype(np.uint16)
    groups = 2 if per_token and number & PER_CHANNEL else 1
    return QuantizedVectors(
        codes,
        bits,
        halves(count, groups, 2) * small if per_token else None,
        halves(dim) * (1 if per_token else small)
        if number & PER_CHANNEL or not per_token
        else None,
        halves(dim) if number & ZEROS else None,
        halves(count, 3) if number & RANK else None,
        halves(3, dim) if number & RANK else None,
        outliers if number & OUTLIERS else None,
        halves(len(outliers)) if number & OUTLIERS else None,
    )


def plain_vectors(rng: np.random.Generator, count: int, dim: int, number: int) -> QuantizedVectors:
    """Vectors whose codes are multiplied as they are."""
    bits = BITS_PER_CODE[number % 4]
    codes = rng.integers(0, 2**bits, (count, dim)).astype(np.uint8)
    terms = PLAIN[number // 4 % len(PLAIN)]

    def halves(*shape: int) -> np.ndarray:
        return (rng.normal(0, 0.3, shape) * 2 / 2**bits).astype(np.float16)

    return QuantizedVectors(
        codes,
        bits,
        halves(count, 1, 2) if terms & PER_TOKEN else None,
        halves(dim) if terms & PER_CHANNEL else None,
        halves(dim) if terms & ZEROS else None,
    )


MakeVectors = Callable[[np.random.Generator, int, int, int], QuantizedVectors]
each_kind = pytest.mark.parametrize("make", [vectors, plain_vectors])


def blocks_of(runner: Runner, make: MakeVectors = vectors) -> list[list[QuantizedBlock]]:
    """Blocks of each head: of all sizes and terms, some heads with few keys, one with none."""
    rng, config = np.random.default_rng(1), runner.config
    heads: list[list[QuantizedBlock]] = []
    number = 0
    for head in range(config.layers * config.kv_heads):
        left = [QUANTIZED, 0, 5, 300][head % 4]
        heads.append([])
        while left:
            count = min(left, int(rng.choice([1, 7, 64, 290])))
            pair = [make(rng, count, config.head_dim, n) for n in (number, number * 7 + 3)]
            heads[-1].append(QuantizedBlock.of(*pair))
            left, number = left - count, number + 1
    return heads


def exact_keys(runner: Runner) -> list[np.ndarray]:
    """The cells of each head's last 60 keys of those before the rows."""
    heads = runner.config.layers * runner.config.kv_heads
    return list(cells_of_slots(np.arange(BEFORE - 60, BEFORE, dtype=np.int32), heads, SLOTS))


def with_blocks(runner: Runner, make: MakeVectors = vectors) -> RaggedIndex:
    """Put the blocks into cells of the pool, and list them before the exact keys."""
    heads, width = blocks_of(runner, make), sum(runner.cells.layout.widths)
    flat = [block for blocks in heads for block in blocks]
    count = sum(block.cells(width) for block in flat)
    free = cells_of_slots(np.arange(800, 1200, dtype=np.int32), len(heads), SLOTS).reshape(-1)
    cells = np.random.default_rng(2).permutation(free)[:count]
    runner.cells.restore(cells, cell_arrays(flat, width))
    exact = exact_keys(runner)
    indptr = np.cumsum([0, *map(len, exact)]).astype(np.int32)
    quantized = QuantizedBlocks.of_heads(heads, cells, width)
    return RaggedIndex(np.concatenate(exact), indptr, quantized=quantized)


def with_cells(runner: Runner, make: MakeVectors = vectors) -> RaggedIndex:
    """Put what the blocks stand for into cells of the pool, as if it were exact."""
    dim, listed = runner.config.head_dim, []
    free = cells_of_slots(np.arange(1300, SLOTS, dtype=np.int32), len(exact_keys(runner)), SLOTS)
    pairs = zip(blocks_of(runner, make), exact_keys(runner), strict=True)
    for head, (blocks, exact) in enumerate(pairs):
        decoded = [
            np.concatenate(each) for each in zip(*(b.decode(dim) for b in blocks), strict=True)
        ]
        cells = free[head, : len(decoded[0]) if decoded else 0]
        if decoded:
            runner.cells.write(cells, *decoded)
        listed.append(np.concatenate((cells, exact)))
    indptr = np.cumsum([0, *map(len, listed)]).astype(np.int32)
    return RaggedIndex(np.concatenate(listed), indptr)


def logits(runner: Runner, cells: RaggedIndex, parts: list[int]) -> np.ndarray:
    """Logits of the rows after the first ones, run in parts of so many."""
    found, first = [], BEFORE
    for rows in parts:
        found.append(runner.forward(batch(first, rows, cells)).copy())
        first += rows
    return np.concatenate(found)


@each_kind
def test_blocks_count_as_what_they_stand_for(cpu: CpuRunner, make: MakeVectors) -> None:
    cpu.forward(batch(0, BEFORE))
    expected = logits(cpu, with_cells(cpu, make), [ROWS])
    found = logits(cpu, with_blocks(cpu, make), [ROWS])
    tolerance = {"f32": 1e-4, "f16": 0.1, "bf16": 0.2}[cpu.kv_cache_dtype.value]
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0.0)
    plain = cpu.forward(batch(BEFORE, ROWS)).copy()
    assert not np.allclose(plain, expected, atol=10 * tolerance)


def test_torch_agrees(cpu: CpuRunner, checkpoint: Checkpoint) -> None:
    if cpu.kv_cache_dtype.value != "f32":
        pytest.skip("torch keeps KV as float32 here")
    torch = torch_runner(checkpoint, slots=SLOTS)
    results = []
    for runner in (cpu, torch):
        runner.forward(batch(0, BEFORE))
        results.append(logits(runner, with_blocks(runner), [ROWS]))
    np.testing.assert_allclose(results[0], results[1], atol=1e-3, rtol=0.0)


@each_kind
def test_a_row_has_the_same_bits_however_it_is_run(cpu: CpuRunner, make: MakeVectors) -> None:
    cpu.forward(batch(0, BEFORE))
    cells = with_blocks(cpu, make)
    whole = logits(cpu, cells, [ROWS])
    assert np.array_equal(whole, logits(cpu, cells, [1, 3, ROWS - 4]))


@each_kind
def test_other_requests_of_the_step_keep_their_bits(cpu: CpuRunner, make: MakeVectors) -> None:
    cpu.forward(batch(0, BEFORE))
    own = batch(BEFORE, 2, with_blocks(cpu, make))
    alone = cpu.forward(own).copy()
    plain = batch(20, 5)
    expected = cpu.forward(plain).copy()
    both = ForwardBatch(
        token_ids=np.append(plain.token_ids, own.token_ids),
        positions=np.append(plain.positions, own.positions),
        write_slots=np.append(plain.write_slots, own.write_slots),
        query_indptr=np.array([0, 5, 7], np.int32),
        kv_indptr=np.array([0, 25, 25 + len(own.kv_slots)], np.int32),
        kv_slots=np.append(plain.kv_slots, own.kv_slots),
        logit_rows=np.arange(7, dtype=np.int32),
        attention=(None, *own.attention),
    )
    found = cpu.forward(both)
    assert np.array_equal(found[:5], expected)
    assert np.array_equal(found[5:], alone)
