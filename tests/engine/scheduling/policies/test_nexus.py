"""Nexus: the search, the objective and the hysteresis, beside a naive reference of the paper.

The reference is the paper's device: two streams on shares of a GPU, each phase the sum over its
operators of the longer of compute and memory.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding, prefilling
from step_simulation import Job, Progress, Simulation, linear_cost, mean_ttft
from toy_engine import prompt, sampling, truth
from toy_runner import ToyRunner

from midfill.engine.request import EngineRequest
from midfill.engine.scheduling.policies.nexus import Nexus, adjust_share
from midfill.engine.scheduling.policies.ordered_admission import OrderedAdmission
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.policies.shortest_first import ShortestPromptFirst
from midfill.engine.scheduling.scheduler import (
    RunningSequence,
    SchedulerPolicy,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from serving import build_engine, request, serve


@dataclass(frozen=True)
class Operator:
    """One operator of a phase on the paper's device.

    Attributes:
        flops, bytes: what it computes and reads, in units of the device's per second.
        saturation: share of the device beyond which it hardly gains: R_sat.
        decay: what it then gains per further share: lambda.
    """

    flops: float
    bytes: float
    saturation: float = 0.6
    decay: float = 0.1

    def seconds(self, share: float, bandwidth: float = 1.0) -> float:
        gained = min(share, self.saturation) + self.decay * max(share - self.saturation, 0.0)
        return max(self.flops / gained, self.bytes / bandwidth)


@dataclass(frozen=True)
class Device:
    """The paper's two phases beside each other; shares are in percent."""

    dense: Operator
    prefill_attention: Operator
    decode_dense: Operator
    decode_attention: Operator

    def prefill_seconds(self, share: int) -> float:
        return self.dense.seconds(share / 100) + self.prefill_attention.seconds(share / 100)

    def decode_bandwidth(self, prefill_share: int) -> float:
        """The bandwidth that is left to the decodes' attention: B_eff."""
        attention = self.prefill_attention.seconds(prefill_share / 100)
        part = attention / self.prefill_seconds(prefill_share)
        own = self.decode_attention.bytes
        beside_attention = own / (own + self.prefill_attention.bytes)
        beside_dense = own / (own + self.dense.bytes)
        return part * beside_attention + (1 - part) * beside_dense

    def decode_seconds(self, share: int) -> float:
        bandwidth = self.decode_bandwidth(100 - share) if share < 100 else 1.0
        attention = self.decode_attention.seconds(share / 100, bandwidth)
        return self.decode_dense.seconds(share / 100) + attention


DEVICE = Device(
    Operator(flops=0.05, bytes=0.004),
    Operator(flops=0.01, bytes=0.002),
    Operator(flops=0.0005, bytes=0.004, saturation=0.5, decay=0.03),
    Operator(flops=0.0002, bytes=0.004, saturation=0.5, decay=0.03),
)


def best_by_trying(other: Callable[[int], float], slack: float) -> int:
    """Return the largest share from 10 to 90 that leaves the other phase its slack, or 10."""
    fitting = [share for share in range(10, 91) if other(100 - share) <= slack * other(100)]
    return max(fitting, default=10)


class TestSearch:
    @settings(max_examples=500)
    @given(
        st.lists(st.floats(0.0, 2.0), min_size=101, max_size=101), st.floats(1.0, 3.0),
        st.integers(-5, 120),
    )  # fmt: skip
    def test_it_finds_what_trying_all_shares_finds_from_anywhere(
        self, steps: list[float], slack: float, start: int
    ) -> None:
        table = [1.0 + sum(steps[share:]) for share in range(101)]  # falls as the share grows
        assert adjust_share(start, table.__getitem__, slack) == best_by_trying(
            table.__getitem__, slack
        )

    def test_where_no_share_fits_it_is_the_smallest(self) -> None:
        assert adjust_share(50, lambda share: 1.0 if share == 100 else 9.0, 1.1) == 10

    def test_near_the_answer_it_asks_a_few_times(self) -> None:
        asked: list[int] = []

        def other(share: int) -> float:
            asked.append(share)
            return 100.0 / share

        found = adjust_share(50, other, 2.5)
        asked.clear()
        assert adjust_share(found, other, 2.5) == found
        assert len(asked) <= 4


