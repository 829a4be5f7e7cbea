"""Greedy answers under the methods that there were before attention became one plan, as they were.

A method's answers may change when the method does, never when the engine is rebuilt. The file
beside this one holds tokens that commit d37e246 gave; it goes when the rebuilding is done.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_methods import make_method, small_method
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.request import EngineSamplingParams
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import FixedCost, build_engine, request, serve

EXPECTED = json.loads(Path(__file__).with_name("fixed_answers.json").read_text("utf-8"))
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
SPECIFICATIONS = {
    "ape": "ape:temperature=0.7,scale=0.8",
    "cacheblend": "cacheblend:ratio=0.3",
    "lazyllm": "lazyllm:after=0/1,keep=0.5",
    "uncomp-stage": "uncomp-stage:least=0.3,drop=0.001,window=4",
    "cake:cascade=1": "cake:budget=48,cascade=1",
    "cake:interval": "cake:budget=48",
    "duoattention:chunk=64": "duoattention:chunk=64,sinks=4,recent=60,interval=0",
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuRunner]:
    pytest.importorskip("torch")  # whose random numbers the weights are
    checkpoint = open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("t") / "llama"))
    runner = CpuRunner.load(checkpoint, slots=2400, threads=2, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def text(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, VOCAB), k=length)


def answers(runner: CpuRunner, name: str) -> dict[str, list[int]]:
    """Tokens of some answers under a method, asked one after the other of one engine."""
    if name in SPECIFICATIONS:
        method = make_method(SPECIFICATIONS[name], runner.config)
    else:
        method = small_method(name, runner.config)
    engine = build_engine(runner, token_budget=96, method=method, step_cost=FixedCost(0.0))
    files = [text(count, count) for count in (40, 25, 60, 31)]
    bounds, shown = [1], [3]
    for file in files:
        shown += [*file, 3]
        bounds.append(len(shown))
    moved = text(90, 5) + text(230, 1)[30:200] + text(20, 6)
    asked = {
        "long": request("long", text(300, 0), PARAMS),
        "short": request("short", text(37, 2), PARAMS),
        "pair": request("pair", text(120, 3) * 2, PARAMS),
        "source": request("source", text(230, 1), PARAMS),
        "moved": request("moved", moved, PARAMS),
        "moved again": request("moved again", [*moved, 11], PARAMS),
        "files": request("files", shown + text(35, 4), PARAMS, contexts=tuple(bounds)),
        "early": request("early", text(200, 7), PARAMS, compress_after=150),
    }
    return {key: serve(engine, [one])[key, 0].tokens for key, one in asked.items()}


@pytest.mark.parametrize("name", EXPECTED)
def test_answers_are_those_of_before(runner: CpuRunner, name: str) -> None:
    assert answers(runner, name) == EXPECTED[name]
