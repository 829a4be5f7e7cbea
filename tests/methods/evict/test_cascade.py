"""Prompts whose KV is trimmed layer by layer while they are prefilled, in the engine.

What stays, and so each answer, is that of the same method applied once the prompt is computed.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.evict.cake import Cake, CakeTrimmer
from midfill.methods.evict.cascade import CascadeSize
from midfill.methods.evict.full_layers import FullLayers
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.evict.snapkv import SnapKV
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.models.config import ModelConfig
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import Answer, build_engine, request, same, serve, torch_runner

LAYERS, BUDGET, WINDOW, LENGTH = 3, 24, 4, 100
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)
ONE_SHOT = Cake(budget=BUDGET, window=WINDOW)
CASCADE = Cake(budget=BUDGET, window=WINDOW, cascade=1)
PEAK = -(-(BUDGET * LAYERS + LENGTH) // LAYERS)
"""Slots: B_total + layers * window = budget * layers tokens of one layer, and one whole layer."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def runner(folder: Path) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(
        open_checkpoint(folder), slots=400, threads=2, weights="f32", kv_cache_dtype="f16"
    )
    yield runner
    runner.close()


def prompt(length: int = LENGTH, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=length)


def alone(runner: Runner, tokens: list[int], method: Cake = ONE_SHOT, **fields: object) -> Answer:
    engine = build_engine(runner, token_budget=512, method=method)
    return serve(engine, [request("r", tokens, PARAMS, **fields)])["r", 0]


class MostHeld:
    """Records the most slots that are neither free nor evictable, at every allocation."""

    def __init__(self, engine: Engine) -> None:
        self.slots = 0
        pool = engine._queues.pool
        allocate = pool.slots.allocate

        def recording(count: int) -> np.ndarray:
            allocated = allocate(count)
            self.slots = max(self.slots, pool.slots.total - pool.available)
            return allocated

        pool.slots.allocate = recording  # type: ignore[method-assign]


@pytest.mark.parametrize("budget", [512, 40, 7])
@pytest.mark.parametrize("length", [30, 61, LENGTH, 200])
def test_the_answer_is_that_of_the_method_applied_at_the_end(
    runner: CpuRunner, length: int, budget: int
) -> None:
    engine = build_engine(runner, token_budget=budget, method=CASCADE)
    found = serve(engine, [request("r", prompt(length), PARAMS)])["r", 0]
    assert same(found, alone(runner, prompt(length)))
    assert engine.stats().layered_prompts == 1


def test_any_method_that_ranks_layer_by_layer_may_do_so(runner: CpuRunner) -> None:
    for length in (20, 60, LENGTH):
        answers = []
        for cascade in (0, 1):
            method = SnapKV(budget=BUDGET, window=WINDOW, cascade=cascade)
            engine = build_engine(runner, token_budget=40, method=method)
            held = MostHeld(engine)
            answers.append(serve(engine, [request("r", prompt(length), PARAMS)])["r", 0])
        assert same(answers[0], answers[1])
    assert held.slots == PEAK


def test_a_prompt_holds_its_bound_and_never_all_slots(runner: CpuRunner) -> None:
    engine = build_engine(runner, token_budget=40, method=CASCADE)
    held = MostHeld(engine)
    serve(engine, [request("r", prompt(), PARAMS)])
    assert held.slots == PEAK == 58
    whole = build_engine(runner, token_budget=40, method=ONE_SHOT)
    held = MostHeld(whole)
    serve(whole, [request("r", prompt(), PARAMS)])
    assert held.slots >= LENGTH


def test_what_stays_is_packed(runner: CpuRunner) -> None:
    engine = build_engine(runner, method=CASCADE)
    engine.add(request("r", prompt(), PARAMS))
    while not engine.step():
        pass
    (sequence,) = engine._queues.running
    assert sequence.kv is not None
    assert sequence.kv.prefix is not None
    assert len(sequence.kv.prefix.slots) == BUDGET
    assert len(np.unique(sequence.kv.prefix.index.cells)) == BUDGET * LAYERS * 2
    assert engine.stats().slots_free == 400 - BUDGET
    serve(engine)


