"""ZipCache: probes, saliency and classes against loops over single tokens; what blocks hold."""

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from fake_keys import CONFIG, DIM, GROUP, KV_HEADS, ArrayCells, fake_keys, fake_queries
from fake_keys import naive_attention as naive_weights
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.kv.quantized import QuantizedBlock, QuantizedBlocks, cell_arrays
from midfill.methods.evict import accumulated_attention
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.evict.window_attention import received_attention
from midfill.methods.quantize.quantizers import (
    channel_magnitudes,
    quantize_separable,
    quantize_tokens,
)
from midfill.methods.quantize.zipcache import SalientTokens, ZipCache
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import build_engine, request, same, serve

BLOCK = 64
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=0)


def text(tokens: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.int32)


def read_prompt(
    method: ZipCache, keys: SequenceKeys, queries: np.ndarray, tokens: np.ndarray
) -> tuple[SalientTokens, Selection | None]:
    """Show a compressor a prompt as the engine does: what it doesn't know, block by block."""
    known, compressor = method.recall(tokens, "")
    first, count = known, len(tokens)
    for end in range(known + BLOCK, count, BLOCK):
        cells = [keys.cells(head)[:end] for head in range(keys.heads)]
        seen = SequenceKeys(keys.config, cells, keys._store)
        compressor.observe(seen, queries[:, first:end])
        first = end
    selection = compressor.select(keys, queries[:, first:count])
    if selection is not None:
        selection.check(keys.counts)
    return compressor, selection


def blocks_of(selection: Selection, head: int = 0) -> list[QuantizedBlock]:
    assert selection.quantized is not None
    return list(selection.quantized[head])


class SavedScores(ZipCache):
    """Notes the saliency of each head."""

    def saliency(self, received: np.ndarray, probes: np.ndarray) -> np.ndarray:
        scores = super().saliency(received, probes)
        self.__dict__.setdefault("seen", []).append((scores, probes))
        return scores


