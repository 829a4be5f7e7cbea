"""DistServe's two schedulers, rule by rule."""

import pytest

from midfill.engine.disaggregated.latency import DecodeCost, DecodeLatency, PrefillLatency
from midfill.engine.disaggregated.workers import (
    DecodeStep,
    DecodeWorker,
    Pool,
    PrefillWorker,
    plan_decode_step,
    prefill_batch,
)
from midfill.errors import MidfillError

COST = DecodeCost(0.01, 0.0, 0.0)


def prefill_worker(**given: object) -> PrefillWorker:
    settings: dict[str, object] = {
        "latency": PrefillLatency(0.1, 0.0, 0.0),
        "pool": Pool(pages=1000, page_tokens=1),
        "saturating_tokens": 100,
    }
    return PrefillWorker(**{**settings, **given})  # type: ignore[arg-type]


def decode_worker(pages: int = 100, **given: object) -> DecodeWorker:
    pool = Pool(pages=pages, page_tokens=1)
    return DecodeWorker(latency=DecodeLatency(COST, COST, 1), pool=pool, **given)  # type: ignore[arg-type]


class TestPrefill:
    def test_short_prompts_run_together_up_to_what_saturates_the_device(self) -> None:
        assert prefill_batch(prefill_worker(), [40, 50, 10, 1], 0) == 3

    def test_a_long_prompt_runs_alone(self) -> None:
        assert prefill_batch(prefill_worker(), [100, 1], 0) == 1
        assert prefill_batch(prefill_worker(), [1, 100], 0) == 1

    def test_nobody_overtakes(self) -> None:
        assert prefill_batch(prefill_worker(), [60, 60, 1], 0) == 1

    def test_prompts_that_were_not_pulled_hold_their_pages(self) -> None:
        assert prefill_batch(prefill_worker(), [40, 40], 930) == 1
        assert prefill_batch(prefill_worker(), [40, 40], 990) == 0

    def test_a_batch_has_limits(self) -> None:
        assert prefill_batch(prefill_worker(max_batch=2), [1, 1, 1], 0) == 2
        assert prefill_batch(prefill_worker(max_batch_tokens=50), [30, 30], 0) == 1


class TestDecode:
    def test_it_pulls_while_few_prompts_wait_and_there_is_room(self) -> None:
        worker = decode_worker(pages=100)
        assert worker.pulls(prompt=50, waiting_pages=4, free_pages=52)
        assert not worker.pulls(prompt=50, waiting_pages=5, free_pages=52)
        assert not worker.pulls(prompt=51, waiting_pages=0, free_pages=52)

    def test_what_was_pulled_is_admitted_in_order(self) -> None:
        step = plan_decode_step(decode_worker(max_batch=3), [10], 0, [], [10, 10, 10], 36)
        assert step == DecodeStep(swapped_out=0, swapped_in=0, admitted=2)

    def test_the_last_of_the_batch_are_swapped_out_where_the_pool_is_too_small(self) -> None:
        step = plan_decode_step(decode_worker(), [40, 30, 28], 0, [], [], 0)
        assert step == DecodeStep(swapped_out=1, swapped_in=0, admitted=0)
        step = plan_decode_step(decode_worker(), [40, 30, 26], 60, [], [], 0)
        assert step == DecodeStep(swapped_out=3, swapped_in=0, admitted=0)

    def test_those_in_host_memory_come_before_those_that_wait(self) -> None:
        step = plan_decode_step(decode_worker(), [10], 0, [20, 70], [10], 12)
        assert step == DecodeStep(swapped_out=0, swapped_in=1, admitted=0)

    def test_unless_nothing_would_run(self) -> None:
        step = plan_decode_step(decode_worker(), [], 0, [95], [10], 12)
        assert step == DecodeStep(swapped_out=0, swapped_in=0, admitted=1)


def test_a_worker_without_memory_is_refused() -> None:
    with pytest.raises(MidfillError, match="at least one page"):
        Pool(pages=0)
