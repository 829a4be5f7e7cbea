"""Planned prompts through tokenizer and engine: what the cache saves never changes an answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.infill.formats import find_format
from midfill.infill.planner import Planner, PlannerOptions
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.tokens.layout_encoder import LayoutEncoder
from midfill_lab.bench.editing import SESSION_KINDS, Round, edit_session

SOURCES = {
    name: "".join(
        f"def f{number}({name}):\n    return {name} + {number}\n\n" for number in range(6)
    )
    for name in "xy"
}


@pytest.fixture(scope="module")
def checkpoint(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder)


@pytest.fixture(scope="module")
def engine(checkpoint: Checkpoint) -> Iterator[Engine]:
    engine, runner, _ = load_engine(checkpoint, ModelOptions(threads=1, kv_memory=64_000_000))
    yield engine
    close = getattr(runner, "close", None)
    if close is not None:
        close()


class Asker:
    """Plans requests and asks the engine, each answer once warm and once from an empty cache."""

    def __init__(self, checkpoint: Checkpoint, engine: Engine, fragments: bool, name: str) -> None:
        format = find_format(
            checkpoint.config.family, checkpoint.tokenizer.special_tokens, checkpoint.metadata
        )
        self.planner = Planner(format, PlannerOptions(fragments=fragments))
        self.encoder = LayoutEncoder(checkpoint.tokenizer)
        self.engine = engine
        self.name = name
        self.count = 0

    def prompt(self, one: Round) -> list[int]:
        layout = self.planner.plan_and_record(InfillRequest(prefix=one.prefix, suffix=one.suffix))
        return self.encoder.encode(layout)

    def answer(self, prompt: list[int], tenant: str) -> tuple[list[int], int]:
        """Greedy tokens, and prompt tokens computed."""
        self.count += 1
        request_id = f"{self.name} {self.count}"
        sampling = EngineSamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
        self.engine.add(
            EngineRequest(request_id=request_id, token_ids=prompt, sampling=sampling, tenant=tenant)
        )
        tokens: list[int] = []
        cached = 0
        while self.engine.has_work():
            for output in self.engine.step():
                assert output.request_id == request_id
                tokens += output.token_ids
                cached = output.cached_tokens
        return tokens, len(prompt) - cached


@pytest.mark.parametrize("fragments", [False, True])
def test_answers_from_a_warm_cache_equal_cold_ones_all_session_long(
    checkpoint: Checkpoint, engine: Engine, fragments: bool
) -> None:
    asker = Asker(checkpoint, engine, fragments, f"equal {fragments}")
    rounds = edit_session(SOURCES, SESSION_KINDS["mix"], rounds=40, seed=2)
    total = 0
    for number, one in enumerate(rounds):
        prompt = asker.prompt(one)
        warm, computed = asker.answer(prompt, tenant=f"user {fragments}")
        cold, all_of_it = asker.answer(prompt, tenant=f"nobody {fragments} {number}")
        assert warm == cold
        assert all_of_it == len(prompt)
        total += len(prompt) - computed
    assert total > 0


@pytest.mark.parametrize("fragments", [False, True])
def test_typing_computes_the_increment_and_at_most_eight_tokens(
    checkpoint: Checkpoint, engine: Engine, fragments: bool
) -> None:
    asker = Asker(checkpoint, engine, fragments, f"typing {fragments}")
    text, below = SOURCES["x"], SOURCES["y"]
    tenant = f"typist {fragments}"
    asker.answer(asker.prompt(Round("x", text, below, "open")), tenant)
    for typed in ("def ", "g", "(", "z):\n", "    re", "turn z", " * 2\n"):
        text += typed
        _, computed = asker.answer(asker.prompt(Round("x", text, below, "type")), tenant)
        assert computed <= len(checkpoint.tokenizer.encode(typed)) + 8
