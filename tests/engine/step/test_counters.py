"""What each tenant uses of the engine."""

import pytest
from toy_engine import engine, prompt, sampling

from midfill.engine.request import TenantStats
from serving import background, request, serve


def test_tokens_are_counted_by_tenant_and_add_up() -> None:
    one = engine()
    short = sampling(max_tokens=3)
    serve(one, [request("a", prompt(40), short, "ann"), request("b", prompt(50), short, "bob")])
    serve(one, [request("c", prompt(40), sampling(max_tokens=5), "ann")])
    serve(one, [background("d", prompt(60), "cy")])
    tenants = one.tenant_stats()
    assert tenants == {
        "ann": TenantStats(prompt_tokens=80, cached_tokens=39, generated_tokens=8),
        "bob": TenantStats(prompt_tokens=50, generated_tokens=3),
    }
    for name in ("prompt_tokens", "cached_tokens", "generated_tokens"):
        total = sum(getattr(stats, name) for stats in tenants.values())
        assert total == getattr(one.stats(), name)


def test_who_waits_and_who_runs() -> None:
    one = engine(max_running=1)
    one.add(request("a", prompt(40), tenant="ann"))
    one.add(request("b", prompt(50), tenant="bob"))
    assert one.tenant_stats() == {"ann": TenantStats(waiting=1), "bob": TenantStats(waiting=1)}
    one.step()
    ann, bob = (one.tenant_stats()[name] for name in ("ann", "bob"))
    assert (ann.running, ann.waiting, bob.running, bob.waiting) == (1, 0, 0, 1)
    one.cancel("a")
    serve(one)
    ann, bob = (one.tenant_stats()[name] for name in ("ann", "bob"))
    assert ann.running == ann.waiting == bob.running == bob.waiting == 0
    assert bob.generated_tokens == 12


@pytest.mark.parametrize("n", [1, 3])
def test_the_first_output_tells_how_long_the_prefill_took(n: int) -> None:
    one = engine()
    one.add(request("a", prompt(40), sampling(max_tokens=3, n=n)))
    outputs = []
    while one.has_work():
        outputs += one.step()
    told = [output for output in outputs if output.prefill_seconds is not None]
    assert told == [output for output in outputs if output.index == 0][:1]
    assert told[0].prefill_seconds is not None
    assert told[0].prefill_seconds > 0
