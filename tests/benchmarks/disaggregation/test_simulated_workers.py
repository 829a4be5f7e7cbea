"""DistServe's decode scheduler, rule by rule."""

from benchmarks.disaggregation.latency import DecodeCost, DecodeLatency
from benchmarks.disaggregation.simulated_workers import DecodeStep, DecodeWorker, plan_decode_step
from midfill.engine.disaggregated.workers import Pool

COST = DecodeCost(0.01, 0.0, 0.0)


def decode_worker(pages: int = 100, **given: object) -> DecodeWorker:
    pool = Pool(pages=pages, page_tokens=1)
    return DecodeWorker(latency=DecodeLatency(COST, COST, 1), pool=pool, **given)  # type: ignore[arg-type]


def test_what_was_pulled_is_admitted_in_order() -> None:
    step = plan_decode_step(decode_worker(max_batch=3), [10], 0, [], [10, 10, 10], 36)
    assert step == DecodeStep(swapped_out=0, swapped_in=0, admitted=2)


def test_the_last_of_the_batch_are_swapped_out_where_the_pool_is_too_small() -> None:
    step = plan_decode_step(decode_worker(), [40, 30, 28], 0, [], [], 0)
    assert step == DecodeStep(swapped_out=1, swapped_in=0, admitted=0)
    step = plan_decode_step(decode_worker(), [40, 30, 26], 60, [], [], 0)
    assert step == DecodeStep(swapped_out=3, swapped_in=0, admitted=0)


def test_those_in_host_memory_come_before_those_that_wait() -> None:
    step = plan_decode_step(decode_worker(), [10], 0, [20, 70], [10], 12)
    assert step == DecodeStep(swapped_out=0, swapped_in=1, admitted=0)


def test_unless_nothing_would_run() -> None:
    step = plan_decode_step(decode_worker(), [], 0, [95], [10], 12)
    assert step == DecodeStep(swapped_out=0, swapped_in=0, admitted=1)
