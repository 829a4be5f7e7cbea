"""Files that are computed apart from each other, in the engine, beside the same by hand."""

import random
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest
from tiny_checkpoints import VOCAB, write_variant

from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.methods.contexts.ape import Ape
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan, KeyPart
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from serving import Answer, build_engine, request, serve, torch_runner

PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
SEPARATOR = 3
APE = Ape(0.7, 0.8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return open_checkpoint(write_variant("llama", tmp_path_factory.mktemp("tiny") / "llama"))


@pytest.fixture(scope="module")
def runner(checkpoint: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(checkpoint, slots=1500, threads=2, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def file(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(10, VOCAB), k=length)


FILES = [file(length, length) for length in (40, 25, 60, 31)]
REST = file(35, 1)


def laid_out(files: list[list[int]], rest: list[int] = REST) -> tuple[list[int], tuple[int, ...]]:
    """A prompt as the planner lays it out: each file between two separators."""
    tokens, bounds = [SEPARATOR], [1]
    for one in files:
        tokens += [*one, SEPARATOR]
        bounds.append(len(tokens))
    return tokens + rest, tuple(bounds)


def ask(engine: Engine, files: list[list[int]], rest: list[int] = REST, **fields: object) -> Answer:
    tokens, bounds = laid_out(files, rest)
    return serve(engine, [request("r", tokens, PARAMS, contexts=bounds, **fields)])["r", 0]


def ape(runner: Runner, budget: int = 512, method: Ape = APE) -> Engine:
    return build_engine(runner, token_budget=budget, method=method, methods={"none": None})


def by_hand(runner: Runner, files: list[list[int]], method: Ape, count: int) -> list[int]:
    """The greedy answer, each file computed by itself; token i is in slot i."""
    tokens, bounds = laid_out(files)
    after, longest = bounds[-1], max(b - a for a, b in pairwise(bounds))

    def run(numbers: range, seen: list[int], first: int, part: KeyPart | None = None) -> np.ndarray:
        rows = np.array(numbers, np.int32)
        slots = np.array([*seen, *numbers], np.int32)
        ends = [np.array([0, len(one)], np.int32) for one in (rows, slots)]
        attention = () if part is None else (AttentionPlan(parts=(part,)),)
        batch = ForwardBatch(
            token_ids=np.array(tokens, np.int32)[rows],
            positions=np.arange(first, first + len(rows), dtype=np.int32),
            write_slots=rows, query_indptr=ends[0], kv_indptr=ends[1], kv_slots=slots,
            logit_rows=np.array([len(rows) - 1], np.int32), attention=attention,
        )  # fmt: skip
        return runner.forward(batch)[0].copy()

    run(range(1), [], 0)
    for start, end in pairwise(bounds):
        run(range(start, end), [0], 1)
    contexts = np.arange(1, after, dtype=np.int32)
    part = KeyPart(contexts, temperature=method.temperature, scale=method.scale)
    computed = after
    for _ in range(count):
        seen = [0, *range(after, computed)]
        logits = run(range(computed, len(tokens)), seen, 1 + longest + computed - after, part)
        computed = len(tokens)
        tokens.append(int(logits.argmax()))
    return tokens[-count:]


@pytest.mark.parametrize("backend", ["cpu", "torch"])
@pytest.mark.parametrize("count", [1, 4])
def test_answers_are_those_computed_by_hand(
    checkpoint: Checkpoint, runner: CpuRunner, backend: str, count: int
) -> None:
    one: Runner = runner if backend == "cpu" else torch_runner(checkpoint, slots=400)
    expected = by_hand(one, FILES[:count], APE, 8)
    assert ask(ape(one), FILES[:count]).tokens == expected


def test_a_file_that_is_shown_twice_and_one_of_one_token(runner: CpuRunner) -> None:
    files = [FILES[0], [11], FILES[0]]
    expected = by_hand(runner, files, APE, 8)
    engine = ape(runner)
    assert ask(engine, files).tokens == expected
    assert ask(engine, files[::-1]).tokens == by_hand(runner, files[::-1], APE, 8)


@pytest.mark.parametrize("budget", [7, 64])
def test_load_changes_no_bit(runner: CpuRunner, budget: int) -> None:
    engine = ape(runner, budget)
    requests = []
    for number in range(4):
        tokens, bounds = laid_out(FILES[number:] + FILES[:number], file(20 + number, number))
        requests.append(request(f"r{number}", tokens, PARAMS, contexts=bounds))
    requests.append(request("plain", file(50, 9), PARAMS, method="none"))
    found = serve(engine, requests)
    for one in requests:
        alone = serve(ape(runner), [one])[one.request_id, 0]
        assert found[one.request_id, 0].tokens == alone.tokens
        assert found[one.request_id, 0].logprobs == alone.logprobs


def test_the_order_of_files_changes_next_to_nothing(runner: CpuRunner) -> None:
    first = ask(ape(runner), FILES)
    second = ask(ape(runner), FILES[::-1])
    assert first.tokens == second.tokens
    for one, other in zip(first.logprobs, second.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_files_seen_before_cost_nothing_in_any_order(runner: CpuRunner) -> None:
    engine = ape(runner)
    ask(engine, FILES[:3])
    ask(engine, [FILES[3], FILES[0]], file(9, 2))
    before = engine.stats().computed_tokens
    files = [FILES[2], FILES[3], FILES[1], FILES[0]]
    found = ask(engine, files, REST)
    # What is computed: the rest, and the answer but for its last token.
    assert engine.stats().computed_tokens - before == len(REST) + len(found.tokens) - 1
    assert found.cached_tokens == len(laid_out(files, [])[0])
    cold = ask(ape(runner), files)
    assert (found.tokens, found.logprobs) == (cold.tokens, cold.logprobs)


def test_what_is_typed_next_finds_all_of_it_cached(runner: CpuRunner) -> None:
    engine = ape(runner)
    ask(engine, FILES)
    found = ask(engine, FILES, [*REST, 50, 51])
    assert found.cached_tokens == len(laid_out(FILES)[0])


def test_a_file_that_changed_is_computed_anew(runner: CpuRunner) -> None:
    engine = ape(runner)
    ask(engine, FILES[:2])
    changed = [[*FILES[0][:-1], 9], FILES[1]]
    found = ask(engine, changed)
    cold = ask(ape(runner), changed)
    assert (found.tokens, found.logprobs) == (cold.tokens, cold.logprobs)
    assert found.cached_tokens == len(FILES[0]) + len(FILES[1]) + 1


def test_text_divided_otherwise_shares_nothing_of_it(runner: CpuRunner) -> None:
    engine = ape(runner)
    tokens, bounds = laid_out(FILES[:2])
    expected = {
        one: serve(ape(runner), [request("r", tokens, PARAMS, contexts=one)])["r", 0].tokens
        for one in (bounds, (bounds[0], bounds[-1]), (bounds[0], bounds[1] - 7, bounds[2]))
    }
    assert len({tuple(tokens) for tokens in expected.values()}) > 1
    for one, answer in expected.items():
        assert serve(engine, [request("r", tokens, PARAMS, contexts=one)])["r", 0].tokens == answer


def test_tenants_share_no_files(runner: CpuRunner) -> None:
    engine = ape(runner)
    ask(engine, FILES, tenant="a")
    assert ask(engine, FILES, tenant="b").cached_tokens == 0


def test_one_file_without_temperature_is_the_usual_prompt(runner: CpuRunner) -> None:
    found = ask(ape(runner, method=Ape(1.0, 1.0)), FILES[:1])
    dense = ask(build_engine(runner), FILES[:1])
    assert found.tokens == dense.tokens
    for one, other in zip(found.logprobs, dense.logprobs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_prompts_without_files_keep_their_bits(runner: CpuRunner) -> None:
    for bounds in ((), (1,)):
        found = serve(ape(runner), [request("r", REST, PARAMS, contexts=bounds)])["r", 0]
        dense = serve(build_engine(runner), [request("r", REST, PARAMS)])["r", 0]
        assert (found.tokens, found.logprobs) == (dense.tokens, dense.logprobs)


def test_files_together_may_exceed_the_context(runner: CpuRunner) -> None:
    files = [file(180, seed) for seed in range(7)]
    tokens, bounds = laid_out(files)
    assert len(tokens) > 2 * runner.config.context
    with pytest.raises(InvalidRequestError, match="at most"):
        ape(runner).add(request("r", tokens, PARAMS, contexts=bounds, method="none"))
    assert len(ask(ape(runner), files).tokens) == 8
    too_long = [file(500, 1), *files[:2]]
    tokens, bounds = laid_out(too_long)
    with pytest.raises(InvalidRequestError, match="at most"):
        ape(runner).add(request("r", tokens, PARAMS, contexts=bounds))


@pytest.mark.parametrize("after", [1, 3, 9, 12])
def test_preempted_answers_go_on_and_cancelled_ones_leave_nothing(
    runner: CpuRunner, after: int
) -> None:
    expected = ask(ape(runner), FILES)
    engine = ape(runner, 20)
    ask(engine, FILES[1:3], file(5, 5))
    tokens, bounds = laid_out(FILES)
    outputs = []
    for name in ("cancelled", "preempted"):
        engine.add(request(name, tokens, PARAMS, contexts=bounds))
    for _ in range(after):
        outputs += engine.step()
    for sequence in list(engine._queues.running):
        engine._execution.preempt(sequence)
    engine.cancel("cancelled")
    answers = serve(engine)
    before = [t for one in outputs if one.request_id == "preempted" for t in one.token_ids]
    assert before + answers["preempted", 0].tokens == expected.tokens


def test_several_answers_share_a_prompt(runner: CpuRunner) -> None:
    params = EngineSamplingParams(temperature=0.9, max_tokens=6, ignore_eos=True, n=3, seed=5)
    tokens, bounds = laid_out(FILES)
    together = serve(ape(runner), [request("r", tokens, params, contexts=bounds)])
    assert len({tuple(one.tokens) for one in together.values()}) > 1
    crowded = build_engine(runner, method=APE, max_running=1)
    apart = serve(crowded, [request("r", tokens, params, contexts=bounds)])
    assert {key: one.tokens for key, one in apart.items()} == {
        key: one.tokens for key, one in together.items()
    }


def test_it_runs_beside_prompts_that_are_prefilled_by_layers(runner: CpuRunner) -> None:
    engine = build_engine(
        runner, token_budget=40, method=APE, methods={"none": None}, by_layers=True
    )
    tokens, bounds = laid_out(FILES)
    found = serve(
        engine,
        [
            request("files", tokens, PARAMS, contexts=bounds),
            request("long", file(150, 8), PARAMS, method="none"),
        ],
    )
    assert found["files", 0].tokens == ask(ape(runner), FILES).tokens
    assert engine.stats().layered_prompts == 1


@pytest.mark.parametrize("bounds", [(5, 3, 8), (-1, 4), (1, 35), (1, 90)])
def test_bounds_that_make_no_sense_are_refused(runner: CpuRunner, bounds: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequestError, match="contexts must be ascending"):
        ape(runner).add(request("r", REST, PARAMS, contexts=bounds))


def test_what_it_cant_do_is_refused(checkpoint: Checkpoint, runner: CpuRunner) -> None:
    tokens, bounds = laid_out(FILES)
    scored = EngineSamplingParams(prompt_logprobs=0)
    with pytest.raises(InvalidRequestError, match="scores no prompt"):
        ape(runner).add(request("r", tokens, scored, contexts=bounds))
    make: Callable[[float, float], Ape] = Ape
    for values in ((0.0, 0.5), (0.5, 1.5)):
        with pytest.raises(InvalidRequestError, match="above 0 and at most 1"):
            make(*values)
    assert APE.for_model(ServedModel(config=checkpoint.config)) is APE


def test_a_model_with_windows_is_refused(tmp_path_factory: pytest.TempPathFactory) -> None:
    windowed = open_checkpoint(write_variant("mistral", tmp_path_factory.mktemp("windowed")))
    with pytest.raises(InvalidRequestError, match="sliding window"):
        APE.for_model(ServedModel(config=windowed.config))
