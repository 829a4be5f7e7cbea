"""What prefill and decode workers may hold, rule by rule."""

import pytest

from midfill.engine.disaggregated.workers import DecodeLimits, Pool, PrefillLimits, prefill_batch
from midfill.errors import MidfillError


def prefill_worker(**given: object) -> PrefillLimits:
    settings: dict[str, object] = {
        "pool": Pool(pages=1000, page_tokens=1),
        "saturating_tokens": 100,
    }
    return PrefillLimits(**{**settings, **given})  # type: ignore[arg-type]


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
        worker = DecodeLimits(pool=Pool(pages=100, page_tokens=1))
        assert worker.pulls(prompt=50, waiting_pages=4, free_pages=52)
        assert not worker.pulls(prompt=50, waiting_pages=5, free_pages=52)
        assert not worker.pulls(prompt=51, waiting_pages=0, free_pages=52)


def test_a_worker_without_memory_is_refused() -> None:
    with pytest.raises(MidfillError, match="at least one page"):
        Pool(pages=0)
