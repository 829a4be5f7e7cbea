"""Prefill by layers in the engine: the same answers, one group of layers per step, no stalls."""

import gc
import itertools
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_checkpoints import write_tiny
from toy_engine import prompt, sampling
from toy_method import KeepLoudest
from toy_runner import HIDDEN, ToyRunner

from midfill.engine.engine import Engine
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import build_engine, greedy_alone, request, serve, torch_runner

LAYERS = 5


def toy(slots: int = 512) -> ToyRunner:
    return ToyRunner(slots, layers=LAYERS)


def layered(runner: Runner, budget: int = 16, **options: object) -> Engine:
    return build_engine(runner, (), token_budget=budget, by_layers=True, **options)  # type: ignore[arg-type]


def truth(tokens: list[int], count: int = 12) -> list[int]:
    return greedy_alone(toy(), tokens, count)


def started(engine: Engine, count: int) -> list[int]:
    """Have so many sequences decode; return how many tokens each of the next steps gives them."""
    for index in range(count):
        engine.add(request(f"d{index}", prompt(5, index), sampling(max_tokens=60)))
    tokens: list[int] = []
    while len(tokens) < 2:
        tokens.append(len(engine.step()))
    return tokens


@pytest.mark.parametrize("length", [17, 40, 79, 80, 81, 150])
@pytest.mark.parametrize("decodes", [0, 3])
def test_answers_are_those_of_one_pass(length: int, decodes: int) -> None:
    engine = layered(toy())
    requests = [request("long", prompt(length, 9))]
    requests += [request(f"d{index}", prompt(6, index)) for index in range(decodes)]
    answers = serve(engine, requests)
    assert answers["long", 0].tokens == truth(prompt(length, 9))
    for index in range(decodes):
        assert answers[f"d{index}", 0].tokens == truth(prompt(6, index))
    assert engine.stats().layered_prompts >= 1


def test_every_decode_has_its_token_in_each_step_and_a_prompt_one_group() -> None:
    runner = toy()
    engine = layered(runner)
    started(engine, 3)
    engine.add(request("long", prompt(60, 9)))
    spans = []
    while not spans or spans[-1][-1] < LAYERS:
        runner.parts.clear()
        outputs = engine.step()
        assert {output.request_id for output in outputs} >= {"d0", "d1", "d2"}
        prefill = [part for part in runner.parts if part.batch.rows > 3]
        assert [part.batch.rows for part in prefill] == [63]
        spans.append((prefill[0].first, prefill[0].end))
        # The decodes ran through each layer once.
        layers = [layer for part in runner.parts for layer in range(part.first, part.end)]
        assert layers == list(range(LAYERS))
    assert [end - first for first, end in spans] == [1, 1, 2, 1]
    assert list(itertools.chain.from_iterable(range(*span) for span in spans)) == [*range(LAYERS)]
    assert any(output.request_id == "long" for output in outputs)


def test_no_row_runs_through_a_layer_twice() -> None:
    runner = toy()
    engine = layered(runner)
    serve(engine, [request("long", prompt(70, 9), sampling(max_tokens=1))])
    assert sum((p.end - p.first) * p.batch.rows for p in runner.parts) == 70 * LAYERS
    assert engine.stats().computed_tokens == 70


@pytest.mark.parametrize("end", ["finished", "cancelled"])
def test_between_layers_a_row_is_held_for_each_token_and_freed_at_the_end(end: str) -> None:
    engine = layered(toy())
    engine.add(request("long", prompt(60, 9)))
    for _ in range(3):
        engine.step()
        (sequence,) = engine._queues.running
        assert sequence.layer_rows is not None
        hidden = sequence.layer_rows.hidden
        assert np.asarray(hidden).shape == (60, HIDDEN)
    held = weakref.ref(hidden)
    del hidden
    if end == "cancelled":
        engine.cancel("long")
    engine.step()
    assert sequence.layer_rows is None
    gc.collect()
    assert held() is None
    serve(engine)


def test_a_prompt_is_cached_after_its_last_layer_only() -> None:
    engine = layered(toy())
    engine.add(request("long", prompt(60, 9)))
    for _ in range(3):
        assert engine.step() == []
        assert engine.stats().slots_cached == engine._queues.pool.cache.cached_tokens == 0
    engine.step()
    assert engine._queues.pool.cache.cached_tokens == 60
    answers = serve(engine, [request("again", prompt(60, 9))])
    assert answers["again", 0].cached_tokens == 59


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_prompt_that_is_cancelled_between_two_layers_leaves_nothing(after: int) -> None:
    engine = layered(toy())
    engine.add(request("long", prompt(60, 9)))
    engine.add(request("other", prompt(50, 8)))
    for _ in range(after):
        engine.step()
    engine.cancel("long")
    answers = serve(engine)
    assert answers["long", 0].finish_reason == "cancelled"
    assert answers["other", 0].tokens == truth(prompt(50, 8))