class TestProbes:
    @pytest.mark.parametrize("count", [1000, 1024, 2000, 5000])
    def test_are_a_tenth_of_the_rows_half_of_them_the_last(self, count: int) -> None:
        probes = ZipCache().probes(text(count))
        assert len(probes) == pytest.approx(0.1 * count, abs=4)
        recent = round(0.05 * count)
        assert probes[-recent:].tolist() == list(range(count - recent, count))
        assert (np.diff(probes) > 0).all()
        per_quarter = np.histogram(probes[:-recent], bins=4, range=(0, count - recent))[0]
        assert per_quarter == pytest.approx(0.05 * count / 4, abs=5)

    @pytest.mark.parametrize("count", [1, 2, 19])
    def test_of_a_short_prompt_are_its_last_row_at_least(self, count: int) -> None:
        assert count - 1 in ZipCache().probes(text(count))

    def test_follow_from_the_text_before_their_block(self) -> None:
        method, tokens = ZipCache(), text(1000)
        probes = method.probes(tokens)
        assert method.probes(tokens.copy()).tolist() == probes.tolist()
        longer = method.probes(np.concatenate((tokens, text(100, 1))))
        before = method.settled_rows(1000)
        assert longer[longer < before].tolist() == probes[probes < before].tolist()
        tokens[:BLOCK] += 1
        changed = method.probes(tokens)
        assert changed[changed < BLOCK].tolist() == probes[probes < BLOCK].tolist()
        assert changed[:90].tolist() != probes[:90].tolist()

    def test_alone_are_multiplied_with_keys(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rows = []

        def counted(
            keys: SequenceKeys, queries: np.ndarray, head: int, own: np.ndarray
        ) -> np.ndarray:
            assert queries.shape[1] == len(own)
            if head == 0:
                rows.extend(own.tolist())
            return received_attention(keys, queries, head, own)

        monkeypatch.setattr(accumulated_attention, "received_attention", counted)
        keys, _ = fake_keys(1000)
        read_prompt(ZipCache(), keys, fake_queries(1000), text(1000))
        assert rows == ZipCache().probes(text(1000)).tolist()
        assert len(rows) == pytest.approx(100, abs=2)


class TestSaliency:
    def test_by_all_rows_is_the_mean_of_the_columns_of_dense_attention(self) -> None:
        count = 150
        keys, store = fake_keys(count)
        queries = fake_queries(count)
        weights = naive_weights(store, queries, count)
        method = SavedScores(recent=0.0, random=1.0)
        read_prompt(method, keys, queries, text(count))
        for head, (scores, probes) in enumerate(method.__dict__["seen"]):
            assert probes.tolist() == list(range(count))
            layer, own = divmod(head, KV_HEADS)
            received = weights[layer, own * GROUP : (own + 1) * GROUP].sum(axis=(0, 1))
            np.testing.assert_allclose(scores, received / (count - np.arange(count)), atol=1e-5)

    @pytest.mark.parametrize("normalize", ["probes", "positions", "none"])
    def test_by_some_rows_is_that_of_a_double_loop(self, normalize: str) -> None:
        count = 200
        keys, store = fake_keys(count)
        queries = fake_queries(count)
        weights = naive_weights(store, queries, count)
        method = SavedScores(normalize=normalize)
        read_prompt(method, keys, queries, text(count))
        for head, (scores, probes) in enumerate(method.__dict__["seen"]):
            assert 18 <= len(probes) <= 22
            layer, own = divmod(head, KV_HEADS)
            for token in range(count):
                received, seen = 0.0, 0
                for probe in probes.tolist():
                    if probe >= token:
                        group = weights[layer, own * GROUP : (own + 1) * GROUP]
                        received += group[:, probe, token].sum()
                        seen += 1
                divisor = {"probes": seen, "positions": count - token, "none": 1}[normalize]
                assert scores[token] == pytest.approx(received / divisor, rel=1e-4, abs=1e-6)

    def test_finds_a_late_token_that_accumulated_attention_ranks_low(self) -> None:
        """Rows attend to all tokens alike, but half more to one near the end."""
        count, planted = 1000, 900
        keys, store = fake_keys(count)
        store.keys[:] = 0
        store.keys[planted::count, 0] = np.sqrt(DIM) * np.log(1.5)
        queries = fake_queries(count)
        queries[..., 0] = 1
        ranks = {}
        for normalize in ("probes", "none"):
            method = SavedScores(normalize=normalize)
            read_prompt(method, keys, queries, text(count))
            scores, _ = method.__dict__["seen"][0]
            ranks[normalize] = (scores > scores[planted]).mean()
        assert ranks["probes"] < 0.25
        assert ranks["none"] > 0.45


def test_a_beginning_that_was_read_before_is_not_read_again_and_gives_the_same_bits() -> None:
    count, method = 500, ZipCache()
    keys, _ = fake_keys(count)
    queries, tokens = fake_queries(count), text(count)
    _, cold = read_prompt(method, keys, queries, tokens)
    assert method.recall(tokens, "")[0] == method.settled_rows(count) == 448
    _, warm = read_prompt(method, keys, queries, tokens)
    _, elsewhere = read_prompt(ZipCache(), keys, queries, tokens)
    assert method.recall(tokens, "bob")[0] == 0, "tenants share nothing"
    assert cold is not None
    for found in (warm, elsewhere):
        assert found is not None
        for head in range(keys.heads):
            for one, other in zip(blocks_of(cold, head), blocks_of(found, head), strict=True):
                assert one.data.tobytes() == other.data.tobytes()


class TestClasses:
    @pytest.mark.parametrize("count", [5, 10, 99, 100])
    @pytest.mark.parametrize("salient", [0.0, 0.1, 0.6, 0.9, 1.0])
    def test_the_least_salient_are_the_others(self, count: int, salient: float) -> None:
        scores = np.random.default_rng(count).random(count).astype(np.float32)
        found, others = ZipCache(salient=salient).split(scores)
        assert len(others) == int(round((1 - salient) * count, 6))
        ranking = np.argsort(scores, kind="stable")
        assert others.tolist() == sorted(ranking[: len(others)].tolist())
        assert found.tolist() == sorted(ranking[len(others) :].tolist())

    @pytest.mark.parametrize("key_bits", [0, 3, 4])
    def test_have_bits_and_key_ranges_of_their_own_and_share_magnitudes(
        self, key_bits: int
    ) -> None:
        count = 120
        keys, _ = fake_keys(count)
        method = SavedScores(keys=key_bits)
        _, selection = read_prompt(method, keys, fake_queries(count), text(count))
        assert selection is not None
        assert not len(selection.kept), "all tokens are quantised"
        for head in range(keys.heads):
            exact, values = keys.read(head)
            magnitudes = np.sqrt(np.abs(values).max(axis=0))
            scores, _ = method.__dict__["seen"][head]
            classes = method.split(scores)
            for block, tokens, bits in zip(
                blocks_of(selection, head), classes, (4, 2), strict=True
            ):
                assert block.tokens == len(tokens)
                found, found_values = block.decode(DIM)
                own = exact[tokens]
                step = (own.max(axis=0) - own.min(axis=0)) / (2 ** (key_bits or bits) - 1)
                assert (np.abs(found - own) <= step / 2 + 0.01).all()
                divided = values[tokens] / magnitudes
                steps = (divided.max(axis=1) - divided.min(axis=1)) / (2**bits - 1)
                bound = steps[:, None] * magnitudes / 2 + 0.01
                assert (np.abs(found_values - values[tokens]) <= bound).all()

    def test_of_16_bits_and_of_few_tokens_stay_exact(self) -> None:
        keys, _ = fake_keys(100)
        queries, tokens = fake_queries(100), text(100)
        assert read_prompt(ZipCache(salient=1, high=16), keys, queries, tokens)[1] is None
        _, selection = read_prompt(ZipCache(high=16), keys, queries, tokens)
        assert selection is not None
        assert np.diff(selection.indptr).tolist() == [60] * keys.heads
        assert [block.tokens for block in blocks_of(selection)] == [40]
        short, _ = fake_keys(6)
        _, selection = read_prompt(ZipCache(), short, queries, tokens[:6])
        assert selection is not None
        assert np.diff(selection.indptr).tolist() == [2] * keys.heads
        assert [block.tokens for block in blocks_of(selection)] == [4]
        for count in (1, 2, 3):
            shortest, _ = fake_keys(count)
            assert read_prompt(ZipCache(), shortest, queries, tokens[:count])[1] is None

    @pytest.mark.parametrize("salient", [0.0, 1.0])
    def test_may_be_one(self, salient: float) -> None:
        keys, _ = fake_keys(50)
        _, selection = read_prompt(ZipCache(salient=salient), keys, fake_queries(50), text(50))
        assert selection is not None
        [block] = blocks_of(selection)
        assert block.tokens == 50

    def test_of_constant_channels_are_restored(self) -> None:
        keys, store = fake_keys(80)
        store.keys[:, 2], store.keys[:, 3] = 0.0, 1.5
        store.values[:, 4] = 0.0
        store.values[:80] = 0.0
        _, selection = read_prompt(ZipCache(), keys, fake_queries(80), text(80))
        assert selection is not None
        for head in range(keys.heads):
            for block in blocks_of(selection, head):
                found, values = block.decode(DIM)
                assert np.isfinite(found).all()
                assert np.isfinite(values).all()
                assert (found[:, 2] == 0).all()
                assert (found[:, 3] == 1.5).all()
                if head == 0:
                    assert not values.any()


def test_a_large_channel_costs_the_others_nothing() -> None:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(512, 64)).astype(np.float32)
    values[:, 7] *= 20
    for bits in (2, 4):
        error = {}
        found = {
            "separable": quantize_separable(values, bits, channel_magnitudes(values)),
            "plain": quantize_tokens(values, bits),
        }
        for name, vectors in found.items():
            error[name] = np.square(np.delete(vectors.decode() - values, 7, axis=1)).mean()
        assert np.sqrt(error["separable"]) < 0.5 * np.sqrt(error["plain"])
        whole = {name: np.linalg.norm(each.decode() - values) for name, each in found.items()}
        assert whole["separable"] < 0.5 * whole["plain"]


