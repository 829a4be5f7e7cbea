"""The engine's queue: fair between tenants, first come first served within one."""

import pytest
from toy_engine import engine, prompt, sampling

from midfill.engine.engine import Engine
from midfill.engine.request import EngineOutput
from midfill.engine.scheduling.policies.deficit_round_robin import DeficitRoundRobin
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.sequences.waiting_queue import WaitingQueue
from serving import request, serve

LENGTH = 40


def first_tokens(one: Engine) -> list[str]:
    """Run an engine to its end; return its requests in the order of their first tokens."""
    outputs: list[EngineOutput] = []
    while one.has_work():
        outputs += one.step()
    return list(dict.fromkeys(output.request_id for output in outputs))


def flood(one: Engine, tenant: str, count: int, length: int = LENGTH) -> list[str]:
    names = [f"{tenant}{number}" for number in range(count)]
    for number, name in enumerate(names):
        one.add(request(name, prompt(length, hash((tenant, number))), tenant=tenant))
    return names


def test_a_flood_of_one_tenant_does_not_keep_another_waiting() -> None:
    one = engine(max_running=1)
    flood(one, "greedy", 40)
    flood(one, "modest", 2)
    order = first_tokens(one)
    # A quantum of 256 tokens is 5 of these requests, each of 40 tokens and an answer of 12.
    assert order.index("modest0") <= 6
    assert order.index("modest1") <= 12


def test_within_a_tenant_none_overtakes_another() -> None:
    one = engine(max_running=2, token_budget=16)
    ours, theirs = flood(one, "ours", 15), flood(one, "theirs", 15)
    order = first_tokens(one)
    assert [name for name in order if name in ours] == ours
    assert [name for name in order if name in theirs] == theirs


def test_tokens_count_and_not_requests() -> None:
    one = engine(max_running=1)
    flood(one, "long", 20, length=150)
    flood(one, "short", 60, length=20)
    order = first_tokens(one)
    half = order[: len(order) // 2]
    tokens = {
        tenant: sum(length + 12 for name in half if name.startswith(tenant))
        for tenant, length in (("long", 150), ("short", 20))
    }
    assert abs(tokens["long"] - tokens["short"]) <= 2 * (256 + 162)


def test_what_was_computed_while_nobody_waited_is_not_held_against_a_tenant() -> None:
    one = engine(max_running=1)
    flood(one, "alone", 20)
    for _ in range(100):
        one.step()
    names = [f"late{number}" for number in range(20)]
    for number, name in enumerate(names):
        one.add(request(name, prompt(LENGTH, 1000 + number), tenant="late"))
    order = first_tokens(one)
    waited = [name.startswith("alone") for name in order]
    assert any(waited[5:15])


def test_a_tenant_that_comes_and_goes_owes_what_it_used_meanwhile() -> None:
    queue = WaitingQueue(DeficitRoundRobin(100))
    a, b = (Sequence(request(name, [1], tenant=name), n, 99) for n, name in enumerate("ab"))
    queue.append(a)
    queue.append(b)
    queue.charge("a", 500)
    queue.remove(a)
    queue.charge("a", 400)
    queue.append(a)
    assert queue.head(1) == [b]
    queue.charge("b", 700)
    assert queue.head(1) == [b]
    queue.charge("b", 500)
    assert queue.head(1) == [a]


def test_the_queue_is_not_looked_at_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    one = engine(max_running=3)
    flood(one, "a", 500)
    flood(one, "b", 500)
    state = one._queues.state()
    assert 1 <= len(state.waiting) <= 3
    assert one.stats().waiting == 1000
    for name in [f"a{number}" for number in range(500)]:
        one.cancel(name)
    assert one.tenant_stats()["b"].waiting == 500
    assert one.stats().waiting == 500


def test_cancelled_requests_leave_nothing() -> None:
    one = engine(max_running=1)
    names = flood(one, "a", 5) + flood(one, "b", 5)
    one.step()
    for name in names:
        one.cancel(name)
    serve(one)
    assert len(one._queues.waiting) == 0
    assert one._queues.waiting.counts() == {}
    assert list(one._queues.waiting) == []
    answers = serve(one, [request("z", prompt(10), sampling(max_tokens=2))])
    assert answers["z", 0].finish_reason == "length"
