"""The workloads: seeded, in order, at their rate, and each with what makes it what it is."""

import math
import random
from itertools import islice, pairwise
from statistics import mean, pstdev

import pytest

from midfill.errors import OptionError
from midfill_lab.bench.serving.workload import (
    TimedRequest,
    WorkloadOptions,
    arrival_times,
    followers,
    next_turn,
)
from midfill_lab.bench.serving.workloads import WORKLOADS, make_requests


def load(workload: str, **fields: object) -> list[TimedRequest]:
    return make_requests(WorkloadOptions(workload=workload, **({"requests": 48} | fields)))


@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_seed_decides_the_load(workload: str) -> None:
    assert load(workload) == load(workload)
    assert load(workload) != load(workload, seed=1)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_requests_are_numbered_and_first_turns_come_in_order(workload: str) -> None:
    requests = load(workload, tenants=2, deadline=3.0)
    assert [request.index for request in requests] == list(range(48))
    first = [request.arrival for request in requests if not request.turn]
    assert first == sorted(first)
    deadlines = [request.deadline or 0.0 for request in requests]
    assert 1.5 <= min(deadlines) < 2.0
    assert 4.0 < max(deadlines) <= 4.5
    assert {request.tenant for request in requests} == {"tenant-0", "tenant-1"}
    assert all(request.max_tokens >= 1 and request.prompt for request in requests)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_the_rate_counts_requests(workload: str) -> None:
    requests = load(workload, requests=800, request_rate=8.0, users=20, characters=100)
    last = max(request.arrival for request in requests if not request.turn)
    assert 800 / last == pytest.approx(8.0, rel=0.3)


@pytest.mark.parametrize("workload", WORKLOADS)
def test_all_at_once(workload: str) -> None:
    requests = load(workload, request_rate=math.inf)
    assert {request.arrival for request in requests if not request.turn} == {0.0}


@pytest.mark.parametrize("workload", WORKLOADS)
def test_nothing_arrives_after_the_duration(workload: str) -> None:
    requests = load(workload, request_rate=5.0, duration=4.0)
    assert 0 < len(requests) <= 48
    assert all(request.arrival <= 4.0 for request in requests if not request.turn)


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_burstiness_is_the_shape_of_the_gaps(burstiness: float, variation: float) -> None:
    times = list(islice(arrival_times(10.0, burstiness, random.Random(3)), 20_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert mean(gaps) == pytest.approx(0.1, rel=0.05)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.05)


def test_independent_prompts_begin_differently() -> None:
    starts = {request.prompt[:16] for request in load("independent")}
    assert len(starts) == 48


def test_an_editor_asks_again_with_almost_the_same_text() -> None:
    requests = [request for request in load("editing", users=2) if request.user == 1]
    assert {request.document for request in requests} == {"document-1"}
    texts = [request.prompt + (request.suffix or "") for request in requests]
    assert all(request.suffix is not None for request in requests)
    assert max(abs(len(after) - len(before)) for before, after in pairwise(texts)) < 200


def test_each_turn_of_an_agent_follows_the_one_before() -> None:
    requests = load("agents", requests=10, turns=4)
    after = followers(requests)
    assert [request.turn for request in requests] == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1]
    for request in requests:
        if request.turn:
            assert after[request.index - 1] == request
    assert {request.prompt[:200] for request in requests if not request.turn} == {
        requests[0].prompt[:200]
    }


def test_agents_say_what_continuum_asks_for() -> None:
    requests = load("agents", requests=10, turns=4)
    assert [request.hints.get("job_id") for request in requests[3:6]] == [
        "program-0", "program-1", "program-1",
    ]  # fmt: skip
    last = [request.index for request in requests if request.hints.get("is_last_step")]
    assert last == [3, 7, 9]
    assert [request.index for request in requests if not request.tool] == last


def test_tools_take_the_pause_on_average_and_differ() -> None:
    seconds: dict[str, list[float]] = {}
    requests = load("agents", requests=4000, turns=2, pause=2.0, characters=50)
    for before, after in pairwise(requests):
        if after.turn:
            seconds.setdefault(before.tool, []).append(after.arrival)
    assert mean([each for own in seconds.values() for each in own]) == pytest.approx(2.0, rel=0.1)
    assert min(seconds["make"]) > max(seconds["grep"])


def test_hints_say_what_a_client_knows() -> None:
    hints = {request.kind: request.hints for request in load("mixed", output_tokens=40)}
    assert hints == {
        "chat": {"expected_tokens": 40},
        "document": {"expected_tokens": 20, "priority": 1},
    }


def test_a_turn_extends_prompt_and_answer() -> None:
    turn = load("agents", requests=2, turns=2)[1]
    assert next_turn("before", " answer", turn) == f"before answer{turn.prompt}"


def test_a_batch_arrives_together_and_shares_its_beginning() -> None:
    batches: dict[float, list[str]] = {}
    for request in load("shared-prefix", batch=6):
        batches.setdefault(request.arrival, []).append(request.prompt)
    assert {len(prompts) for prompts in batches.values()} == {6}
    assert all(len({prompt[:900] for prompt in prompts}) == 1 for prompts in batches.values())
    assert all(len(set(prompts)) == 6 for prompts in batches.values())


def test_documents_are_long_and_chats_short() -> None:
    lengths: dict[str, list[int]] = {}
    for request in load("mixed", requests=200):
        lengths.setdefault(request.kind, []).append(len(request.prompt))
    assert min(lengths["document"]) > 5 * max(lengths["chat"])
    assert len(lengths["chat"]) > 5 * len(lengths["document"])


@pytest.mark.parametrize("fields", [{"request_rate": 0.0}, {"burstiness": -1.0}, {"duration": 0.0}])
def test_options_that_make_no_load(fields: dict[str, float]) -> None:
    with pytest.raises(OptionError, match="must be above 0"):
        WorkloadOptions(**fields)


def test_a_duration_without_arrivals() -> None:
    with pytest.raises(OptionError, match="no request arrives"):
        load("independent", request_rate=0.001, duration=0.001)