@pytest.mark.parametrize("count", [1024, 2048])
@pytest.mark.parametrize(("keys", "share"), [(0, 0.23), (4, 0.245)])
def test_a_prompt_takes_less_than_a_quarter_of_its_float16_bytes(
    count: int, keys: int, share: float
) -> None:
    config = replace(CONFIG, layers=1, kv_heads=1, query_heads=1, head_dim=64)
    rng = np.random.default_rng(0)
    arrays = rng.normal(size=(2, count, 64)).astype(np.float32)
    cells = [np.arange(count, dtype=np.int32)]
    held_keys = SequenceKeys(config, cells, ArrayCells(arrays[0], arrays[1]))
    queries = rng.normal(size=(1, count, 1, 64)).astype(np.float32)
    _, selection = read_prompt(ZipCache(keys=keys), held_keys, queries, text(count))
    assert selection is not None
    blocks, cell = blocks_of(selection), 2 * 2 * 64
    held = sum(block.cells(cell) for block in blocks)
    assert held * cell <= share * count * cell
    lists = QuantizedBlocks.of_heads([blocks], np.zeros(held, np.int32), cell)
    assert count * cell / (held * cell + lists.nbytes) > 4
    assert lists.nbytes < 0.005 * count * cell


class BlockCells(ArrayCells):
    """Cells of which some hold blocks."""

    def __init__(self, exact: ArrayCells, blocks: list[QuantizedBlock]) -> None:
        super().__init__(exact.keys, exact.values)
        self._arrays = cell_arrays(blocks, 4 * DIM)

    def dump(self, cells: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(array[cells] for array in self._arrays)


class TestWindow:
    """Tokens of the answer."""

    COUNT, WINDOW = 100, 40

    def answered(self, method: ZipCache) -> tuple[SalientTokens, SequenceKeys, np.ndarray]:
        """A compressor whose prompt is quantised, and the answer's first tokens beside it."""
        count, window = self.COUNT, self.WINDOW
        keys, store = fake_keys(count + window)
        prompt = SequenceKeys(
            CONFIG, [keys.cells(head)[:count] for head in range(keys.heads)], store
        )
        queries = fake_queries(count + window)
        compressor, selection = read_prompt(method, prompt, queries[:, :count], text(count))
        assert selection is not None
        heads = [blocks_of(selection, head) for head in range(keys.heads)]
        blocks = [block for head in heads for block in head]
        filled = sum(block.cells(4 * DIM) for block in blocks)
        held = BlockCells(store, blocks)
        cells = [keys.cells(head)[count:] for head in range(keys.heads)]
        table = QuantizedBlocks.of_heads(heads, np.arange(filled, dtype=np.int32), 4 * DIM)
        return compressor, SequenceKeys(CONFIG, cells, held, table), queries[:, count:]

    def test_is_a_segment_of_its_own(self) -> None:
        method = SavedScores(window=self.WINDOW)
        compressor, keys, queries = self.answered(method)
        other = compressor.fork()
        selection = compressor.select(keys, queries)
        assert selection is not None
        selection.check(keys.counts, keys.quantized_counts)
        assert not len(selection.kept)
        seen = method.__dict__["seen"][keys.heads :]
        for head, (scores, probes) in enumerate(seen):
            assert probes[-5:].tolist() == list(range(self.WINDOW - 5, self.WINDOW))
            layer, own = divmod(head, KV_HEADS)
            every = keys.read_keys(head)
            received = np.zeros(self.WINDOW)
            for probe in probes.tolist():
                for query in queries[layer, probe, own * GROUP : (own + 1) * GROUP]:
                    powers = every[: self.COUNT + probe + 1].astype(np.float64) @ query
                    powers = np.exp((powers - powers.max()) / np.sqrt(DIM))
                    received[: probe + 1] += (powers / powers.sum())[self.COUNT :]
            counts = (probes[:, None] >= np.arange(self.WINDOW)).sum(axis=0)
            np.testing.assert_allclose(scores, received / counts, rtol=1e-3, atol=1e-6)
            values = keys.read(head)[1]
            classes = method.split(scores)
            blocks = blocks_of(selection, head)
            assert [block.tokens for block in blocks] == [24, 16]
            for block, tokens in zip(blocks, classes, strict=True):
                exact = keys.read(head, tokens)[0]
                error = np.abs(block.decode(DIM)[0] - exact)
                assert error.max() < 0.3 * np.ptp(exact, axis=0).max()
            high = blocks[0].decode(DIM)[1]
            assert np.abs(high - values[classes[0]]).max() < 0.5
        again = other.select(keys, queries)
        assert again is not None
        assert blocks_of(again)[0].data.tobytes() == blocks_of(selection)[0].data.tobytes()

    def test_leaves_exact_tokens_of_the_prompt_alone(self) -> None:
        """Salient tokens of the prompt stay exact keys; those of the answer come after them."""
        method = ZipCache(high=16, window=10)
        keys, _ = fake_keys(60)
        compressor, selection = read_prompt(method, keys, fake_queries(60), text(60))
        assert selection is not None
        held = fake_keys(36 + 10)[0]
        later = compressor.select(held, fake_queries(10))
        assert later is not None
        for head in range(held.heads):
            kept = later.kept[later.indptr[head] : later.indptr[head + 1]]
            assert kept[:36].tolist() == list(range(36))
            assert len(kept) == 36 + 6
            assert [block.tokens for block in blocks_of(later, head)] == [4]
        assert compressor.exact == 42


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"salient": 1.1}, "salient must be a share from 0 to 1"),
        ({"recent": -0.1}, "recent must be a share"),
        ({"random": float("nan")}, "random must be a share"),
        ({"high": 5}, "high must be 1, 2, 3, 4, 8 or 16, not 5"),
        ({"low": 0}, "low must be 1"),
        ({"keys": 16}, "keys must be 0, 1, 2, 3, 4 or 8, not 16"),
        ({"high": 2, "low": 4}, "high must be at least the 4 bits of low"),
        ({"window": -1}, "window must be 0 or more"),
        ({"normalize": "rows"}, "normalize must be one of probes, positions, none"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, float], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        ZipCache(**fields)  # type: ignore[arg-type]