def test_a_pool_that_is_too_small_for_the_prompt_serves_it(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    large = CpuRunner.load(checkpoint, slots=400, threads=1, weights="f32", kv_cache_dtype="f16")
    expected = alone(large, prompt())
    large.close()
    small = CpuRunner.load(checkpoint, slots=PEAK, threads=1, weights="f32", kv_cache_dtype="f16")
    requests = [request(f"r{number}", prompt(seed=number), PARAMS) for number in range(3)]
    answers = serve(build_engine(small, method=CASCADE), requests)
    assert same(answers["r0", 0], expected)
    assert all(answer.error is None for answer in answers.values())
    with pytest.raises(InvalidRequestError, match="at most 58 fit"):
        build_engine(small, method=ONE_SHOT).add(request("r", prompt(), PARAMS))
    with pytest.raises(InvalidRequestError, match="at most 58 fit"):
        build_engine(small, method=CASCADE).add(request("r", prompt(LENGTH + 3), PARAMS))
    small.close()


@pytest.mark.parametrize(("slots", "longest"), [(PEAK, 102), (30, 28), (BUDGET, 23), (300, 512)])
def test_an_engine_tells_the_longest_prompt_that_it_serves(
    folder: Path, slots: int, longest: int
) -> None:
    small = CpuRunner.load(open_checkpoint(folder), slots=slots, threads=1, weights="f32")
    engine = build_engine(small, method=CASCADE)
    assert engine.context == longest + (longest < 512)
    params = EngineSamplingParams(temperature=0.0, max_tokens=1)
    serve(engine, [request("r", prompt(engine.context - 1), params)])
    with pytest.raises(InvalidRequestError, match="fit"):
        engine.add(request("s", prompt(engine.context), params))
    small.close()


@dataclass(frozen=True)
class Failing(Cake):
    """Can't rank the second layer."""

    def start_cascade(self, config: ModelConfig, prompt: int) -> "FailingTrimmer":
        return FailingTrimmer(self, config, prompt)


class FailingTrimmer(CakeTrimmer):
    def rank(self, keys: SequenceKeys, queries: np.ndarray) -> np.ndarray:
        if self._preferences:
            raise ValueError("no rank")
        return super().rank(keys, queries)


def test_a_method_that_fails_ends_its_own_answer_alone(runner: CpuRunner) -> None:
    failing = Failing(budget=BUDGET, window=WINDOW, cascade=1)
    engine = build_engine(runner, token_budget=40, methods={"failing": failing, "none": None})
    requests = [request("d", prompt(10), PARAMS), request("r", prompt(), PARAMS, method="failing")]
    found = serve(engine, requests)
    assert found["r", 0].finish_reason == "error"
    assert "no rank" in (found["r", 0].error or "")
    alone = serve(build_engine(runner), [request("d", prompt(10), PARAMS)])
    assert same(found["d", 0], alone["d", 0])
    assert engine.stats().slots_free + engine.stats().slots_cached == 400


def test_answers_end_where_the_pool_does(folder: Path) -> None:
    small = CpuRunner.load(
        open_checkpoint(folder), slots=PEAK, threads=1, weights="f32", kv_cache_dtype="f16"
    )
    params = EngineSamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    answer = serve(build_engine(small, method=CASCADE), [request("r", prompt(), params)])["r", 0]
    assert answer.finish_reason == "length"
    assert len(answer.tokens) == PEAK - BUDGET
    small.close()


def test_a_budget_of_everything_gives_the_bits_of_the_whole_kv(runner: CpuRunner) -> None:
    found = alone(runner, prompt(), Cake(budget=LENGTH, window=WINDOW, cascade=1))
    engine = build_engine(runner)
    assert same(found, serve(engine, [request("r", prompt(), PARAMS)])["r", 0])


@pytest.mark.parametrize("budget", [7, 64])
def test_load_changes_no_bit(runner: CpuRunner, budget: int) -> None:
    requests = {f"r{n}": prompt(n, n) for n in (5, 33, 80, 81, 120)}
    engine = build_engine(runner, token_budget=budget, method=CASCADE)
    found = serve(engine, [request(key, tokens, PARAMS) for key, tokens in requests.items()])
    for key, tokens in requests.items():
        assert same(found[key, 0], alone(runner, tokens))


def test_a_cached_prefix_is_read_layer_by_layer(runner: CpuRunner) -> None:
    engine = build_engine(runner, token_budget=40, method=CASCADE, methods={"none": None})
    serve(engine, [request("whole", prompt(70), PARAMS, method="none")])
    held = engine.stats().slots_cached
    found = serve(engine, [request("r", [*prompt(70), *prompt(30, 1)], PARAMS)])["r", 0]
    assert found.cached_tokens == 70
    assert engine.stats().slots_cached == held
    assert same(found, alone(runner, [*prompt(70), *prompt(30, 1)]))


def test_a_cached_prefix_is_left_alone_where_it_would_take_the_room(folder: Path) -> None:
    small = CpuRunner.load(
        open_checkpoint(folder), slots=PEAK + 25, threads=1, weights="f32", kv_cache_dtype="f16"
    )
    engine = build_engine(small, method=CASCADE, methods={"none": None})
    serve(engine, [request("whole", prompt(60), PARAMS, method="none")])
    found = serve(engine, [request("r", [*prompt(60), *prompt(40, 1)], PARAMS)])["r", 0]
    assert found.cached_tokens == 25
    assert found.error is None
    small.close()


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_a_prompt_that_is_cancelled_between_two_layers_leaves_nothing(
    runner: CpuRunner, after: int
) -> None:
    engine = build_engine(runner, token_budget=34, method=CASCADE)
    engine.add(request("r", prompt(), PARAMS))
    for _ in range(after):
        engine.step()
    engine.cancel("r")
    assert serve(engine)["r", 0].finish_reason == "cancelled"
    assert engine.stats().slots_free == 400


@pytest.mark.parametrize("after", [1, 2, 3, 6])
def test_a_prompt_that_is_preempted_begins_again(runner: CpuRunner, after: int) -> None:
    engine = build_engine(runner, token_budget=34, method=CASCADE)
    engine.add(request("r", prompt(), PARAMS))
    outputs = []
    for _ in range(after):
        outputs += engine.step()
    (sequence,) = engine._queues.running
    engine._execution.preempt(sequence)
    assert engine.stats().slots_free == 400
    found = serve(engine)["r", 0]
    expected = alone(runner, prompt())
    assert [token for one in outputs for token in one.token_ids] + found.tokens == expected.tokens
    assert found.logprobs == expected.logprobs[len(outputs) :]


def test_answers_to_one_prompt_share_what_stays(runner: CpuRunner) -> None:
    pair = EngineSamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True, n=2, seed=3)
    answers = []
    for method in (ONE_SHOT, CASCADE):
        engine = build_engine(runner, token_budget=40, method=method)
        answers.append(serve(engine, [request("r", prompt(), pair)]))
    assert {key: answer.tokens for key, answer in answers[0].items()} == {
        key: answer.tokens for key, answer in answers[1].items()
    }


