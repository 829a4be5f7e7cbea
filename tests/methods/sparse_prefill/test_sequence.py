"""Chunks of sparse prefill in the engine: when they run, and what of them is shared."""

import numpy as np
from toy_engine import prompt, sampling, truth
from toy_method import HalfTheKeys
from toy_runner import ToyRunner

from midfill.methods.sparse_prefill.sequence import ChunkNumbers
from serving import build_engine, request, serve

METHOD = HalfTheKeys(chunk_tokens=8)
LONG = prompt(36)


def test_a_part_of_the_attention_gives_other_answers_to_long_prompts() -> None:
    engine = build_engine(ToyRunner(400), method=METHOD)
    prompts = {f"r{seed}": prompt(36, seed) for seed in range(8)}
    answers = serve(engine, [request(key, text, sampling()) for key, text in prompts.items()])
    assert any(answers[key, 0].tokens != truth(text) for key, text in prompts.items())
    short = serve(engine, [request("short", [1, 2], sampling())])
    assert short["short", 0].tokens == truth([1, 2]), "the first chunk attends to everything"


def test_listed_chunks_run_as_a_whole_and_no_other_prompt_beside_them() -> None:
    runner = ToyRunner(400)
    engine = build_engine(runner, token_budget=5, methods={"half": METHOD, "none": None})
    requests = [
        request("first", prompt(3, 1), sampling(max_tokens=12), method="none"),
        request("sparse", LONG, sampling(), method="half"),
        request("last", prompt(9, 2), sampling(), method="none"),
    ]
    serve(engine, requests)
    for batch in runner.batches:
        rows = np.diff(batch.query_indptr)
        listed = [plan is not None and plan.lister is not None for plan in batch.attention]
        if any(listed):
            assert listed.count(True) == 1
            assert rows[listed.index(True)] in (8, 4), "a whole chunk, or the prompt's rest"
            others = np.delete(rows, listed.index(True))
            assert (others == 1).all(), "decodes go on, prompts wait"
        else:
            assert rows.sum() <= 5
    plans = [[plan.lister for plan in batch.attention if plan] for batch in runner.batches]
    sizes = [
        len(batch.attention)
        for batch, listers in zip(runner.batches, plans, strict=True)
        if any(listers)
    ]
    assert len(sizes) == 4
    assert max(sizes) == 2


def test_products_are_counted_beside_those_of_dense_attention() -> None:
    engine = build_engine(ToyRunner(200), method=METHOD)
    serve(engine, [request("r", LONG, sampling())])
    stats = engine.stats()
    causal = sum(range(9, 37)) * 2  # two layers; the first 8 rows attend to everything
    assert stats.causal_pairs == causal
    assert 0 < stats.listed_pairs < causal


def test_keys_of_chunks_are_equal_if_all_tokens_up_to_their_ends_are() -> None:
    numbers = ChunkNumbers()
    text = np.arange(20, dtype=np.int32)
    keys = numbers.keys(text, 8)
    assert len(keys) == 16
    assert keys[[0, 8]].max() < 0
    np.testing.assert_array_equal(np.delete(keys, [0, 8]), np.delete(text[:16], [0, 8]))
    np.testing.assert_array_equal(numbers.keys(text[:16], 8), keys)
    other = text.copy()
    other[15] = 99
    changed = numbers.keys(other, 8)
    assert changed[0] == keys[0]
    assert changed[8] != keys[8]
    other = text.copy()
    other[7] = 99
    assert (numbers.keys(other, 8)[[0, 8]] != keys[[0, 8]]).all()
