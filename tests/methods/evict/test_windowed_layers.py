"""Methods on a model in which some layers have a sliding window."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.methods.evict.method import MethodDefaults, SequenceKeys
from midfill.methods.evict.selection import Selection
from midfill.methods.registry import resolve_method
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import build_engine, request, same, serve, torch_runner

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=0)
PROMPT = random.Random(0).choices(range(1, VOCAB), k=120)
WINDOW, LAYERS = 24, 3  # the middle one sees everything


@dataclass(frozen=True)
class KeepAll(MethodDefaults):
    """Keeps every key of every layer that it is shown, again and again."""

    observed_rows: int = 2
    interval: int = 7

    def start(self, config: ModelConfig) -> "KeepAll":
        assert config.layers == 1
        return self

    def fork(self) -> "KeepAll":
        return self

    def select(self, keys: SequenceKeys, queries: np.ndarray) -> Selection:
        assert queries.shape[0] == 1
        return Selection.of_tokens(np.arange(keys.counts[0], dtype=np.int32), keys.heads)


@pytest.fixture(scope="module", params=["torch", "cpu"])
def runner(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Runner]:
    checkpoint = open_checkpoint(write_variant("gemma3", tmp_path_factory.mktemp("tiny")))
    if request.param == "torch":
        yield torch_runner(checkpoint, slots=500)
        return
    runner = CpuRunner.load(checkpoint, slots=500, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def test_what_a_window_has_left_behind_is_dropped_and_no_answer_changes(runner: Runner) -> None:
    held: list[int] = []

    def note(one: Engine) -> None:
        stats = one.stats()
        held.append(stats.slots_total - stats.slots_free - stats.slots_cached)

    dense = serve(build_engine(runner), [request("r", PROMPT, PARAMS)])["r", 0]
    one = build_engine(runner, method=KeepAll())
    found = serve(one, [request("r", PROMPT, PARAMS)], after_step=note)["r", 0]
    assert found.tokens == dense.tokens
    expected = [score.logprob for score in dense.logprobs]
    assert [score.logprob for score in found.logprobs] == pytest.approx(expected, abs=1e-4)
    cells = len(PROMPT) + (LAYERS - 1) * (WINDOW - 1)
    assert held[0] == -(-cells // LAYERS)


@pytest.mark.parametrize(
    "method",
    [
        "snapkv:budget=40,window=8",
        "cake:budget=40,window=8",
        "streamingllm:budget=40",
        "kivi:residual=8,group=16",
        "gear:buffer=8,block=16",
        "mikv",
        "zipcache:high=8",
    ],
)
def test_methods_choose_among_the_keys_of_the_other_layers(runner: Runner, method: str) -> None:
    dense = serve(build_engine(runner), [request("r", PROMPT, PARAMS)])["r", 0]
    answers = [
        serve(
            build_engine(runner, token_budget=budget, method=resolve_method(method)),
            [request("r", PROMPT, PARAMS)],
        )["r", 0]
        for budget in (512, 17)
    ]
    assert answers[0].finish_reason == "length"
    assert answers[0].tokens == answers[1].tokens
    assert answers[0].logprobs[0].logprob == pytest.approx(dense.logprobs[0].logprob, abs=1e-4)
    changed = [score.logprob for score in answers[0].logprobs[1:]]
    assert changed != pytest.approx([score.logprob for score in dense.logprobs[1:]], abs=1e-3)


@pytest.mark.parametrize("method", ["kivi:bits=8,residual=8,group=16", "gear:bits=8,block=16"])
def test_at_eight_bits_the_other_layers_answer_nearly_as_before(
    runner: Runner, method: str
) -> None:
    dense = serve(build_engine(runner), [request("r", PROMPT, PARAMS)])["r", 0]
    one = build_engine(runner, method=resolve_method(method))
    found = serve(one, [request("r", PROMPT, PARAMS)])["r", 0]
    assert found.tokens == dense.tokens
    expected = [score.logprob for score in dense.logprobs]
    assert [score.logprob for score in found.logprobs] == pytest.approx(expected, abs=0.02)
    assert [score.logprob for score in found.logprobs] != pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("runner", ["cpu"], indirect=True)
def test_requests_of_different_methods_in_one_step_have_the_bits_that_they_have_alone(
    runner: Runner,
) -> None:
    methods = {
        name: resolve_method(specification)
        for name, specification in {
            "kivi": "kivi:residual=8,group=16",
            "hip": "hip:k=32,block=2,window=16,sinks=2,dense_layers=0",
            "snapkv": "snapkv:budget=40,window=8",
        }.items()
    } | {"none": None}
    requests = [request(name, PROMPT, PARAMS, method=name) for name in methods]
    together = serve(build_engine(runner, methods=methods), requests)
    for each in requests:
        alone = serve(build_engine(runner, methods=methods), [each])
        assert alone[each.request_id, 0].finish_reason == "length"
        assert same(together[each.request_id, 0], alone[each.request_id, 0])
