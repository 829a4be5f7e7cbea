"""An engine that is ready takes no further memory for steps, and compiles no further kernels."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numba.core import event

from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.kernels.cpu.compiled import CompiledCache
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import request, serve

OPTIONS = ModelOptions(
    backend="cpu", threads=2, kv_memory=2**20, token_budget=32, max_running=16, weights="f32"
)


@pytest.fixture
def served(tiny_folder: Path) -> Iterator[tuple[Engine, CpuRunner]]:
    engine, runner, _ = load_engine(open_checkpoint(tiny_folder), OPTIONS)
    assert isinstance(runner, CpuRunner)
    yield engine, runner
    runner.close()


def prompt(length: int, seed: int) -> list[int]:
    # Few different tokens: drafts are copied from what came before.
    return np.random.default_rng(seed).integers(4, 12, length).tolist()


def load() -> dict[int, list[EngineRequest]]:
    """Requests of every kind that the kernels serve without a method, by the step they come at."""

    def sampled(**fields: object) -> EngineSamplingParams:
        return EngineSamplingParams(max_tokens=12, ignore_eos=True, **fields)  # type: ignore[arg-type]

    greedy = sampled(temperature=0.0)
    return {
        0: [request("long", prompt(400, 1), greedy)],
        2: [request(f"short{n}", prompt(20 + n, n), greedy) for n in range(20)],
        9: [request("siblings", prompt(30, 2), sampled(n=16, seed=1))],
        60: [request("scored", prompt(90, 3), sampled(logprobs=3, prompt_logprobs=2))],
        70: [request("penalised", prompt(90, 4), sampled(repetition_penalty=1.2, top_p=0.9))],
        80: [request("checked", prompt(90, 5), greedy, empty_threshold=0.5)],
        90: [request("again", prompt(400, 1), greedy)],
    }


def test_steps_of_a_mixed_load_find_their_memory_and_their_kernels(
    served: tuple[Engine, CpuRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, runner = served
    workspace, size = runner._memory.workspace, runner._memory.nbytes
    looked_up: list[str] = []
    monkeypatch.setattr(
        CompiledCache, "load_overload", lambda cache, *_: looked_up.append(cache._name)
    )
    with event.install_recorder("numba:compile") as compilations:
        answers = serve(engine, arrivals=load())
    assert all(answer.finish_reason == "length" for answer in answers.values())
    assert len(answers) == 41
    assert engine.stats().evicted_tokens > 0
    assert runner._memory.workspace is workspace
    assert runner._memory.nbytes == size
    assert looked_up == []
    assert compilations.buffer == []
