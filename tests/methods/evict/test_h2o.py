"""H2O against a loop that adds up attention row by row and evicts one key at a time."""

import random
from pathlib import Path

import numpy as np
import pytest
from fake_keys import CONFIG, DIM, GROUP, KV_HEADS, LAYERS, ArrayCells, fake_keys, fake_queries
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.evict.h2o import H2O, HeavyHitters
from midfill.methods.evict.method import SequenceKeys
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import build_engine, request, serve

PROMPT, ANSWER, BUDGET, RECENT = 50, 40, 12, 4


class NaiveHead:
    """One KV head: its keys by number, and what attention each has received."""

    def __init__(self, store: ArrayCells, queries: np.ndarray, layer: int, head: int) -> None:
        self.queries = queries[layer, :, head * GROUP : (head + 1) * GROUP].astype(np.float64)
        total = PROMPT + ANSWER
        start = (layer * KV_HEADS + head) * total
        self.vectors = store.keys[start : start + total].astype(np.float64)
        self.held: list[int] = []
        self.received: dict[int, float] = {}

    def see(self, row: int) -> None:
        self.held.append(row)
        self.received[row] = 0.0
        for query in self.queries[row]:
            powers = {key: np.exp(self.vectors[key] @ query / np.sqrt(DIM)) for key in self.held}
            for key, power in powers.items():
                self.received[key] += power / sum(powers.values())

    def evict(self) -> None:
        older = self.held[: len(self.held) - RECENT]
        self.held.remove(min(older, key=self.received.__getitem__))


def view(store: ArrayCells, held: list[list[int]]) -> SequenceKeys:
    """The keys that each head holds, of all that are in the store."""
    total = PROMPT + ANSWER
    cells = [np.array(keys, np.int32) + head * total for head, keys in enumerate(held)]
    return SequenceKeys(CONFIG, cells, store)


@pytest.mark.parametrize("block", [PROMPT, 16])
def test_the_least_attended_key_goes_step_by_step(block: int) -> None:
    _, store = fake_keys(PROMPT + ANSWER)
    queries = fake_queries(PROMPT + ANSWER)
    naive = [NaiveHead(store, queries, *place) for place in np.ndindex(LAYERS, KV_HEADS)]
    method = H2O(budget=BUDGET, recent=RECENT / BUDGET, interval=1)
    scores: HeavyHitters = method.start(CONFIG)
    for row in range(PROMPT):
        for one in naive:
            one.see(row)
    for _ in range(PROMPT - BUDGET):
        for one in naive:
            one.evict()
    start = 0
    for end in range(block, PROMPT, block):
        scores.observe(view(store, [list(range(end))] * len(naive)), queries[:, start:end])
        start = end
    held = [list(range(PROMPT))] * len(naive)
    rows = slice(start, PROMPT)
    for row in range(PROMPT, PROMPT + ANSWER):
        selection = scores.fork().select(view(store, held), queries[:, rows])
        scores.select(view(store, held), queries[:, rows])
        assert selection is not None
        kept = np.split(selection.kept, selection.indptr[1:-1])
        held = [[keys[i] for i in own] for keys, own in zip(held, kept, strict=True)]
        assert held == [one.held for one in naive]
        rows = slice(row, row + 1)
        for one, keys in zip(naive, held, strict=True):
            keys.append(row)
            one.see(row)
            one.evict()


def test_answers_that_share_a_prompt_evict_on_their_own() -> None:
    keys, store = fake_keys(PROMPT + ANSWER)
    queries = fake_queries(PROMPT + ANSWER)
    scores = H2O(budget=PROMPT, interval=4).start(CONFIG)
    prompt = view(store, [list(range(PROMPT))] * keys.heads)
    assert scores.select(prompt, queries[:, :PROMPT]) is None
    other = scores.fork()
    longer = view(store, [list(range(PROMPT + 4))] * keys.heads)
    selection = scores.select(longer, queries[:, PROMPT : PROMPT + 4])
    assert selection is not None
    assert len(other.attention.scores[0]) == PROMPT
    again = other.select(longer, queries[:, PROMPT : PROMPT + 4])
    assert again is not None
    assert again.kept.tolist() == selection.kept.tolist()


@pytest.mark.parametrize("fields", [{"recent": -0.1}, {"recent": 1.5}, {"interval": -1}])
def test_nonsense_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        H2O(**fields)  # type: ignore[arg-type]


def test_the_next_keystroke_finds_its_beginning_and_gets_the_same_bits(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_variant("llama", tmp_path / "llama"))
    runner = CpuRunner.load(checkpoint, slots=600, threads=1, weights="f32", kv_cache_dtype="f32")
    params = EngineSamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)
    text = random.Random(0).choices(range(1, VOCAB), k=200)
    alone = {}
    for tokens in (200, 180, 150):
        one = build_engine(runner, method=H2O(budget=48))
        alone[tokens] = serve(one, [request("r", text[:tokens], params)])["r", 0]
    one = build_engine(runner, method=H2O(budget=48), token_budget=50)
    for tokens, tenant, cached in ((180, "a", 0), (200, "a", 128), (150, "a", 128), (150, "b", 0)):
        found = serve(one, [request("r", text[:tokens], params, tenant)])["r", 0]
        assert found.cached_tokens == cached
        assert found.tokens == alone[tokens].tokens
        assert found.logprobs == alone[tokens].logprobs
    runner.close()
