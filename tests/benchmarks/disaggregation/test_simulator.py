from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.disaggregation.latency import DecodeCost, DecodeLatency, PrefillLatency
from benchmarks.disaggregation.simulated_workers import DecodeWorker, PrefillWorker, Transfer
from benchmarks.disaggregation.simulator import (
    Deployment,
    simulate,
    simulate_decode,
    simulate_workers,
)
from benchmarks.disaggregation.workload import (
    Arrival,
    Lengths,
    Served,
    Targets,
    attainment,
    poisson_arrivals,
)
from midfill.engine.disaggregated.workers import Pool
from midfill.errors import MidfillError

STEP = 0.01
PER_TOKEN = 0.001


def prefill_worker(pages: int = 1000) -> PrefillWorker:
    return PrefillWorker(
        latency=PrefillLatency(0.0, PER_TOKEN, 0.0),
        pool=Pool(pages=pages, page_tokens=1),
        saturating_tokens=1,
    )


def decode_worker(pages: int = 1000, stages: int = 1, max_batch: int = 8) -> DecodeWorker:
    cost = DecodeCost(STEP, 0.0, 0.0)
    return DecodeWorker(
        latency=DecodeLatency(cost, cost, 1),
        pool=Pool(pages=pages, page_tokens=1),
        stages=stages,
        max_batch=max_batch,
    )


def serve(
    *requests: tuple[float, int, int],
    prefill: PrefillWorker | None = None,
    decode: DecodeWorker | None = None,
    transfer: Transfer = Transfer(),  # noqa: B008
) -> list[Served]:
    deployment = Deployment((prefill or prefill_worker(),), (decode or decode_worker(),), transfer)
    return simulate([Arrival(at, Lengths(*lengths)) for at, *lengths in requests], deployment)


def test_a_lone_request_takes_its_prefill_and_its_steps() -> None:
    (one,) = serve((5.0, 100, 4))
    assert one.ttft == pytest.approx(100 * PER_TOKEN)
    assert one.tpot == pytest.approx(STEP)


def test_the_transfer_is_in_the_first_gap_and_not_in_the_time_to_the_first_token() -> None:
    (one,) = serve((0.0, 100, 4), transfer=Transfer(seconds_per_token=0.002, constant=0.1))
    assert one.ttft == pytest.approx(100 * PER_TOKEN)
    assert one.finish - one.first_token == pytest.approx(3 * STEP + 0.3)


@pytest.mark.parametrize(("share", "start"), [(0.0, 0.1), (0.5, 0.2), (1.0, 0.3)])
def test_the_next_prompt_waits_while_the_prefill_worker_copies(share: float, start: float) -> None:
    transfer = Transfer(constant=0.2, read_share=share)
    first, second = serve((0.0, 100, 3), (0.01, 400, 1), transfer=transfer)
    assert first.finish == pytest.approx(0.1 + 0.2 + 2 * STEP)
    assert second.first_token == pytest.approx(start + 0.4)


def test_a_pull_that_comes_late_waits_for_the_step_in_progress() -> None:
    # The decode worker has no room for the second before the first has ended, at 0.1 + 20 steps.
    requests = [(0.0, 100, 21), (0.0, 100, 3), (0.0, 400, 1)]
    transfer = Transfer(constant=0.01, read_share=1.0)
    served = serve(*requests, decode=decode_worker(pages=130), transfer=transfer)
    assert served[0].finish == pytest.approx(0.1 + 0.01 + 20 * STEP)
    assert served[2].first_token == pytest.approx(0.21 + 0.4)  # before the second is copied
    assert served[1].finish == pytest.approx(0.61 + 0.01 + 2 * STEP)


def test_it_says_how_busy_the_workers_are() -> None:
    deployment = Deployment((prefill_worker(),), (decode_worker(),))
    simulated = simulate_workers([Arrival(0.0, Lengths(100, 11))], deployment)
    assert simulated.prefill_busy == pytest.approx(0.5)
    assert simulated.decode_busy == pytest.approx(0.5)


def test_an_answer_of_one_token_never_moves() -> None:
    (one,) = serve((0.0, 100, 1), decode=decode_worker(pages=1), transfer=Transfer(constant=9.0))
    assert one.finish == one.first_token


def test_a_prefill_delays_no_decode() -> None:
    alone, _ = serve((0.0, 10, 50), (1000.0, 1, 1))
    beside, _ = serve((0.0, 10, 50), (0.02, 400, 1))
    assert beside.tpot == alone.tpot