class TestThePapersDevice:
    def test_the_search_finds_the_split_of_the_paper_s_equations(self) -> None:
        prompts_first = adjust_share(50, DEVICE.decode_seconds, 1.1)
        assert prompts_first == best_by_trying(DEVICE.decode_seconds, 1.1)
        answers_first = adjust_share(50, DEVICE.prefill_seconds, 1.3)
        assert answers_first == best_by_trying(DEVICE.prefill_seconds, 1.3)
        assert 10 < answers_first < 90

    @given(st.floats(0.0005, 0.05), st.integers(10, 90))
    def test_decodes_slow_down_with_the_context_of_the_prefill(
        self, read: float, share: int
    ) -> None:
        attention = replace(DEVICE.prefill_attention, bytes=read)
        longer = replace(DEVICE.prefill_attention, bytes=2 * read)
        here, there = (replace(DEVICE, prefill_attention=each) for each in (attention, longer))
        assert there.decode_bandwidth(share) < here.decode_bandwidth(share) <= 1.0
        assert there.decode_seconds(100 - share) >= here.decode_seconds(100 - share)


def known(
    *running: RunningSequence,
    waiting: Sequence[int] = (5000,),
    used: float = 0.0,
    last: int | None = None,
    seconds: Callable[[int, float], float] | None = lambda rows, keys: linear_cost(rows),
) -> ScheduleState:
    queue = tuple(WaitingSequence(100 + n, length) for n, length in enumerate(waiting))
    return ScheduleState(
        running, queue, 100_000 - int(used * 100_000), CacheFacts(), total_slots=100_000,
        step_seconds=seconds, prefill_share=last,
    )  # fmt: skip


DECODES = tuple(decoding(number, 50) for number in range(10))


class TestShares:
    policy = Nexus(token_budget=100, decode_slack=4.0, prefill_slack=1.3)

    def test_prompts_have_the_largest_chunk_that_decodes_can_bear(self) -> None:
        # Decodes alone take 15 ms; 60 ms are 45 rows of a prompt beside them.
        made = self.policy.plan(known(*DECODES))
        assert made.prefill_share == 45
        assert (len(made.decodes), made.rows) == (10, 55)

    def test_with_little_kv_left_decodes_have_the_smallest_that_prompts_can_bear(self) -> None:
        # A token of a whole step takes 1.05 ms. With n of a prompt beside 10 decodes it takes
        # 1 + 15 / n ms, so n is at least 41.
        made = self.policy.plan(known(*DECODES, used=0.8))
        assert made.prefill_share == 42
        assert self.policy.plan(known(*DECODES, used=0.699)).prefill_share == 45
        assert self.policy.plan(known(*DECODES, used=0.7)).prefill_share == 42

    @given(st.integers(0, 20), st.floats(1.0, 8.0), st.floats(1.0, 3.0), st.floats(0.0, 1.0))
    def test_shares_are_what_trying_all_finds(
        self, decodes: int, decode_slack: float, prefill_slack: float, used: float
    ) -> None:
        policy = Nexus(100, decode_slack=decode_slack, prefill_slack=prefill_slack)
        running = [decoding(number, 50) for number in range(decodes)]
        found = policy.plan(known(*running, used=used)).prefill_share
        if not decodes:
            assert found == 50
        elif used < 0.7:
            assert found == best_by_trying(
                lambda share: linear_cost(decodes + (100 - share if share < 100 else 0)),
                decode_slack,
            )
        else:
            assert found == 100 - best_by_trying(
                lambda share: linear_cost((decodes if share < 100 else 0) + share) / share,
                prefill_slack,
            )

    def test_the_estimate_grows_with_the_prompt_s_context(self) -> None:
        def seconds(rows: int, keys: float) -> float:
            return 0.005 + 0.001 * rows + 1e-6 * rows * keys

        early = known(*DECODES, prefilling(20, 9000, 0), waiting=(), seconds=seconds)
        late = known(*DECODES, prefilling(20, 9000, 8000), waiting=(), seconds=seconds)
        first, last = (self.policy.plan(state).prefill_share for state in (early, late))
        assert first is not None
        assert last is not None
        assert last < first

    def test_a_phase_that_is_alone_has_everything(self) -> None:
        assert self.policy.plan(known()).rows == 100
        assert self.policy.plan(known(*DECODES, waiting=())).rows == 10
        assert self.policy.plan(known(waiting=())).rows == 0

    def test_without_costs_the_step_is_halved(self) -> None:
        assert self.policy.plan(known(*DECODES, seconds=None)).rows == 10 + 50

    def test_the_baseline_s_share_is_fixed(self) -> None:
        fixed = replace(self.policy, share=30)
        assert fixed.plan(known(*DECODES)).rows == 10 + 30
        assert fixed.plan(known(*DECODES, used=0.9)).rows == 10 + 30

    @pytest.mark.parametrize(("last", "applied"), [(40, 40), (50, 50), (39, 45), (51, 45)])
    def test_a_small_change_is_not_applied(self, last: int, applied: int) -> None:
        assert self.policy.plan(known(*DECODES, last=last)).prefill_share == applied


