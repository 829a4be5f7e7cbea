"""The baselines with whole prompts, and what Sarathi-Serve is for beside them."""

import random

import pytest
from schedule_states import CacheFacts, decoding, prefilling
from step_simulation import Job, Progress, Simulation

from midfill.engine.scheduling.policies.iteration_level import IterationLevel
from midfill.engine.scheduling.policies.prefill_first import PrefillFirst, WholePrompts
from midfill.engine.scheduling.policies.request_level import RequestLevel
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import Chunk, ScheduleState, StepPlan, WaitingSequence

WHOLE = [PrefillFirst, IterationLevel, RequestLevel]
TRACE = [Job(0.0, 20, 60) for _ in range(8)] + [Job(0.3, 2000, 4)]
DECODE_ONLY = 0.005 + 0.008  # seconds of a step of eight decodes


def mixed_jobs(count: int = 60) -> list[Job]:
    chance = random.Random(3)
    return [
        Job(0.02 * n, chance.choice((20, 80, 500)), chance.choice((5, 30, 80)))
        for n in range(count)
    ]


def longest_gap(jobs: list[Progress]) -> float:
    return max(gap for job in jobs[:8] for gap in job.gaps)


def end_of(jobs: list[Progress]) -> float:
    return max(job.token_times[-1] for job in jobs)


class TestPlans:
    waiting = (WaitingSequence(5, 100), WaitingSequence(6, 300))

    def plan(self, policy: WholePrompts, *running: object, slots: int = 1000) -> StepPlan:
        return policy.plan(
            ScheduleState(running, self.waiting, slots, CacheFacts(), max_rows=16)  # type: ignore[arg-type]
        )

    def test_prefill_first_leaves_the_decodes_out(self) -> None:
        assert self.plan(PrefillFirst(), decoding(1)) == StepPlan(
            admit=(Chunk(5, 100), Chunk(6, 300))
        )
        assert self.plan(PrefillFirst(), decoding(1), slots=50) == StepPlan(decodes=(1,))

    def test_iteration_level_runs_prompts_beside_the_decodes(self) -> None:
        made = self.plan(IterationLevel(), decoding(1))
        assert made == StepPlan(decodes=(1,), admit=(Chunk(5, 100), Chunk(6, 300)))

    def test_request_level_admits_when_nothing_runs(self) -> None:
        assert self.plan(RequestLevel(), decoding(1)) == StepPlan(decodes=(1,))
        assert self.plan(RequestLevel()).admit == (Chunk(5, 100), Chunk(6, 300))

    @pytest.mark.parametrize("kind", WHOLE)
    def test_a_step_has_no_more_prompt_tokens_than_allowed_or_one_prompt(
        self, kind: type[WholePrompts]
    ) -> None:
        assert self.plan(kind(prefill_tokens=399)).admit == (Chunk(5, 100),)
        assert self.plan(kind(prefill_tokens=20)).admit == (Chunk(5, 100),)

    @pytest.mark.parametrize("kind", WHOLE)
    def test_what_has_started_runs_on_as_a_whole(self, kind: type[WholePrompts]) -> None:
        assert self.plan(kind(), prefilling(1, 400, 30)).chunks == (Chunk(1, 370),)

    @pytest.mark.parametrize("kind", WHOLE)
    def test_a_step_of_no_tokens_is_refused(self, kind: type[WholePrompts]) -> None:
        with pytest.raises(ValueError, match="prefill_tokens must be at least 1"):
            kind(prefill_tokens=0)


class TestWhatSarathiServeIsFor:
    def test_a_long_prompt_stalls_no_running_answer(self) -> None:
        chunked = Simulation(SarathiServe(128, 16)).run(TRACE)
        assert longest_gap(chunked) == pytest.approx(0.005 + 0.128)
        for eager in (PrefillFirst(max_running=16), IterationLevel(max_running=16)):
            assert longest_gap(Simulation(eager).run(TRACE)) >= 2.0

    def test_every_running_decode_has_one_token_in_every_step(self) -> None:
        simulation = Simulation(SarathiServe(64, 16))
        simulation.run(mixed_jobs())
        admitted: list[int] = []
        for state, plan in simulation.plans:
            able = {each.sequence_id for each in state.running if each.decoding}
            assert set(plan.decodes) == able - set(plan.preempt)
            assert plan.rows <= max(64, len(plan.decodes))
            admitted += [chunk.sequence_id for chunk in plan.admit]
        assert admitted == sorted(admitted)

    def test_the_budget_trades_gaps_for_the_time_of_long_prompts(self) -> None:
        gaps, firsts = [], []
        for budget in (32, 128, 512):
            jobs = Simulation(SarathiServe(budget, 16)).run(TRACE)
            gaps.append(longest_gap(jobs))
            firsts.append(jobs[8].ttft)
        assert gaps == sorted(gaps)
        assert firsts == sorted(firsts, reverse=True)
        assert gaps[-1] > 5 * gaps[0]

    def test_it_takes_less_time_than_one_batch_after_the_other(self) -> None:
        jobs = mixed_jobs()
        chunked, batches = SarathiServe(128, 16), RequestLevel(128, 16)
        assert end_of(Simulation(chunked).run(jobs)) < 0.9 * end_of(Simulation(batches).run(jobs))

    def test_one_batch_after_the_other_stalls_no_answer_but_keeps_prompts_waiting(self) -> None:
        batches = Simulation(RequestLevel(max_running=16)).run(TRACE)
        assert longest_gap(batches) == pytest.approx(DECODE_ONLY)
        assert batches[8].ttft > Simulation(PrefillFirst(max_running=16)).run(TRACE)[8].ttft

    @pytest.mark.parametrize("kind", [SarathiServe, *WHOLE])
    def test_with_slots_for_a_part_of_the_load_the_latest_are_preempted_and_all_end(
        self, kind: type[SarathiServe]
    ) -> None:
        jobs = [Job(0.01 * n, 100, 60) for n in range(8)]
        simulation = Simulation(kind(64, 8), slots=8 * 160 * 6 // 10)
        done = simulation.run(jobs)
        assert all(len(each.token_times) == 60 for each in done)
        assert simulation.available == simulation.slots
        for state, plan in simulation.plans:
            arrivals = [each.sequence_id for each in state.running]
            assert sorted(plan.preempt) == arrivals[len(arrivals) - len(plan.preempt) :]