def test_models_whose_keys_cannot_be_quantised_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="zipcache quantises keys itself"):
        ZipCache().for_model(ServedModel(config=CONFIG, kv_cache_dtype="i8"))
    windows = replace(CONFIG, sliding_window=64)
    with pytest.raises(InvalidRequestError, match="zipcache"):
        ZipCache().for_model(ServedModel(config=windows))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))
    runner = CpuRunner.load(checkpoint, slots=800, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def test_the_next_keystroke_finds_its_beginning_and_gets_the_same_bits(runner: CpuRunner) -> None:
    tokens = random.Random(0).choices(range(1, VOCAB), k=200)
    alone = {}
    for count in (200, 180, 150):
        one = build_engine(runner, method=ZipCache())
        alone[count] = serve(one, [request("r", tokens[:count], PARAMS)])["r", 0]
    one = build_engine(runner, method=ZipCache(), token_budget=50)
    for count, tenant, cached in ((180, "a", 0), (200, "a", 128), (150, "a", 128), (150, "b", 0)):
        found = serve(one, [request("r", tokens[:count], PARAMS, tenant)])["r", 0]
        assert found.cached_tokens == cached
        assert same(found, alone[count])


def test_an_answer_is_quantised_window_by_window_and_may_end_inside_one(runner: CpuRunner) -> None:
    held = []

    def look(one: Engine) -> None:
        for sequence in one._queues.running:
            if sequence.kv is not None and sequence.kv.prefix is not None:
                quantized = sequence.kv.prefix.index.quantized
                assert quantized is not None
                exact = np.diff(sequence.kv.prefix.index.indptr) + len(sequence.kv.slots)
                held.append((int(quantized.counts[0]), int(exact[0])))

    tokens = random.Random(0).choices(range(1, VOCAB), k=100)
    engine = build_engine(runner, method=ZipCache(window=12))
    found = serve(engine, [request("r", tokens, PARAMS)], after_step=look)["r", 0]
    assert len(found.tokens) == 30
    assert [quantized for quantized, _ in held[:-1:12]] == [100, 112, 124]
    assert max(exact for _, exact in held) <= 13
    whole = serve(build_engine(runner, method=ZipCache(window=0)), [request("r", tokens, PARAMS)])
    assert whole["r", 0].logprobs[:12] == found.logprobs[:12]
    assert whole["r", 0].logprobs != found.logprobs


def test_a_class_of_a_window_may_be_too_small_to_be_quantised(runner: CpuRunner) -> None:
    """Of 8 tokens, 3 stay exact, though none of the prompt's did."""
    exact = []

    def look(one: Engine) -> None:
        for sequence in one._queues.running:
            if sequence.kv is not None and sequence.kv.prefix is not None:
                exact.append(np.diff(sequence.kv.prefix.index.indptr))

    tokens = random.Random(0).choices(range(1, VOCAB), k=100)
    engine = build_engine(runner, method=ZipCache(window=8))
    found = serve(engine, [request("r", tokens, PARAMS)], after_step=look)["r", 0]
    assert found.finish_reason == "length"
    assert [counts.tolist() for counts in exact[:17:8]] == [
        [held] * len(exact[0]) for held in (0, 3, 6)
    ]
