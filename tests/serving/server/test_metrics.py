"""Metrics: what the engine and the server count, by tenant, with a bounded number of tenants."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from midfill.engine.request import EngineStats, TenantStats
from midfill.serving.server.metrics import MAX_TENANTS, OTHERS, Metrics


@dataclass
class Numbers:
    """An engine's numbers."""

    stats: EngineStats = field(default_factory=EngineStats)
    tenants: Mapping[str, TenantStats] = field(default_factory=dict)
    restarts: int = 0
    queued_tokens: int = 0


def families(metrics: Metrics) -> dict[str, Metric]:
    text = metrics.render().decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def by_tenant(metrics: Metrics, family: str, sample: str = "") -> dict[str, float]:
    found = families(metrics)[f"midfill:{family}"].samples
    name = f"midfill:{sample or family}"
    return {one.labels["tenant"]: one.value for one in found if one.name == name}


def test_without_keys_there_is_one_tenant_whose_numbers_are_the_engines() -> None:
    engine = Numbers(EngineStats(running=2, waiting=3, generated_tokens=4, prompt_tokens=5))
    metrics = Metrics("m", engine)
    assert by_tenant(metrics, "num_requests_running") == {"": 2}
    assert by_tenant(metrics, "num_requests_waiting") == {"": 3}
    assert by_tenant(metrics, "generation_tokens", "generation_tokens_total") == {"": 4}
    assert by_tenant(metrics, "prefix_cache_queries", "prefix_cache_queries_total") == {"": 5}


def test_every_tenant_has_its_numbers_from_the_start() -> None:
    metrics = Metrics("m", Numbers(tenants={"b": TenantStats(running=1)}), ("a", "b"))
    assert by_tenant(metrics, "num_requests_running") == {"a": 0, "b": 1}
    count = "time_to_first_token_seconds_count"
    assert by_tenant(metrics, "time_to_first_token_seconds", count) == {"a": 0, "b": 0}
    metrics.of_tenant("a").first_token(0.5)
    assert by_tenant(metrics, "time_to_first_token_seconds", count) == {"a": 1, "b": 0}


def test_tenants_beyond_the_maximum_share_a_label() -> None:
    names = [f"key-{number}" for number in range(MAX_TENANTS + 3)]
    engine = Numbers(tenants={name: TenantStats(generated_tokens=1) for name in names})
    metrics = Metrics("m", engine, names)
    for name in names:
        metrics.of_tenant(name).request_finished(1.0, prompt=10, cached=5, generated=7)
        metrics.response_sent(name, 200)
    expected = {**dict.fromkeys(names[:MAX_TENANTS], 1), OTHERS: 3}
    tokens = by_tenant(metrics, "generation_tokens", "generation_tokens_total")
    assert tokens == expected
    count = by_tenant(metrics, "request_prompt_tokens", "request_prompt_tokens_count")
    assert count == expected
    assert by_tenant(metrics, "http_requests", "http_requests_total") == expected


def test_models_with_states_say_what_becomes_of_them() -> None:
    stats = EngineStats(
        states_total=8, states_used=2, state_snapshots=5, snapshots_reused=7, snapshots_evicted=3
    )
    found = families(Metrics("m", Numbers(stats)))
    shown = {
        sample.name: sample.value
        for name, family in found.items()
        if name.startswith("midfill:state")
        for sample in family.samples
    }
    assert shown == {
        "midfill:states": 8,
        "midfill:states_used": 2,
        "midfill:state_snapshots": 5,
        "midfill:state_snapshots_reused_total": 7,
        "midfill:state_snapshots_evicted_total": 3,
    }
    without = families(Metrics("m", Numbers(EngineStats(slots_total=10))))
    assert not [name for name in without if name.startswith("midfill:state")]


def test_stages_and_endings_are_counted() -> None:
    metrics = Metrics("m", Numbers())
    tenant = metrics.of_tenant("")
    tenant.stages_finished(queue=1.0, prefill=2.0, decode=3.0)
    tenant.answer_finished("abort")
    metrics.response_sent(None, 499)
    for stage, seconds in (("queue", 1), ("prefill", 2), ("decode", 3)):
        name = f"request_{stage}_time_seconds"
        assert by_tenant(metrics, name, f"{name}_sum") == {"": seconds}
    (ended,) = families(metrics)["midfill:request_success"].samples
    assert ended.labels == {"model_name": "m", "tenant": "", "finished_reason": "abort"}
    (answered,) = families(metrics)["midfill:http_requests"].samples
    assert answered.labels == {"model_name": "m", "tenant": "", "status": "499"}