@pytest.mark.parametrize("after", [1, 2, 3])
def test_a_prompt_that_is_preempted_between_two_layers_goes_on_in_chunks(after: int) -> None:
    engine = layered(toy())
    engine.add(request("long", prompt(60, 9)))
    for _ in range(after):
        engine.step()
    (sequence,) = engine._queues.running
    engine._execution.preempt(sequence)
    assert sequence.layer_rows is None
    assert engine.stats().slots_free == 512
    runner_parts = len(engine._runner.parts)  # type: ignore[attr-defined]
    answers = serve(engine)
    assert answers["long", 0].tokens == truth(prompt(60, 9))
    assert len(engine._runner.parts) == runner_parts  # type: ignore[attr-defined]


def test_scarce_slots_mean_chunks_which_the_log_says(caplog: pytest.LogCaptureFixture) -> None:
    engine = layered(toy(84))
    started(engine, 2)
    engine.add(request("long", prompt(66, 9)))
    with caplog.at_level(logging.INFO, "midfill.engine"):
        answers = serve(engine)
    assert answers["long", 0].tokens == truth(prompt(66, 9))
    assert engine.stats().layered_fallbacks >= 1
    assert "request long prefills in chunks: too few KV slots" in caplog.text


def test_observed_queries_are_collected_over_the_layers() -> None:
    method = KeepLoudest(9, interval=4)
    one_pass = build_engine(toy(), token_budget=200, method=method)
    expected = serve(one_pass, [request("long", prompt(60, 9))])
    for beside in ([], [request("d", prompt(25))]):
        answers = serve(layered(toy(), method=method), [request("long", prompt(60, 9)), *beside])
        assert answers["long", 0].tokens == expected["long", 0].tokens


def test_a_point_of_compression_within_the_prompt_ends_a_pass() -> None:
    method = KeepLoudest(5)
    fields = {"compress_after": 33}
    expected = serve(
        build_engine(toy(), token_budget=200, method=method),
        [request("long", prompt(90, 9), **fields)],
    )
    engine = layered(toy(), method=method)
    answers = serve(engine, [request("long", prompt(90, 9), **fields)])
    assert answers["long", 0].tokens == expected["long", 0].tokens


def test_scores_of_the_prompt_come_with_the_last_layer() -> None:
    params = sampling(prompt_logprobs=0, max_tokens=2)
    outputs = []
    for engine in (layered(toy()), build_engine(toy(), token_budget=200)):
        engine.add(request("long", prompt(60, 9), params))
        found = []
        while engine.has_work():
            found += engine.step()
        outputs.append(found[0].prompt_logprobs)
    assert outputs[0] is not None
    assert outputs[0] == outputs[1]
    assert len(outputs[0]) == 59


@pytest.fixture(scope="module", params=["cpu", "torch"])
def make_runner(request: pytest.FixtureRequest, tiny_folder: Path) -> Callable[[int], Runner]:
    checkpoint = open_checkpoint(tiny_folder)
    if request.param == "torch":
        return lambda slots: torch_runner(checkpoint, slots=slots)
    return lambda slots: CpuRunner.load(checkpoint, slots=slots, threads=1)


def test_answers_of_real_runners_do_not_depend_on_it(
    make_runner: Callable[[int], Runner],
) -> None:
    requests = [
        request(f"r{index}", prompt(length, index))
        for index, length in enumerate((70, 5, 120, 33, 9, 80))
    ]
    arrivals = {1: requests[1:3], 4: requests[3:]}
    expected = serve(build_engine(make_runner(600)), requests)
    engine = layered(make_runner(600), budget=24)
    answers = serve(engine, requests[:1], arrivals)
    for key, answer in expected.items():
        assert answers[key].tokens == answer.tokens
    assert engine.stats().layered_prompts >= 3


def test_of_a_mixture_each_expert_is_loaded_once_per_prompt_not_once_per_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch")
    from midfill.runners.torch import decoder, experts

    checkpoint = open_checkpoint(write_tiny("qwen3moe", tmp_path / "moe", num_experts=16))
    loaded: list[set[int]] = []

    def route(*arguments: Any) -> experts.routing.Routing:
        routing = experts.routing.route(*arguments)
        loaded.append(set(routing.chosen.flatten().tolist()))
        return routing

    monkeypatch.setattr(decoder, "route", route)
    layers = checkpoint.config.layers

    def loads(by_layers: bool) -> list[list[set[int]]]:
        loaded.clear()
        engine = build_engine(torch_runner(checkpoint, 256), token_budget=16, by_layers=by_layers)
        serve(engine, [request("long", prompt(48, 9), sampling(max_tokens=1))])
        return [loaded[layer::layers] for layer in range(layers)]

    chunks, once = loads(by_layers=False), loads(by_layers=True)
    assert [len(passes) for passes in chunks] == [3] * layers
    assert once == [[set.union(*passes)] for passes in chunks]
    count = [sum(len(passed) for passes in run for passed in passes) for run in (once, chunks)]
    assert count[0] < 0.5 * count[1]
