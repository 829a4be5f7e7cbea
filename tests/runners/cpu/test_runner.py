"""CpuRunner: equal to transformers, and bit for bit the same however a prompt is computed."""

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numba
import numpy as np
import pytest
import torch
from ggml_blocks import with_bad_scale
from requantized_checkpoint import RequantizedCheckpoint
from tiny_checkpoints import STATELESS, VOCAB, reference_model, write_tiny, write_variant

from midfill.config import KVCacheDtypeName
from midfill.errors import CheckpointError
from midfill.kernels.cpu.jit import compiled_folder
from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu import runner as cpu_runner
from midfill.runners.cpu.packed_model import load_packed
from midfill.runners.cpu.runner import CpuRunner, choose_kv_cache_dtype, slot_bytes
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.stored_tensor import StoredTensor

SLOTS = 400


@pytest.fixture(scope="module", params=STATELESS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(open_checkpoint(folder), slots=SLOTS, threads=2)
    yield runner
    runner.close()


def batch(
    parts: Sequence[tuple[Sequence[int], int, np.ndarray]], *, all_logits: bool = True
) -> ForwardBatch:
    """parts: (token ids, how many tokens came before, the request's slots) each."""
    lengths = [len(ids) for ids, _, _ in parts]
    ends = np.cumsum(lengths)

    def int32(values: object) -> np.ndarray:
        return np.asarray(values, np.int32)

    return ForwardBatch(
        token_ids=int32(np.concatenate([ids for ids, _, _ in parts])),
        positions=int32(np.concatenate([np.arange(b, b + len(i)) for i, b, _ in parts])),
        write_slots=int32(np.concatenate([s[b : b + len(i)] for i, b, s in parts])),
        query_indptr=int32([0, *ends]),
        kv_indptr=int32(np.cumsum([0, *(b + len(i) for i, b, _ in parts)])),
        kv_slots=int32(np.concatenate([s[: b + len(i)] for i, b, s in parts])),
        logit_rows=int32(np.arange(ends[-1]) if all_logits else ends - 1),
    )


def run(
    runner: CpuRunner, ids: Sequence[int], slots: np.ndarray, cuts: Sequence[int]
) -> np.ndarray:
    """Logits of all positions, the prompt computed in chunks that end at ``cuts``."""
    parts, start = [], 0
    for end in (*cuts, len(ids)):
        parts.append(runner.forward(batch([(ids[start:end], start, slots)])).copy())
        start = end
    return np.concatenate(parts)


def run_last(runner: CpuRunner, ids: Sequence[int], slots: np.ndarray) -> np.ndarray:
    """Logits of the last token, all before it being computed."""
    return runner.forward(batch([(ids[-1:], len(ids) - 1, slots)])).copy()


def divergence(exact: np.ndarray, other: np.ndarray) -> float:
    """Mean KL divergence of logits [n, vocab], in nats a token."""
    p, q = log_softmax(exact), log_softmax(other)
    return float((np.exp(p) * (p - q)).sum(axis=-1).mean())


def token_ids(count: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(4, VOCAB, count).tolist()


def scattered(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).permutation(SLOTS).astype(np.int32)


def test_logits_and_greedy_tokens_equal_transformers(folder: Path, runner: CpuRunner) -> None:
    reference = reference_model(folder, runner.config.context)
    slots = scattered()
    tokens = token_ids(60)
    logits = run(runner, tokens, slots, [])
    for _ in range(64):
        tokens.append(int(logits[-1].argmax()))
        logits = np.concatenate([logits, run_last(runner, tokens, slots)])
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, atol=1e-4)
    # Each token follows from the ones before it, so equal choices here are equal answers.
    assert tokens[60:] == expected[59:-1].argmax(-1).tolist()


def test_the_same_bits_chunked_warm_and_batched(runner: CpuRunner) -> None:
    ids = token_ids(150, seed=1)
    cold = run(runner, ids, scattered(), [])
    chunked = run(runner, ids, scattered(2), [1, 2, 7, 70, 71, 135, 149])
    np.testing.assert_array_equal(chunked, cold)

    warm = runner.forward(batch([(ids[100:], 100, scattered(2))]))
    np.testing.assert_array_equal(warm, cold[100:])

    order = scattered(3)
    other = token_ids(33, seed=4)
    together = runner.forward(
        batch([(other, 0, order[200:]), (ids, 0, order), (other[:1], 0, order[390:])])
    )
    np.testing.assert_array_equal(together[33:183], cold)
    np.testing.assert_array_equal(together[183], together[0])


def test_the_most_likely_tokens_are_those_of_the_logits(runner: CpuRunner) -> None:
    ids = token_ids(90, seed=8)
    for step in (batch([(ids, 0, scattered())]), batch([(ids[:3], 0, scattered())])):
        logits = runner.forward(step)
        assert runner.argmax_tokens(logits) == logits.argmax(1).tolist()


def test_the_same_bits_layer_by_layer(runner: CpuRunner) -> None:
    ids = token_ids(40, seed=5)
    step = batch([(ids, 0, scattered())])
    whole = runner.forward(step).copy()
    hidden = runner.embed(step)
    for layer in range(runner.config.layers):
        hidden = runner.run_layers(step, hidden, layer, layer + 1)
    np.testing.assert_array_equal(runner.compute_logits(step, hidden), whole)


def test_its_build_covers_all_kernels_that_it_needs(runner: CpuRunner) -> None:
    usual = compiled_folder().name
    config = runner.config
    special = config.latent or config.altup
    assert runner.build.startswith("cpu ")
    digests = runner.build.split()[1:]
    assert (usual in digests) == (not special)
    assert len(digests) == 1 + (config.experts is not None)


def test_embeddings_touch_no_slots(runner: CpuRunner) -> None:
    """Where layers have slots of their own, those of one may be beyond the others' memory."""
    ids = token_ids(60, seed=6)
    expected = runner.embed(batch([(ids, 0, scattered())])).copy()
    for thousands in range(1, 1000, 90):
        beyond = np.arange(60, dtype=np.int32) * 64 + 1000 * thousands * SLOTS
        found = runner.embed(batch([(ids, 0, beyond)]))
        np.testing.assert_array_equal(found, expected)


def test_hidden_rows_belong_to_the_caller_whatever_else_runs_between_layers(
    runner: CpuRunner,
) -> None:
    first, second = (
        batch([(token_ids(count, seed=count), 0, scattered()[start : start + 60])])
        for count, start in ((40, 0), (60, 100))
    )
    expected = [runner.forward(step).copy() for step in (first, second)]
    hidden = [runner.embed(step) for step in (first, second)]
    middle = runner.config.layers // 2
    for start, end in ((0, middle), (middle, runner.config.layers)):
        for step, rows in zip((first, second), hidden, strict=True):
            runner.run_layers(step, rows, start, end)
            runner.forward(batch([(token_ids(9), 0, scattered()[300:])]))
    for step, rows, logits in zip((first, second), hidden, expected, strict=True):
        np.testing.assert_array_equal(runner.compute_logits(step, rows), logits)


def test_rows_can_be_dropped_before_the_logits(runner: CpuRunner) -> None:
    ids = token_ids(30, seed=11)
    step = batch([(ids, 0, scattered())])
    whole = runner.forward(step).copy()
    hidden = runner.run_layers(step, runner.embed(step), 0, runner.config.layers)
    last = batch([(ids[-1:], 29, scattered())])
    logits = runner.compute_logits(last, hidden[[29]])
    np.testing.assert_array_equal(logits, whole[29:])


def test_gathered_rows_between_layers_give_the_logits_of_all_rows(runner: CpuRunner) -> None:
    ids = token_ids(80, seed=12)
    step = batch([(ids, 0, scattered())])
    whole = runner.forward(step).copy()
    hidden = runner.run_layers(step, runner.embed(step), 0, runner.config.layers - 1)
    rows = np.array([0, 5, 6, 40, 78, 79], np.int32)
    gathered = ForwardBatch(
        token_ids=step.token_ids[rows],
        positions=rows,
        write_slots=step.write_slots[rows],
        query_indptr=np.array([0, len(rows)], np.int32),
        kv_indptr=step.kv_indptr,
        kv_slots=step.kv_slots,
        logit_rows=np.arange(len(rows), dtype=np.int32),
        visible_slots=rows + np.int32(1),
    )
    # The last layer's KV of the rows that left is there from the whole pass.
    kept = hidden[rows]
    runner.run_layers(gathered, kept, runner.config.layers - 1, runner.config.layers)
    np.testing.assert_array_equal(runner.compute_logits(gathered, kept), whole[rows])


def test_hidden_rows_that_do_not_fit_the_batch_are_refused(runner: CpuRunner) -> None:
    step = batch([(token_ids(5), 0, scattered())])
    width = runner.config.hidden
    for rows in (
        np.zeros((4, width), np.float32),
        np.zeros((5, width)),
        np.zeros((width, 5), np.float32).T,
    ):
        with pytest.raises(ValueError, match="hidden rows must be float32"):
            runner.run_layers(step, rows, 0, 1)


def test_threads_do_not_change_a_bit(llama: Checkpoint) -> None:
    ids = token_ids(90, seed=6)
    expected = None
    for threads in (1, 2, 3):
        runner = CpuRunner.load(llama, slots=SLOTS, threads=threads)
        got = run(runner, ids, scattered(), [50, 51])
        runner.close()
        expected = got if expected is None else expected
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kv_cache_dtype", ["f16", "bf16", "i8", "i4"])
def test_rounded_kv_keeps_the_same_bits_however_computed(
    llama: Checkpoint, kv_cache_dtype: KVCacheDtypeName
) -> None:
    ids = token_ids(150, seed=8)
    expected = None
    for threads in (1, 3):
        runner = CpuRunner.load(llama, slots=SLOTS, threads=threads, kv_cache_dtype=kv_cache_dtype)
        for cuts in ([], [1, 2, 7, 70, 71, 149]):
            got = run(runner, ids, scattered(threads), cuts)
            expected = got if expected is None else expected
            np.testing.assert_array_equal(got, expected)
        runner.close()


@pytest.mark.parametrize(
    ("kv_cache_dtype", "allowed"), [("f16", 1e-6), ("bf16", 1e-4), ("i8", 1e-3), ("i4", 0.2)]
)
def test_rounded_kv_stays_close(
    llama: Checkpoint, kv_cache_dtype: KVCacheDtypeName, allowed: float
) -> None:
    ids = token_ids(50, seed=9)
    exact = CpuRunner.load(llama, slots=SLOTS, threads=1)
    rounded = CpuRunner.load(llama, slots=SLOTS, threads=1, kv_cache_dtype=kv_cache_dtype)
    assert exact.kv_cache_dtype == KVCacheDtype.F32
    a, b = (run(r, ids, scattered(), []) for r in (exact, rounded))
    assert 0 < divergence(a, b) < allowed
    assert rounded.kv_bytes == SLOTS * slot_bytes(llama.config, KVCacheDtype(kv_cache_dtype))


@pytest.mark.parametrize(
    ("multiplied", "rounded"), [(True, KVCacheDtype.BF16), (False, KVCacheDtype.F16)]
)
def test_kv_is_rounded_by_default_where_weights_are(
    llama: Checkpoint, multiplied: bool, rounded: KVCacheDtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_runner, "multiplies_bfloat16", lambda: multiplied)
    assert choose_kv_cache_dtype(llama, "auto", "auto") == KVCacheDtype.F32
    assert choose_kv_cache_dtype(llama, "q4", "auto") == rounded
    assert choose_kv_cache_dtype(llama, "q4", "f32") == KVCacheDtype.F32


@pytest.mark.parametrize(("weights", "allowed"), [("q8", 0.02), ("q4", 1.0)])
def test_quantised_weights_stay_close(llama: Checkpoint, weights: str, allowed: float) -> None:
    ids = token_ids(50, seed=7)
    exact = CpuRunner.load(llama, slots=SLOTS, threads=1)
    rounded = CpuRunner.load(llama, slots=SLOTS, threads=1, weights=weights)
    a, b = (run(r, ids, scattered(), []) for r in (exact, rounded))
    assert 0 < divergence(a, b) < allowed
    assert rounded.weight_bytes < exact.weight_bytes / 2


def test_memory_is_stated_in_bytes(llama: Checkpoint) -> None:
    runner = CpuRunner.load(llama, slots=100, threads=1)
    assert runner.kv_bytes == 100 * slot_bytes(llama.config, KVCacheDtype.F32)
    tensors = [llama.tensor(name).to_float32().nbytes for name in llama.names()]
    # Beside the checkpoint's weights only zero biases and the rotary tables are kept.
    assert sum(tensors) <= runner.weight_bytes < 1.5 * sum(tensors)


def kinds_of_q4_k_m(name: str) -> str:
    """The kinds of a Q4_K_M file: Q6_K for the embedding, and for v and down of some layers."""
    return (
        "q6_k" if name in ("embed.weight", "layers.0.v.weight", "layers.1.down.weight") else "q4_k"
    )


@pytest.fixture(scope="module")
def k_quants(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    folder = write_tiny("llama", tmp_path_factory.mktemp("k-quants"), **sizes)
    return RequantizedCheckpoint(open_checkpoint(folder), kinds_of_q4_k_m)


def test_k_quants_give_the_logits_of_their_exact_weights(k_quants: Checkpoint) -> None:
    ids = token_ids(40, seed=5)
    logits = {}
    for weights in ("auto", "f32"):
        runner = CpuRunner.load(
            k_quants, slots=SLOTS, threads=2, weights=weights, kv_cache_dtype="f32"
        )
        logits[weights] = run(runner, ids, scattered(), [])
        if weights == "auto":
            np.testing.assert_array_equal(
                run(runner, ids, scattered(1), [1, 6, 9, 30]), logits["auto"]
            )
        runner.close()
    # What is left is the rounding of activations to int8.
    error = np.linalg.norm(logits["auto"] - logits["f32"]) / np.linalg.norm(logits["f32"])
    assert error < 0.03


def test_k_quants_take_hardly_more_memory_than_in_the_file(
    k_quants: Checkpoint, tmp_path: Path
) -> None:
    matrices = load_packed(k_quants, folder=tmp_path).matrices
    stored = [k_quants.tensor(name) for name in k_quants.names()]
    in_file = sum(tensor.data.nbytes for tensor in stored if len(tensor.shape) == 2)
    packed = {id(matrix.packed): matrix.packed.nbytes for matrix in matrices.values()}
    assert sum(packed.values()) <= 1.03 * in_file


def test_a_scale_that_is_no_number_is_one_clear_line(
    k_quants: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = k_quants.tensor

    def damaged(name: str) -> StoredTensor:
        tensor = whole(name)
        return with_bad_scale(tensor, np.nan) if name == "layers.1.up.weight" else tensor

    monkeypatch.setattr(k_quants, "tensor", damaged)
    with pytest.raises(CheckpointError, match=r"layers\.1\.up\.weight.*NaN; download it again"):
        load_packed(k_quants, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_packed_weights_are_made_once_and_a_damaged_cache_is_replaced(
    llama: Checkpoint, tmp_path: Path
) -> None:
    steps: list[str] = []

    def progress(what: str, done: int, total: int) -> None:
        steps.append(what)

    first = load_packed(llama, "q8", progress, tmp_path)
    (cached,) = tmp_path.iterdir()
    whole = cached.read_bytes()
    assert "packing weights" in steps
    steps.clear()
    second = load_packed(llama, "q8", progress, tmp_path)
    assert set(steps) == {"reading weights"}
    np.testing.assert_array_equal(first.weights.qkv.packed, second.weights.qkv.packed)
    # Otherwise the kernels would be compiled twice: for the first start, and for all others.
    assert numba.typeof(first.weights) == numba.typeof(second.weights)

    cached.write_bytes(whole[: len(whole) // 2])
    load_packed(llama, "q8", progress, tmp_path)
    assert "packing weights" in steps
    assert cached.read_bytes() == whole


def test_large_packed_weights_are_stored_while_the_model_is_in_use(
    llama: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midfill.runners.cpu.packed_model._MAX_STORED_AT_ONCE", 0)
    first = load_packed(llama, "q8", folder=tmp_path)
    for thread in threading.enumerate():
        if thread.name == "store packed weights":
            thread.join()
    stages: list[str] = []
    second = load_packed(llama, "q8", lambda stage, done, total: stages.append(stage), tmp_path)
    assert set(stages) == {"reading weights"}
    np.testing.assert_array_equal(first.weights.qkv.packed, second.weights.qkv.packed)


def test_an_unsupported_shape_is_one_clear_line(tmp_path: Path) -> None:
    odd = open_checkpoint(write_tiny("llama", tmp_path, head_dim=24))
    with pytest.raises(CheckpointError, match=r"head_dim = 24 .* --backend torch"):
        load_packed(odd)
