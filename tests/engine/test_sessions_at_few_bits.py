"""Editing sessions over KV at few bits, in the whole pool or by a method that everybody has.

Whatever was typed, deleted or evicted before, and whoever else is served, each answer has the bits
of its prompt computed alone. Edits and evictions cut texts within what a method quantises together.
"""

import random
from collections.abc import Iterator

import numpy as np
import pytest
from made_methods import make_method
from tiny_checkpoints import VOCAB

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answer, build_engine, preempting_every, request, same, serve

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
TEXT = tuple(random.Random(0).choices(range(1, VOCAB), k=170))
OTHER = tuple(random.Random(1).choices(range(1, VOCAB), k=60))
WHOLE, DELETED, CUT = TEXT[:150], (*TEXT[:71], *TEXT[80:150]), 37
"""A deletion within a group of 16, and how many tokens an eviction leaves: not a multiple of 16."""
STEPS = {
    "opened": WHOLE,
    "typed": TEXT[:151],
    "pasted": TEXT,
    "deleted": DELETED,
    "undone": WHOLE,
    "shortened": TEXT[:90],
}
SERVED = (
    ("i8", "none"),
    ("i4", "none"),
    ("f32", "kivi:bits=2,residual=16,group=16"),
    ("f32", "gear:block=32,buffer=16"),
    ("f32", "zipcache:keys=4,window=8"),
    ("f32", "mikv:interval=8"),
)


class Served:
    """A server's engine: everybody's requests have its method, if it has one."""

    def __init__(self, checkpoint: Checkpoint, kv_cache_dtype: str, method: str) -> None:
        self.runner = CpuRunner.load(
            checkpoint, slots=600, threads=1, weights="f32", kv_cache_dtype=kv_cache_dtype
        )
        self._name = method
        self.alone = {tokens: self.ask(self.engine(), tokens) for tokens in STEPS.values()}

    def engine(self, budget: int = 512) -> Engine:
        """Build an engine, which overwrites what others have in the pool."""
        method = None if self._name == "none" else make_method(self._name, self.runner.config)
        return build_engine(self.runner, token_budget=budget, method=method)

    def ask(self, engine: Engine, tokens: tuple[int, ...], preempted_every: int = 0) -> Answer:
        """Return an answer; where it is preempted, somebody else's is written beside it."""
        asked, after = [request("r", tokens, PARAMS, "mine")], None
        if preempted_every:
            after = preempting_every(preempted_every)
            asked.append(request("o", OTHER, PARAMS, "another's"))
        found = serve(engine, asked, after_step=after)
        assert all(answer.finish_reason == "length" for answer in found.values())
        return found["r", 0]


@pytest.fixture(scope="module", params=SERVED, ids=" ".join)
def served(request: pytest.FixtureRequest, llama: Checkpoint) -> Iterator[Served]:
    served = Served(llama, *request.param)
    yield served
    served.runner.close()


def test_each_answer_has_the_bits_of_its_prompt_alone(served: Served) -> None:
    engine = served.engine(budget=23)
    for step, tokens in STEPS.items():
        assert same(served.ask(engine, tokens), served.alone[tokens]), step


def test_so_it_has_where_it_is_preempted_beside_others(served: Served) -> None:
    engine = served.engine(budget=23)
    for step, tokens in STEPS.items():
        assert same(served.ask(engine, tokens, preempted_every=5), served.alone[tokens]), step
    assert engine.stats().preemptions > len(STEPS)


def test_what_was_there_before_comes_from_the_cache(served: Served) -> None:
    """But for rows that a method observes: of this length at most one block of 64, and 5%."""
    engine = served.engine()
    found = {step: served.ask(engine, tokens).cached_tokens for step, tokens in STEPS.items()}
    observed = 64 + 9
    assert found["opened"] == 0
    for step, known in {"typed": 150, "pasted": 151, "undone": 150, "deleted": 71}.items():
        assert known - observed <= found[step] <= known, step
    if served.runner.kv_cache_dtype.value != "f32":
        assert (found["typed"], found["deleted"]) == (150, 71)


def test_a_cache_that_is_evicted_within_a_group_changes_no_bit(served: Served) -> None:
    engine = served.engine()
    served.ask(engine, WHOLE)
    pool = engine._queues.pool
    pool.slots.free(pool.cache.evict(pool.cache.cached_tokens - CUT))
    kept = pool.cache.find("mine", np.array(WHOLE, np.int32))
    assert len(kept) == CUT
    assert same(served.ask(engine, WHOLE), served.alone[WHOLE])
