"""The history of metrics: bounded, summed over tenants, with ages."""

import asyncio

import pytest
from running_server import RunningServer

from midfill.engine.request import EngineStats, TenantStats
from midfill.serving.server import metrics_history
from midfill.serving.server.metrics import Metrics
from midfill.serving.server.metrics_history import MAX_SAMPLES, SERIES, MetricsHistory


class Engine:
    """An engine's numbers."""

    restarts = queued_tokens = 0

    def __init__(self) -> None:
        self.stats = EngineStats(slots_total=100, steps=7, states_total=4)
        generated = {"a": 1, "b": 2}
        self.tenants = {
            name: TenantStats(generated_tokens=tokens) for name, tokens in generated.items()
        }


def test_the_oldest_samples_go() -> None:
    numbers = iter(range(1000))
    history = MetricsHistory(lambda: {("midfill:steps_total", ""): next(numbers)})
    for number in range(MAX_SAMPLES + 5):
        history.record(10.0 * number)
    body = history.body(10.0 * (MAX_SAMPLES + 4) + 3)
    place = SERIES.index(("midfill:steps_total", ""))
    assert [sample.values[place] for sample in body.samples] == list(range(5, MAX_SAMPLES + 5))
    assert body.samples[0].age == 10.0 * (MAX_SAMPLES - 1) + 3
    assert body.samples[-1].age == 3.0


def test_metrics_are_summed_over_tenants_and_ways_to_end() -> None:
    metrics = Metrics("m", Engine(), ("a", "b"))  # type: ignore[arg-type]
    history = MetricsHistory(metrics.sums)
    history.record(0)
    for tenant, reason in (("a", "stop"), ("a", "length"), ("b", "stop")):
        own = metrics.of_tenant(tenant)
        own.answer_finished(reason)
        own.first_token(0.03)
    history.record(10)
    body = history.body(10)
    assert [(one.name, one.le) for one in body.series] == list(SERIES)
    before, after = (dict(zip(SERIES, sample.values, strict=True)) for sample in body.samples)
    assert before["midfill:request_success_total", ""] == 0
    assert after["midfill:request_success_total", ""] == 3
    assert after["midfill:generation_tokens_total", ""] == 3
    assert after["midfill:kv_slots", ""] == 100
    first_token = "midfill:time_to_first_token_seconds_bucket"
    assert [after[first_token, bound] for bound in ("0.02", "0.04", "640.0", "+Inf")] == [
        0,
        3,
        3,
        3,
    ]


def test_all_that_is_kept_is_measured() -> None:
    metrics = Metrics("m", Engine(), ("a",))  # type: ignore[arg-type]
    metrics.of_tenant("a").answer_finished("stop")
    assert set(SERIES) <= set(metrics.sums())


def test_samples_are_taken_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_history, "INTERVAL", 0)
    history = MetricsHistory(dict)

    async def keep_some() -> None:
        keeping = asyncio.create_task(history.keep())
        while len(history.body(0).samples) < 3:
            await asyncio.sleep(0)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)

    asyncio.run(keep_some())
    assert len(history.body(0).samples) >= 3


def test_a_server_records_from_its_start(server: RunningServer) -> None:
    answer = server.get("/metrics/history").json()
    assert answer["samples"]
    assert {len(sample["values"]) for sample in answer["samples"]} == {len(answer["series"])}
