"""The simulated engine: deterministic, its times those of its costs, its caches the real ones."""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from midfill.config import ModelOptions
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import ServeOptions
from midfill_lab.bench.serving.batch_layout import LayoutName
from midfill_lab.bench.serving.metrics import OK, RequestResult, summarise
from midfill_lab.bench.serving.simulation import SimulatedModel, simulate_load
from midfill_lab.bench.serving.step_costs import StepCosts, StepWork
from midfill_lab.bench.serving.workload import TimedRequest, WorkloadOptions
from midfill_lab.bench.serving.workloads import WORKLOADS, make_requests

Serve = Callable[..., SimulatedModel]


@pytest.fixture
def serve(folder: Path, costs: StepCosts) -> Serve:
    """Return what makes a model that is served with some options."""

    def made(run: ModelOptions | None = None, **served: object) -> SimulatedModel:
        options = ServeOptions(model="tiny", options=run or ModelOptions(), **served)  # type: ignore[arg-type]
        return SimulatedModel(open_model(folder), costs, options)

    return made


def requests(workload: str, **fields: object) -> list[TimedRequest]:
    usual = {"requests": 40, "request_rate": 4.0, "characters": 300, "output_tokens": 8}
    return make_requests(WorkloadOptions(workload=workload, **(usual | fields)))


def request(index: int, arrival: float, prompt: str, **fields: object) -> TimedRequest:
    return TimedRequest(
        **({"index": index, "arrival": arrival, "prompt": prompt, "max_tokens": 4} | fields)
    )


@pytest.mark.parametrize("workload", WORKLOADS)
def test_every_request_is_answered_and_each_run_is_the_same(
    workload: str, model: SimulatedModel
) -> None:
    load = requests(workload)
    results = simulate_load(model, load)
    assert [result.index for result in results] == [each.index for each in load]
    assert {result.status for result in results} == {OK}
    for asked, result in zip(load, results, strict=True):
        assert result.completion_tokens == asked.max_tokens
        assert result.sent < result.arrivals[0] <= result.ended
    assert simulate_load(model, load) == results


