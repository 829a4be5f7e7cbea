"""LongestPrefixMatch: the most cached tokens first."""

from schedule_states import CacheFacts

from midfill.engine.scheduling.policies.longest_prefix import LongestPrefixMatch
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import ScheduleState, WaitingSequence
from midfill.kv.radix_cache import CachedPrefix

CACHE = CacheFacts(cached={2: CachedPrefix(100, 0), 3: CachedPrefix(40, 0), 4: CachedPrefix(40, 0)})


def order_of(queue: list[WaitingSequence]) -> list[int]:
    policy = OrderedAdmission(SarathiServe(token_budget=10_000), LongestPrefixMatch())
    plan = policy.plan(ScheduleState((), tuple(queue), 10_000, CACHE))
    return [chunk.sequence_id for chunk in plan.admit]


def test_cached_tokens_decide_and_not_their_share() -> None:
    queue = [WaitingSequence(1, 10), WaitingSequence(2, 1000), WaitingSequence(3, 50)]
    assert order_of(queue) == [2, 3, 1]


def test_ties_come_in_order_of_arrival() -> None:
    queue = [WaitingSequence(4, 60, arrived=1.0), WaitingSequence(3, 60, arrived=2.0)]
    assert order_of(queue) == [4, 3]
