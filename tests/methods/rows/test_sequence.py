"""Rows that are dropped between layers and revived while decoding, against a naive dictionary."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from naive_probe import softmax
from toy_engine import prompt, sampling
from toy_runner import HIDDEN, ToyRunner

from midfill.engine.engine import Engine
from midfill.errors import InvalidRequestError
from midfill.methods.rows.lazyllm import LazyLLM
from midfill.methods.rows.sequence import RowPruning
from midfill.methods.rows.uncomp_stage import LayerGroups, UNCompStage
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.runner import Runner
from serving import FixedCost, build_engine, request, serve, torch_runner

LAYERS = 6


def toy(slots: int = 512) -> ToyRunner:
    return ToyRunner(slots, layers=LAYERS)


@dataclass
class Naive:
    """The paper's procedure, token by token, with dictionaries for KV and the auxiliary cache."""

    method: LazyLLM
    model: ToyRunner
    kv: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    aside: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)
    computed: list[tuple[int, int]] = field(default_factory=list)
    revived: int = 0

    def run(self, tokens: list[int], numbers: list[int], prompt_length: int) -> np.ndarray:
        """Run the rows of some tokens; return the last one's logits."""
        last = numbers[-1]
        after = self.method.pruning_layers(self.model.config)
        hidden = {n: self.model._embed[tokens[n]] + self.model._positions[n] for n in numbers}
        active = list(range(last + 1))
        for layer in range(LAYERS):
            for number in active:
                if number not in hidden and (layer, number) not in self.kv:
                    hidden[number] = self.aside.pop((layer, number))
                    self.revived += 1
            queries = {}
            for number, row in hidden.items():
                query, key, value = (row @ weight for weight in self.model._weights[layer])
                queries[number] = query
                self.kv[layer, number] = key, value
                self.computed.append((layer, number))
            weights = {}
            for number in list(hidden):
                seen = [other for other in active if other <= number]
                keys, values = (
                    np.stack([self.kv[layer, other][part] for other in seen]) for part in (0, 1)
                )
                weights[number] = softmax(keys @ queries[number] / HIDDEN**0.5, 0)
                hidden[number] = np.tanh(hidden[number] + weights[number] @ values)
            if layer not in after:
                continue
            scores = dict(zip(active, weights[last].tolist(), strict=True))
            candidates = [number for number in active if number < prompt_length]
            if last < prompt_length or self.method.revives:
                chosen = self.method.select(
                    after.index(layer),
                    np.array([scores[number] for number in candidates], np.float32),
                    prompt_length,
                )
                kept = {candidates[place] for place in chosen}
            else:
                kept = {number for number in candidates if (layer + 1, number) in self.kv}
            kept |= {last} | {number for number in active if number >= prompt_length}
            for number in list(hidden):
                if number not in kept:
                    if layer + 1 < LAYERS and (layer + 1, number) not in self.kv:
                        self.aside[layer + 1, number] = hidden[number]
                    del hidden[number]
            active = sorted(kept)
        return hidden[last] @ self.model._head

    def generate(self, tokens: list[int], count: int) -> list[int]:
        """The greedy answer."""
        length, tokens = len(tokens), list(tokens)
        numbers = list(range(length))
        for _ in range(count):
            tokens.append(int(self.run(tokens, numbers, length).argmax()))
            numbers = [len(tokens) - 1]
        return tokens[length:]


def pruned(method: LazyLLM, runner: Runner | None = None, **options: object) -> Engine:
    return build_engine(runner or toy(), (), method=method, **options)  # type: ignore[arg-type]


SOME = LazyLLM("1/3", "0.6")


def test_several_scoring_rows_stay_and_answers_keep_what_the_prompt_kept() -> None:
    method = LayerGroups(UNCompStage(least=10, window=4), (0, 2, 5))
    runner = toy()
    engine = build_engine(runner, method=method)
    engine.add(request("a", prompt(40)))
    engine.step()
    (sequence,) = engine._queues.running
    assert isinstance(sequence.method, RowPruning)
    frontier = sequence.method.frontier[:40]
    assert [int((frontier > layer).sum()) for layer in range(LAYERS)] == [40, 40, 25, 25, 25, 10]
    assert (frontier[-4:] == LAYERS).all()
    runner.parts.clear()
    serve(engine)
    assert (sequence.method.frontier == 0).all()
    assert {part.batch.rows for part in runner.parts} == {1}
    seen = {part.first: len(part.batch.kv_slots) for part in runner.parts[:3]}
    assert seen == {0: 41, 2: 26, 5: 11}


@pytest.mark.parametrize(
    "method",
    [SOME, LazyLLM("2/3", "0.3/0.5"), LazyLLM("0", "0.2"), LazyLLM("5", "0.5"),
     LazyLLM("1/3", "0"), LazyLLM("1/3", "0.6", revive=0)],
)  # fmt: skip
@pytest.mark.parametrize("length", [1, 2, 40])
def test_equals_the_naive_procedure(method: LazyLLM, length: int) -> None:
    naive, runner = Naive(method, toy()), toy()
    expected = naive.generate(prompt(length), 20)
    engine = pruned(method, runner)
    answers = serve(engine, [request("a", prompt(length), sampling(max_tokens=20))])
    assert answers["a", 0].tokens == expected
    assert sum(part.batch.rows * (part.end - part.first) for part in runner.parts) == len(
        naive.computed
    )