class TestHysteresis:
    def seconds(self, alone: float, rows: int, keys: float) -> float:
        return alone if rows <= 10 else linear_cost(rows)

    def shares(self, hysteresis: int) -> list[int]:
        chance = random.Random(1)
        policy = Nexus(100, hysteresis=hysteresis)
        last, found = None, []
        for _ in range(500):
            alone = 0.015 * chance.uniform(0.95, 1.05)  # moves the best share by about 3 points
            seconds = partial(self.seconds, alone)
            last = policy.plan(known(*DECODES, last=last, seconds=seconds)).prefill_share
            assert last is not None
            found.append(last)
        return found

    def test_noise_hardly_switches(self) -> None:
        def switches(shares: list[int]) -> int:
            return sum(before != after for before, after in pairwise(shares))

        steady, restless = self.shares(5), self.shares(0)
        assert switches(restless) > 300
        assert switches(steady) < 0.2 * switches(restless)
        gap, restless_gap = (mean(linear_cost(10 + each) for each in s) for s in (steady, restless))
        assert gap == pytest.approx(restless_gap, rel=0.05)


class Reactive(Nexus):
    """The baseline that follows what steps have taken, instead of what the next one will take."""

    def plan(self, state: ScheduleState) -> StepPlan:
        share = 50 if state.prefill_share is None else state.prefill_share
        if last := getattr(self, "last", None):
            began, decodes = last
            slow = state.now - began > self.decode_slack * linear_cost(decodes)
            share = max(share - 10, 10) if slow else min(share + 10, 90)
        plan = Nexus.plan(replace(self, share=share), state)
        object.__setattr__(self, "last", (state.now, max(len(plan.decodes), 1)))
        return plan


def percentile_95(values: Iterable[float]) -> float:
    ordered = sorted(values)
    return ordered[int(0.95 * len(ordered))]