def test_tokens_after_the_compressed_ones_are_computed_over_them(runner: CpuRunner) -> None:
    tokens = prompt(150)
    fields = {"compress_after": LENGTH}
    engine = build_engine(runner, token_budget=40, method=CASCADE)
    held = MostHeld(engine)
    found = serve(engine, [request("r", tokens, PARAMS, **fields)])["r", 0]
    assert same(found, alone(runner, tokens, **fields))
    assert held.slots < 100


def test_scores_of_the_prompt_are_those_of_the_whole_kv(runner: CpuRunner) -> None:
    params = EngineSamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
    outputs = []
    for engine in (build_engine(runner), build_engine(runner, method=CASCADE)):
        engine.add(request("r", prompt(), params))
        found = []
        while engine.has_work():
            found += engine.step()
        outputs.append(found[0].prompt_logprobs)
    assert outputs[0] is not None
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("variant", ["llama", "gemma3", "mistral"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_other_models_and_runners(tmp_path: Path, variant: str, backend: str) -> None:
    checkpoint = open_checkpoint(write_variant(variant, tmp_path))
    make: Callable[[], Runner] = (
        (lambda: torch_runner(checkpoint, slots=400))
        if backend == "torch"
        else (lambda: CpuRunner.load(checkpoint, slots=400, threads=1, kv_cache_dtype="i8"))
    )
    runner = make()
    requests = [request("r", prompt(), PARAMS), request("d", prompt(10), PARAMS)]
    expected = serve(build_engine(runner, method=ONE_SHOT), requests)
    engine = build_engine(runner, token_budget=48, method=CASCADE)
    held = MostHeld(engine)
    found = serve(engine, requests)
    for key, answer in expected.items():
        assert found[key].tokens == answer.tokens
    size = CascadeSize(CASCADE, FullLayers(runner.config), runner).peak_slots(LENGTH)
    assert size is not None
    assert held.slots <= size + 10 + PARAMS.max_tokens