def test_prompts_wait_on_the_prefill_side_where_the_decode_pool_is_full() -> None:
    requests = [(0.0, 40, 10) for _ in range(8)]
    served = serve(*requests, prefill=prefill_worker(pages=80), decode=decode_worker(pages=60))
    assert all(one.finish > one.first_token for one in served)
    # Two prompts fill the prefill pool, so the third starts when the second was pulled.
    second_pulled = served[0].finish
    assert served[3].first_token >= second_pulled


def test_stages_take_turns_and_each_batch_keeps_its_pace() -> None:
    requests = [Arrival(0.0, Lengths(10, 101)) for _ in range(4)]
    (one, two) = (
        simulate_decode(requests, [decode_worker(stages=stages, max_batch=2)]) for stages in (1, 2)
    )
    assert max(each.finish for each in one) == pytest.approx(200 * STEP, rel=0.02)
    assert max(each.finish for each in two) == pytest.approx(100 * STEP, rel=0.02)


def test_two_workers_of_each_kind_serve_twice_as_much() -> None:
    requests = [Arrival(0.0, Lengths(100, 50)) for _ in range(20)]
    ends = [
        max(
            served.finish
            for served in simulate(
                requests, Deployment((prefill_worker(),) * count, (decode_worker(),) * count)
            )
        )
        for count in (1, 2)
    ]
    assert ends[1] == pytest.approx(ends[0] / 2, rel=0.2)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=25),
    prefill_pages=st.integers(30, 60),
    decode_pages=st.integers(60, 90),
    stages=st.integers(1, 3),
    gap=st.sampled_from([0.0, 0.005, 0.05]),
)
def test_every_request_is_served_however_small_the_pools_are(
    lengths: list[tuple[int, int]], prefill_pages: int, decode_pages: int, stages: int, gap: float
) -> None:
    arrivals = [Arrival(gap * place, Lengths(*each)) for place, each in enumerate(lengths)]
    deployment = Deployment(
        (prefill_worker(prefill_pages),), (decode_worker(decode_pages, stages, max_batch=4),)
    )
    served = simulate(arrivals, deployment)
    assert [one.arrival for one in served] == arrivals
    for one in served:
        assert one.ttft >= one.arrival.lengths.prompt * PER_TOKEN - 1e-9
        assert one.tpot >= (STEP if one.arrival.lengths.output > 1 else 0.0) - 1e-9


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        ((0.0, 2000, 1), "a prompt of 2000 tokens is too long for a prefill worker"),
        ((0.0, 900, 200), "a request of 1100 tokens is too long for a decode worker"),
    ],
)
def test_what_could_never_be_served_is_refused(
    request_: tuple[float, int, int], message: str
) -> None:
    with pytest.raises(MidfillError, match=message):
        serve(request_)


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_deployment_without_workers_of_a_kind_is_refused(kind: str) -> None:
    workers: dict[str, Sequence[object]] = {
        "prefill": (prefill_worker(),), "decode": (decode_worker(),), kind: (),
    }  # fmt: skip
    with pytest.raises(MidfillError, match=f"there is no {kind} worker"):
        Deployment(**workers)  # type: ignore[arg-type]


class TestWorkload:
    def test_a_rate_scales_the_gaps_of_the_same_requests(self) -> None:
        history = [Lengths(10, 1), Lengths(20, 2)]
        slow, fast = (poisson_arrivals(history, rate, 50, seed=1) for rate in (1.0, 4.0))
        assert [one.lengths for one in slow] == [one.lengths for one in fast]
        assert [one.seconds for one in slow] == pytest.approx([4 * one.seconds for one in fast])

    def test_both_targets_have_to_be_met(self) -> None:
        arrival = Arrival(0.0, Lengths(1, 11))
        served = [Served(arrival, 1.0, 2.0), Served(arrival, 3.0, 4.0), Served(arrival, 1.0, 9.0)]
        assert attainment(served, Targets(ttft=1.5, tpot=0.2)) == pytest.approx(1 / 3)
        assert attainment(served, Targets(ttft=1.5, tpot=0.2).scaled(10)) == 1.0

    def test_an_empty_history_is_refused(self) -> None:
        with pytest.raises(MidfillError, match="past requests"):
            poisson_arrivals([], 1.0, 1, seed=0)
