"""RequestQueues: what a scheduling policy gets to see of them."""

import pytest
from toy_engine import engine, prompt

from midfill.arrays import Int32Array
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.kv.radix_cache import CachedPrefix
from serving import request


def test_each_waiting_prompt_is_looked_up_in_the_cache_once_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = engine()
    for number in range(3):
        one.add(request(str(number), prompt(40, number)))
    queues = one._queues
    peek, looked_up = queues.pool.cache.peek, []

    def record(root: str, tokens: Int32Array) -> CachedPrefix:
        looked_up.append(root)
        return peek(root, tokens)

    monkeypatch.setattr(queues.pool.cache, "peek", record)
    policy = SarathiServe(token_budget=1000, short_share=0.5)
    for steps in (1, 2):
        assert len(policy.plan(queues.state()).admit) == 3
        assert len(looked_up) == 3 * steps