def test_a_request_alone_takes_what_its_steps_cost(serve: Serve, costs: StepCosts) -> None:
    (result,) = simulate_load(serve(stream_interval=0.0), [request(0, 1.0, "x" * 60)])
    prompt = result.prompt_tokens
    expected = costs.seconds(StepWork(prompt, 1, 1, prompt, prompt * (prompt + 1) // 2))
    assert result.due == 1.0
    assert result.ttft == pytest.approx(costs.request_seconds + expected)
    steps = [costs.seconds(StepWork(1, 1, 1, prompt + n, prompt + n)) for n in (1, 2, 3)]
    assert result.gaps == pytest.approx(steps)


def test_what_was_asked_before_is_cached(model: SimulatedModel) -> None:
    text = "".join(f"value_{number} = {number}\n" for number in range(40))
    first, again, other = simulate_load(
        model,
        [
            request(0, 0.0, text, tenant="a"),
            request(1, 9.0, text, tenant="a"),
            request(2, 20.0, text, tenant="b"),
        ],
    )
    assert (first.cached_tokens, other.cached_tokens) == (0, 0)
    assert again.cached_tokens == again.prompt_tokens - 1


def test_a_turn_finds_the_last_one_and_its_answer_cached(model: SimulatedModel) -> None:
    results = simulate_load(model, requests("agents", requests=8, turns=4, output_tokens=20))
    for before, after in pairwise(results):
        if after.turn:
            assert after.sent > before.ended
            answered = before.prompt_tokens + before.completion_tokens
            assert answered - 20 <= after.cached_tokens < after.prompt_tokens
    assert summarise(results).programs is not None


def test_what_a_document_will_need_next_is_computed_in_idle_time(serve: Serve) -> None:
    # After deletions close to the cut, the prompt with another cut is computed.
    prefix, suffix = "a = 1\nb = 2\n" * 100, "c\n"
    encoder = serve().encoder()
    report = encoder.infill(InfillRequest(prefix=prefix, suffix=suffix)).report
    assert report is not None
    assert report.cut is not None
    lengths = (len(prefix), report.cut + 202, report.cut + 198)
    load = [
        request(number, 9.0 * number, prefix[:length], suffix=suffix)
        for number, length in enumerate(lengths)
    ]
    prepared, plain = (
        sum(result.cached_tokens for result in simulate_load(serve(idle_prefill=idle), load))
        for idle in (True, False)
    )
    assert prepared > plain


def test_a_full_queue_refuses(serve: Serve) -> None:
    load = requests("independent", request_rate=math.inf)
    results = simulate_load(serve(max_queued_tokens=2000), load)
    assert {result.status for result in results} == {OK, "queue_full"}


def test_a_deadline_ends_what_nobody_waits_for(model: SimulatedModel) -> None:
    load = requests("independent", request_rate=math.inf, deadline=0.5, requests=60)
    results = simulate_load(model, load)
    failures = {result.status for result in results} - {OK}
    assert failures
    assert failures <= {"queue_full", "deadline_exceeded"}


def test_a_program_ends_with_the_turn_that_fails(serve: Serve) -> None:
    load = requests("agents", requests=12, turns=3, request_rate=math.inf, characters=4000)
    results = simulate_load(serve(max_queued_tokens=1500), load)
    failed = [result for result in results if result.status == "queue_full"]
    assert failed
    for result in failed:
        later = [each for each in results if each.program == result.program]
        assert {each.status for each in later if each.turn > result.turn} <= {"unsent"}


def test_a_prompt_that_does_not_fit_fails_alone(model: SimulatedModel) -> None:
    too_long, other = simulate_load(
        model, [request(0, 0.0, "x = 1\n" * 9000), request(1, 0.0, "y = 2\n")]
    )
    assert too_long.status == "context_length_exceeded"
    assert other.status == OK


def test_the_scheduler_is_the_one_that_is_named(serve: Serve) -> None:
    load = requests("mixed", requests=60, request_rate=20.0, output_tokens=40)

    def gaps(scheduler: str) -> list[RequestResult]:
        return simulate_load(serve(ModelOptions(scheduler=scheduler)), load)  # type: ignore[arg-type]

    assert gaps("layered-prefill") != gaps("sarathi-serve")


def test_an_order_sees_more_of_the_queue_than_could_be_admitted(serve: Serve) -> None:
    load = requests("mixed", requests=60, request_rate=math.inf, output_tokens=4)

    def chats_first(scheduler: str) -> float:
        run = ModelOptions(scheduler=scheduler, max_running=2)
        results = simulate_load(serve(run), load)
        waits: dict[str, list[float]] = {}
        for result in results:
            waits.setdefault(result.kind, []).append(result.ttft)
        return max(waits["chat"]) - min(waits["document"])

    assert chats_first("priority") < 0 < chats_first("fcfs")


def test_continuum_keeps_what_a_program_needs_while_its_tool_runs(serve: Serve) -> None:
    load = requests(
        "agents", requests=120, turns=6, request_rate=12.0, characters=1200, pause=0.4,
        output_tokens=12,
    )  # fmt: skip
    computed, seconds = {}, {}
    for scheduler in ("sarathi-serve", "continuum"):
        run = ModelOptions(scheduler=scheduler, kv_memory=4000 * 1024)
        figures = summarise(simulate_load(serve(run), load))
        assert figures.completed == 120
        assert figures.programs is not None
        computed[scheduler], seconds[scheduler] = figures.cached_share, figures.programs.mean
    assert computed["continuum"] > computed["sarathi-serve"]
    assert seconds["continuum"] < seconds["sarathi-serve"]


def test_a_gap_is_kept_on_a_load_that_nothing_was_measured_on(serve: Serve) -> None:
    load = requests("mixed", requests=60, request_rate=3.0, characters=1500, output_tokens=40)

    def served(scheduler: str) -> tuple[float, float]:
        run = ModelOptions(scheduler=scheduler)
        latency = summarise(simulate_load(serve(run, stream_interval=0.0), load)).latency
        assert latency.itl is not None
        assert latency.ttft is not None
        return latency.itl.p99, latency.ttft.mean

    (short, slow), (long, quick) = (served(f"sarathi-serve:gap={gap}") for gap in (0.015, 0.06))
    assert short < 1.1 * 0.015 < long < 1.1 * 0.06
    assert quick < slow


def test_padded_tokens_take_their_time_and_packed_ones_less(
    model: SimulatedModel, costs: StepCosts
) -> None:
    load = requests("mixed", requests=40, request_rate=math.inf, output_tokens=2)
    options = ModelOptions(scheduler="prefill-first", adapter="none")
    served = replace(model.served, options=options)
    seconds = {}
    names: tuple[LayoutName, ...] = ("ragged", "packed", "padded")
    for name in names:
        laid_out = SimulatedModel(model.checkpoint, costs, served, name)
        seconds[name] = summarise(simulate_load(laid_out, load)).seconds
    assert 2 * seconds["ragged"] < seconds["padded"]
    assert seconds["ragged"] <= seconds["packed"] < seconds["padded"]


def test_the_pool_is_as_large_as_it_is_told_to_be(serve: Serve, costs: StepCosts) -> None:
    assert serve().slots == costs.slots
    assert serve(ModelOptions(kv_memory=1 << 20)).slots == 1024


def test_slower_steps_take_longer(model: SimulatedModel, costs: StepCosts) -> None:
    slower = msgspec.structs.replace(costs, rows=tuple(2 * each for each in costs.rows))
    slow = SimulatedModel(model.checkpoint, slower, model.served)
    load = requests("independent")
    quick_figures = summarise(simulate_load(model, load)).latency.e2el
    slow_figures = summarise(simulate_load(slow, load)).latency.e2el
    assert quick_figures is not None
    assert slow_figures is not None
    assert slow_figures.mean > 1.5 * quick_figures.mean
