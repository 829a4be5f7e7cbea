"""The engine on real weights: reuse, mixing and interruption change no token."""

import inspect
import textwrap

import pytest

from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.models.checkpoints import model_store
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answers, build_engine, request, serve

pytestmark = pytest.mark.real_model

GREEDY = EngineSamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
SEEDED = EngineSamplingParams(
    temperature=0.8, top_p=0.95, top_k=20, seed=7, max_tokens=16, ignore_eos=True
)


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return open_checkpoint(model_store.resolve(model_store.DEFAULT_MODEL))


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> CpuRunner:
    return CpuRunner.load(checkpoint, slots=900)


@pytest.fixture(scope="module")
def rounds(checkpoint: Checkpoint) -> list[EngineRequest]:
    """Four moments of somebody typing textwrap.py, and a prompt of its own, greedy and seeded."""
    code = checkpoint.tokenizer.encode(inspect.getsource(textwrap))
    requests = []
    for index, end in enumerate((200, 207, 221, 260)):
        requests.append(request(f"greedy{index}", code[:end], GREEDY))
        requests.append(request(f"seeded{index}", code[:end], SEEDED))
    requests.append(request("other", code[500:640], GREEDY))
    return requests


@pytest.fixture(scope="module")
def alone(runner: CpuRunner, rounds: list[EngineRequest]) -> dict[str, list[int]]:
    """Every answer from an engine that has seen nothing else."""
    answers = {}
    for one in rounds:
        engine = build_engine(runner, (), token_budget=512)
        answers[one.request_id] = serve(engine, [one])[one.request_id, 0].tokens
    return answers


def tokens_of(answers: Answers) -> dict[str, list[int]]:
    return {name: answer.tokens for (name, _), answer in answers.items()}


def test_successive_rounds_compute_only_new_tokens(
    runner: CpuRunner, rounds: list[EngineRequest], alone: dict[str, list[int]]
) -> None:
    engine = build_engine(runner, ())
    cached = {}
    for one in rounds:
        answer = serve(engine, [one])[one.request_id, 0]
        assert answer.tokens == alone[one.request_id]
        cached[one.request_id] = answer.cached_tokens
    # At least all of the round before; what the model had generated right counts on top.
    assert cached["seeded0"] == 199
    assert 200 <= cached["greedy1"] <= 206
    assert 207 <= cached["greedy2"] <= 220
    assert 221 <= cached["greedy3"] <= 237


@pytest.mark.parametrize("budget", [16, 100])
def test_all_together(
    runner: CpuRunner, rounds: list[EngineRequest], alone: dict[str, list[int]], budget: int
) -> None:
    engine = build_engine(runner, (), token_budget=budget)
    assert tokens_of(serve(engine, rounds)) == alone


def test_preempted_and_resumed(
    runner: CpuRunner, rounds: list[EngineRequest], alone: dict[str, list[int]]
) -> None:
    engine = build_engine(runner, (), token_budget=64)
    # Unrelated text takes most of the pool and lasts longer than the others.
    hog = request(
        "hog",
        [2000 + index for index in range(430)],
        EngineSamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True),
    )
    answers = tokens_of(serve(engine, [hog, *rounds]))
    del answers["hog"]
    assert answers == alone
    assert engine.stats().preemptions > 0
