"""DuoAttention: the heads with the smallest gates stream."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_keys import CONFIG, KV_HEADS, LAYERS
from tiny_checkpoints import VOCAB, write_tiny, write_variant

from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.calibration_store import read, shipped_path
from midfill.methods.evict.duoattention import (
    NAME,
    VERSION,
    DuoAttention,
    StreamingPrefill,
    retrieval_heads,
)
from midfill.methods.evict.streaming_heads import StreamingRule
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, REGISTERED, resolve_adapter
from midfill.models.checkpoints.opening import model_digest, open_checkpoint, open_model
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import QUERY_BLOCK, query_blocks
from serving import build_engine, request, serve


def test_the_smallest_gates_stream() -> None:
    gates = np.ones((LAYERS, KV_HEADS))
    gates[1, 2], gates[3, 0], gates[0, 1] = 0.1, 0.2, 0.3
    assert np.flatnonzero(~retrieval_heads(gates, 2 / 12)).tolist() == [5, 9]
    assert retrieval_heads(gates, 0.0).all()
    assert not retrieval_heads(gates, 1.0).any()
    # Of equal gates the first ones stream, so that the number is right.
    assert np.flatnonzero(~retrieval_heads(np.ones((LAYERS, KV_HEADS)), 0.25)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(("sinks", "recent"), [(4, 30), (0, 30), (70, 64), (3, 1000)])
@pytest.mark.parametrize(("first", "rows"), [(0, 200), (128, 64), (192, 17)])
def test_streaming_heads_list_sinks_and_recent_keys(
    sinks: int, recent: int, first: int, rows: int
) -> None:
    """Each row finds the paper's mask in its block's list, and nothing far beyond it."""
    retrieval = (True, False, False, True)
    split = StreamingPrefill(StreamingRule(sinks, recent), retrieval, "", 64)
    probe = SimpleNamespace(layer=1, first=first, rows=rows, query_heads=4, kv_heads=2)
    lists = split.plan(probe)  # type: ignore[arg-type]
    keys = first + rows
    for block in range(query_blocks(rows)):
        start = first + block * QUERY_BLOCK
        end = min(start + QUERY_BLOCK, keys)
        for head in range(4):
            spans = lists.spans[slice(*lists.indptr[block * 4 + head :][:2])]
            listed = {key for low, high in spans for key in range(low, high)}
            assert len(listed) == sum(high - low for low, high in spans), "spans are apart"
            if retrieval[2 + head // 2]:
                assert listed == set(range(end))
                continue
            for row in range(start, end):
                wanted = {j for j in range(row + 1) if j < sinks or row - j < recent}
                assert wanted <= listed
            assert listed == {j for j in range(end) if j < sinks or start - j < recent}


def products(length: int, streaming: bool) -> int:
    """Products of a prompt's queries and keys in chunks of 1,024 rows, of one head."""
    split = StreamingPrefill(StreamingRule(64, 256), (not streaming,), "", 1024)
    total = 0
    for first in range(0, length, 1024):
        probe = SimpleNamespace(layer=0, first=first, rows=1024, query_heads=1, kv_heads=1)
        lists = split.plan(probe)  # type: ignore[arg-type]
        total += int(lists.mask(1024, first + 1024).sum())
    return total


def test_streaming_heads_compute_in_proportion_to_the_prompt() -> None:
    streamed, whole = ([products(n, each) for n in (2048, 4096, 8192)] for each in (True, False))
    assert streamed[1] / streamed[0] == pytest.approx(2, rel=0.1)
    assert streamed[2] / streamed[1] == pytest.approx(2, rel=0.1)
    assert whole[2] / whole[1] > 3.9
    assert streamed[2] < 0.1 * whole[2]


def test_a_streamed_prompt_of_1_000_tokens_and_its_answer_are_those_of_the_masked_matrix(
    tmp_path: Path,
) -> None:
    from streaming_decoder import masked_logprobs  # needs torch, which the other tests don't

    folder = write_tiny("llama", tmp_path / "long", max_position_embeddings=2048)
    checkpoint = open_checkpoint(folder)
    retrieval = (True, False, False, False, False, True)
    split = StreamingPrefill(StreamingRule(4, 32, interval=1), retrieval, "made", 64)
    runner = CpuRunner.load(checkpoint, slots=2200, threads=1, weights="f32", kv_cache_dtype="f32")
    prompt = np.random.default_rng(0).integers(1, VOCAB, 1000).tolist()
    params = EngineSamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, logprobs=0)
    engine = build_engine(runner, method=split, token_budget=256)
    answer = serve(engine, [request("r", prompt, params)])["r", 0]
    runner.close()
    expected = masked_logprobs(checkpoint, [*prompt, *answer.tokens], 1000, split)
    found = [one.logprob for one in answer.logprobs]
    np.testing.assert_allclose(found, expected.numpy()[range(100), answer.tokens], atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"sparsity": 1.5}, "sparsity must be from 0 to 1"),
        ({"sparsity": float("nan")}, "sparsity must be from 0 to 1"),
        ({"sinks": -1}, "sinks must be at least 0"),
        ({"recent": 0}, "recent must be at least 1"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, float], error: str) -> None:
    with pytest.raises(InvalidRequestError, match=error):
        DuoAttention(**fields)


def test_models_whose_layers_see_a_window_are_refused(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("mistral", tmp_path / "mistral"))
    with pytest.raises(InvalidRequestError, match="layers of this one see 24 tokens"):
        DuoAttention().for_model(ServedModel(config=checkpoint.config, digest="d"))
    with pytest.raises(InvalidRequestError, match="has to be calibrated"):
        DuoAttention().for_model(ServedModel(config=CONFIG, digest="d"))


@pytest.mark.real_model
def test_the_default_model_comes_with_its_gates() -> None:
    checkpoint = open_model(REGISTERED[DEFAULT_MODEL].path, resolve_adapter(DEFAULT_MODEL, None))
    shipped = read(shipped_path(NAME, model_digest(checkpoint)))
    assert shipped is not None, "calibrate it and ship the file: docs/methods.md"
    shipped.check(NAME, VERSION, model_digest(checkpoint))
    assert retrieval_heads(shipped.tables["gates"], 0.5).sum() == 45