class TestControl:
    """Bursts of prompts beside long answers: a chunk that follows the load, or a fixed one."""

    def jobs(self, seed: int = 5) -> list[Job]:
        chance = random.Random(seed)
        answers = [Job(0.0, 40, 400) for _ in range(3)]
        bursts = [
            Job(3.0 * burst + 0.01 * n, chance.choice((30, 60, 800)), chance.choice((10, 40)))
            for burst in range(8)
            for n in range(10)
        ]
        return [*answers, *bursts]

    def run(self, policy: SchedulerPolicy, seed: int = 5) -> list[Progress]:
        simulation = Simulation(policy, cost_is_known=True, max_running=40, lookahead=64)
        return simulation.run(self.jobs(seed))

    def longest_gap(self, jobs: list[Progress]) -> float:
        return max(gap for job in jobs for gap in job.gaps)

    def test_gaps_are_shorter_than_with_the_whole_budget(self) -> None:
        nexus = self.run(Nexus(256, 40, decode_slack=6.0))
        whole = self.run(SarathiServe(256, 40))
        assert self.longest_gap(nexus) < 0.7 * self.longest_gap(whole)

    def test_no_step_exceeds_the_slack_but_for_the_hysteresis(self) -> None:
        policy = Nexus(256, 40, decode_slack=6.0)
        simulation = Simulation(policy, cost_is_known=True, max_running=40, lookahead=64)
        simulation.run(self.jobs())
        for _, plan in simulation.plans:
            if plan.decodes and plan.rows > len(plan.decodes) + policy.chunk_rows(10):
                slack = 6.0 * linear_cost(len(plan.decodes))
                assert linear_cost(plan.rows) < slack + linear_cost(policy.chunk_rows(6))

    @pytest.mark.parametrize("seed", range(5))
    @pytest.mark.parametrize(
        "baseline", [SarathiServe(256, 40), Nexus(256, 40, share=50)], ids=["hybrid", "static"]
    )
    def test_the_whole_method_beats_a_fixed_chunk_in_both(
        self, baseline: SarathiServe, seed: int
    ) -> None:
        whole = OrderedAdmission(Nexus(256, 40, decode_slack=6.0), ShortestPromptFirst())
        ours, theirs = self.run(whole, seed), self.run(baseline, seed)
        assert mean_ttft(ours) < mean_ttft(theirs)
        gaps, their_gaps = ([gap for job in jobs for gap in job.gaps] for jobs in (ours, theirs))
        assert percentile_95(gaps) < percentile_95(their_gaps)

    @pytest.mark.parametrize("seed", range(5))
    def test_looking_ahead_bounds_gaps_that_a_reaction_comes_too_late_for(self, seed: int) -> None:
        ahead = self.run(Nexus(256, 40, decode_slack=6.0), seed)
        reactive = self.run(Reactive(256, 40, decode_slack=6.0), seed)
        assert self.longest_gap(ahead) < self.longest_gap(reactive)
        assert mean_ttft(ahead) < 1.05 * mean_ttft(reactive)

    def test_the_paper_s_order_lowers_the_mean_time_to_the_first_token(self) -> None:
        ordered = OrderedAdmission(Nexus(256, 40), ShortestPromptFirst())
        simulation = Simulation(ordered, cost_is_known=True, max_running=40)
        assert mean_ttft(simulation.run(self.jobs())) < mean_ttft(self.run(Nexus(256, 40)))

    def test_with_little_kv_fewer_are_preempted_than_without_the_switch(self) -> None:
        jobs = [Job(0.02 * n, 60, 90) for n in range(60)]
        preempted = {}
        for threshold in (0.7, 1.0):
            policy = Nexus(128, 40, decode_slack=8.0, prefill_slack=3.0, threshold=threshold)
            simulation = Simulation(
                policy, slots=2400, cost_is_known=True, max_running=40, lookahead=64
            )
            preempted[threshold] = sum(each.preemptions for each in simulation.run(jobs))
        assert preempted[0.7] < preempted[1.0]


class RandomShares(Nexus):
    """Chooses any share in any step."""

    def prefill_share(self, state: ScheduleState) -> int:
        return 1 + hash(tuple(each.computed for each in state.running)) % 99


def test_a_thousand_requests_are_answered_alike_whatever_the_shares_and_leave_no_slot() -> None:
    one = build_engine(ToyRunner(1024), max_running=24, batching=RandomShares(48, 24))
    chance = random.Random(3)
    prompts = [prompt(chance.randint(1, 60), seed=n % 300) for n in range(1000)]
    arrivals: dict[int, list[EngineRequest]] = {}
    for n, tokens in enumerate(prompts):
        answer = sampling(max_tokens=chance.randint(1, 8))
        arrivals.setdefault(n // 4, []).append(request(f"r{n}", tokens, answer))
    answers = serve(one, [], arrivals)
    assert len(answers) == 1000
    for n in range(0, 1000, 25):
        found = answers[f"r{n}", 0].tokens
        assert found == truth(prompts[n], len(found))
    assert one._queues.pool.available == one._queues.pool.slots.total


@pytest.mark.parametrize(
    "fields",
    [{"decode_slack": 0.9}, {"prefill_slack": float("nan")}, {"threshold": 1.1},
     {"hysteresis": -1}, {"share": 101}],
)  # fmt: skip
def test_settings_out_of_range_are_refused(fields: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Nexus(**fields)  # type: ignore[arg-type]
