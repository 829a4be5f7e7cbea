"""Sarathi: the paper's laws of a batch, its balance of prompts and answers, and its pipelines."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding, prefilling
from step_simulation import Job, Progress, Simulation
from toy_engine import prompt, sampling
from toy_runner import LAYERS, ToyRunner

from midfill.arrays import Float32Array
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import scheduler_policy
from midfill.engine.scheduling.policies.iteration_level import IterationLevel
from midfill.engine.scheduling.policies.request_level import RequestLevel
from midfill.engine.scheduling.policies.sarathi import Sarathi
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import (
    Chunk,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.runners.forward.batch import ForwardBatch
from serving import request


def plan(
    policy: SarathiServe,
    *running: RunningSequence,
    waiting: Sequence[int] = (),
    slots: int = 10_000,
) -> StepPlan:
    queue = tuple(WaitingSequence(100 + n, length) for n, length in enumerate(waiting))
    return policy.plan(ScheduleState(running, queue, slots, CacheFacts(), max_rows=7))


class TestBatches:
    policy = Sarathi(token_budget=128, max_running=8, tile=32)

    def test_a_chunk_takes_what_the_decodes_leave_of_the_tiles(self) -> None:
        made = plan(self.policy, decoding(0), decoding(1), prefilling(2, 500))
        assert made == StepPlan(decodes=(0, 1), chunks=(Chunk(2, 126),))

    def test_a_prompt_is_finished_before_the_next_one_starts(self) -> None:
        made = plan(self.policy, prefilling(2, 500, 490), waiting=[300])
        assert made == StepPlan(chunks=(Chunk(2, 10),))
        assert plan(self.policy, waiting=[20, 300]).admit == (Chunk(100, 20),)

    def test_decodes_that_fill_the_tiles_leave_a_part_of_the_next_one(self) -> None:
        decodes = [decoding(number) for number in range(64)]
        made = plan(Sarathi(64, 100, tile=32), *decodes, prefilling(64, 500))
        assert made.rows == 96
        assert made.chunks == (Chunk(64, 32),)

    def test_no_more_requests_run_than_allowed(self) -> None:
        decodes = [decoding(number) for number in range(8)]
        assert plan(self.policy, *decodes, waiting=[20]).admit == ()
        assert plan(Sarathi(128, 1), decoding(0), waiting=[20]) == StepPlan(decodes=(0,))

    def test_a_prompt_that_does_not_fit_waits(self) -> None:
        assert plan(self.policy, waiting=[300, 20], slots=200).rows == 0

    def test_a_tile_of_no_rows_is_refused(self) -> None:
        with pytest.raises(ValueError, match="tile must be at least 1"):
            Sarathi(tile=0)

    @settings(max_examples=60, deadline=None)
    @given(
        st.lists(
            st.tuples(st.integers(0, 40), st.integers(1, 400), st.integers(1, 30)),
            min_size=1, max_size=20,
        ),
        st.integers(1, 9), st.sampled_from([1, 16, 32]),
    )  # fmt: skip
    def test_every_step_keeps_the_laws(
        self, jobs: list[tuple[int, int, int]], most: int, tile: int
    ) -> None:
        simulation = Simulation(Sarathi(64, most, tile=tile), max_running=most)
        done = simulation.run([Job(n / 20, prompt, answer) for n, prompt, answer in jobs])
        assert all(len(each.token_times) == each.job.answer for each in done)
        for state, made in simulation.plans:
            chunks = (*made.chunks, *made.admit)
            assert len(chunks) <= 1
            decoding_now = [each.sequence_id for each in state.running if each.decoding]
            assert list(made.decodes) == decoding_now
            assert len(made.decodes) <= (most - 1 if chunks else most)
            left = {each.sequence_id: each.remaining for each in state.running}
            left |= {each.sequence_id: each.length for each in state.waiting}
            if chunks and chunks[0].tokens < left[chunks[0].sequence_id]:
                assert made.rows % tile == 0


def saturating_cost(rows: int) -> float:
    """Seconds of a step: reading the weights takes as long as computing 64 rows."""
    return 0.001 * max(rows, 64)


def end_of(jobs: Sequence[Progress]) -> float:
    return max(job.token_times[-1] for job in jobs)


class TestBalance:
    """Chunks of 128 rows, 8 requests: all decodes can ride where P : D is about 128 / 7."""

    def gain_and_coverage(self, answer: int) -> tuple[float, float]:
        jobs = [Job(0.0, 1024, answer) for _ in range(40)]
        batches = Simulation(
            RequestLevel(128, 8, prefill_tokens=10**6),
            max_running=8, cost=saturating_cost, slots=10**6,
        )  # fmt: skip
        riding = Simulation(Sarathi(128, 8), max_running=8, cost=saturating_cost, slots=10**6)
        gain = end_of(batches.run(jobs)) / end_of(riding.run(jobs))
        decoded = sum(len(made.decodes) for _, made in riding.plans)
        rode = sum(len(made.decodes) for _, made in riding.plans if made.chunks or made.admit)
        return gain, rode / decoded

    def test_the_gain_is_largest_where_all_decodes_ride(self) -> None:
        ratios = (2, 6, 16, 40, 200)
        found = {ratio: self.gain_and_coverage(1024 // ratio) for ratio in ratios}
        gains = [found[ratio][0] for ratio in ratios]
        assert max(gains) == found[16][0] > 1.2
        assert gains[0] < gains[1] < gains[2] > gains[3] > gains[4]
        assert found[16][1] > 0.8
        assert found[2][1] < 0.5


class CountingRunner(ToyRunner):
    """Counts its passes."""

    passes = 0

    def forward(self, batch: ForwardBatch) -> Float32Array:
        self.passes += 1
        return super().forward(batch)


def test_decodes_ride_in_the_pass_of_the_chunk() -> None:
    runner = CountingRunner(400)
    options = ModelOptions(scheduler="sarathi:tile=8", token_budget=16, max_running=4)
    policy = scheduler_policy(options, LAYERS)
    engine = Engine(runner, (), EngineOptions(max_running=4), policy=policy)
    for number in range(6):
        engine.add(request(f"{number}", prompt(30 + number, number), sampling()))
    while engine.has_work():
        engine.step()
    assert runner.passes == engine.stats().steps
    assert engine.stats().computed_tokens > 2 * runner.passes


class TestKeysReadAgain:
    @pytest.mark.parametrize("chunk", [16, 64, 128])
    def test_chunk_j_reads_what_j_chunks_have_computed(self, chunk: int) -> None:
        simulation = Simulation(Sarathi(chunk, 4, tile=chunk))
        simulation.run([Job(0.0, 640, 1)])
        read = sum(each.computed for state, _ in simulation.plans for each in state.running)
        assert read == sum(chunk * j for j in range(640 // chunk))


class TestPipelines:
    """The paper's bubbles, of micro-batches on ``STAGES`` stages of equal length."""

    STAGES = 4

    def bubbles(self, seconds: Sequence[float]) -> float:
        """Return for how long stages stand still between two micro-batches, all together."""
        finished = [0.0] * self.STAGES
        idle = 0.0
        for number, duration in enumerate(seconds):
            before = 0.0
            for stage in range(self.STAGES):
                start = max(before, finished[stage])
                idle += start - finished[stage] if number else 0.0
                before = finished[stage] = start + duration / self.STAGES
        return idle

    def naive_bubbles(self, seconds: Sequence[float]) -> float:
        """Return the same, from each start and finish by its definition."""
        finish: dict[tuple[int, int], float] = {}
        starts: dict[tuple[int, int], float] = {}
        for batch, duration in enumerate(seconds):
            for stage in range(self.STAGES):
                earlier = (finish.get((stage - 1, batch), 0.0), finish.get((stage, batch - 1), 0.0))
                starts[stage, batch] = max(earlier)
                finish[stage, batch] = max(earlier) + duration / self.STAGES
        batches = range(len(seconds))
        return sum(
            starts[stage, after] - finish[stage, before]
            for stage in range(self.STAGES)
            for before, after in pairwise(batches)
        )

    @given(st.lists(st.floats(0.01, 5.0), min_size=1, max_size=30))
    def test_the_formula_is_its_definition(self, seconds: list[float]) -> None:
        assert self.bubbles(seconds) == pytest.approx(self.naive_bubbles(seconds), abs=1e-9)

    def test_equal_batches_leave_none(self) -> None:
        assert self.bubbles([0.7] * 20) == pytest.approx(0.0, abs=1e-9)

    def test_chunks_leave_far_fewer_than_whole_prompts(self) -> None:
        chance = random.Random(7)
        lengths = [min(1024, int(128 / chance.random() ** 0.8)) for _ in range(60)]
        jobs = [Job(0.0, length, chance.randint(5, 60)) for length in lengths]

        def idle(policy: SarathiServe) -> float:
            simulation = Simulation(policy, slots=10**6, max_running=8, cost=saturating_cost)
            simulation.run(jobs)
            return self.bubbles([saturating_cost(made.rows) for _, made in simulation.plans])

        whole = IterationLevel(128, 8, prefill_tokens=128)
        assert idle(Sarathi(128, 8)) < 0.4 * idle(whole)