def test_no_token_is_computed_twice_in_a_layer_and_some_are_revived() -> None:
    naive = Naive(SOME, toy())
    naive.generate(prompt(40), 5)
    assert len(naive.computed) == len(set(naive.computed)) < LAYERS * 44
    assert naive.revived > 0


def test_rows_that_were_put_aside_are_forgotten() -> None:
    engine = pruned(SOME)
    engine.add(request("a", prompt(40)))
    engine.step()
    (sequence,) = engine._queues.running
    assert isinstance(sequence.method, RowPruning)
    # Of 40 tokens 24 are kept, then 15: 0.6 of them, rounded up, twice. The last one stays, too.
    assert np.bincount(sequence.method.frontier[:40], minlength=7).tolist() == [
        0, 0, 16, 0, 8, 0, 16,
    ]  # fmt: skip
    serve(engine)
    assert engine.stats().slots_cached == 0


def test_keeping_all_is_the_dense_answer() -> None:
    engine = pruned(LazyLLM("1/3", "1"))
    dense = serve(build_engine(toy()), [request("a", prompt(40), sampling(max_tokens=32))])
    answers = serve(engine, [request("a", prompt(40), sampling(max_tokens=32))])
    assert answers["a", 0].tokens == dense["a", 0].tokens


def test_answers_do_not_depend_on_what_else_runs_or_is_cached() -> None:
    requests = [request(f"r{n}", prompt(length, n)) for n, length in enumerate((40, 7, 33, 70))]
    alone = [serve(pruned(SOME), [one])[one.request_id, 0].tokens for one in requests]
    for budget in (8, 128):
        engine = pruned(SOME, token_budget=budget)
        arrivals = {2: requests[2:], 9: [request("again", prompt(40, 0))]}
        answers = serve(engine, requests[:2], arrivals)
        assert [answers[f"r{n}", 0].tokens for n in range(4)] == alone
        assert answers["again", 0].tokens == alone[0]
        assert answers["again", 0].cached_tokens == 0
    engine = build_engine(toy(), methods={"none": None, "lazyllm": SOME})
    serve(engine, [request("exact", prompt(40, 0), method="none")])
    answers = serve(engine, [request("again", prompt(40, 0), method="lazyllm")])
    assert answers["again", 0].tokens == alone[0]


@pytest.mark.parametrize("steps", [1, 2, 4, 9])
@pytest.mark.parametrize("budget", [8, 128])
def test_a_preempted_answer_is_computed_again_to_the_same_end(steps: int, budget: int) -> None:
    expected = serve(pruned(SOME), [request("a", prompt(40))])["a", 0].tokens
    engine = pruned(SOME, token_budget=budget)
    engine.add(request("a", prompt(40)))
    outputs = [output for _ in range(steps) for output in engine.step()]
    engine._execution.preempt(engine._queues.running[0])
    assert engine.stats().slots_free == 512
    while engine.has_work():
        outputs += engine.step()
    assert [token for output in outputs for token in output.token_ids] == expected


def test_an_answer_that_is_cancelled_leaves_nothing() -> None:
    engine = pruned(SOME, token_budget=8)
    for steps in range(1, 9):
        engine.add(request(f"r{steps}", prompt(40)))
        for _ in range(steps):
            engine.step()
        engine.cancel(f"r{steps}")
        engine.step()
        assert engine.stats().slots_free == 512


def test_drafts_are_left_out() -> None:
    tokens = prompt(6) * 6
    expected = serve(pruned(SOME), [request("a", tokens)])["a", 0].tokens
    engine = pruned(SOME, step_cost=FixedCost(0.0))
    assert serve(engine, [request("a", tokens)])["a", 0].tokens == expected
    assert engine.stats().drafts == 0


def test_several_answers_and_scores_of_the_prompt_are_refused() -> None:
    engine = pruned(SOME)
    with pytest.raises(InvalidRequestError, match="takes n = 1"):
        engine.add(request("a", prompt(9), sampling(n=2)))
    with pytest.raises(InvalidRequestError, match="no log probabilities"):
        engine.add(request("a", prompt(9), sampling(prompt_logprobs=0)))


@pytest.fixture(scope="module", params=["cpu", "torch"])
def make_runner(request: pytest.FixtureRequest, tiny_folder: Path) -> Callable[[], Runner]:
    checkpoint = open_checkpoint(tiny_folder)
    if request.param == "torch":
        return lambda: torch_runner(checkpoint, slots=300)
    return lambda: CpuRunner.load(checkpoint, slots=300, threads=1)


def test_on_real_runners_keeping_all_is_dense(make_runner: Callable[[], Runner]) -> None:
    runner = make_runner()
    dense = serve(build_engine(runner), [request("a", prompt(90))])["a", 0].tokens
    whole = serve(pruned(LazyLLM("0/1", "1"), runner), [request("a", prompt(90))])
    assert whole["a", 0].tokens == dense


def test_runners_agree(tiny_folder: Path) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    runners = (
        torch_runner(checkpoint, slots=300),
        CpuRunner.load(checkpoint, slots=300, threads=1),
    )
    answers = [
        serve(pruned(LazyLLM("0/1", "0.5"), runner), [request("a", prompt(90))])["a", 0].tokens
        for runner in runners
    ]
    assert answers[0] == answers[1]
