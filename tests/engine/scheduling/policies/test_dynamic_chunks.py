"""DynamicChunks: the first chunks of a prompt are the largest."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding, prefilling
from step_simulation import Job, Simulation

from midfill.engine.scheduling.policies.dynamic_chunks import DynamicChunks
from midfill.engine.scheduling.scheduler import Chunk, ScheduleState, WaitingSequence
from midfill.kv.radix_cache import CachedPrefix

POLICY = DynamicChunks(token_budget=128, smallest=32, stages=4, last_stage=3000)


def test_chunks_shrink_from_stage_to_stage() -> None:
    contexts = (0, 999, 1000, 2000, 2999, 3000, 100_000)
    sizes = [POLICY.chunk_size(context) for context in contexts]
    assert sizes == [128, 128, 96, 64, 64, 32, 32]


def test_other_rows_count_towards_a_chunk() -> None:
    running = (decoding(0), decoding(1), prefilling(2, 5000, 3100), prefilling(3, 5000, 0))
    state = ScheduleState(running, (), 10_000, CacheFacts())
    assert POLICY.plan(state).chunks == (Chunk(2, 30), Chunk(3, 96))


def test_a_cached_prefix_is_context() -> None:
    cache = CacheFacts(cached={1: CachedPrefix(3000, 0)})
    state = ScheduleState((), (WaitingSequence(1, 5000),), 10_000, cache)
    assert POLICY.plan(state).admit == (Chunk(1, 32),)


@given(
    st.integers(1, 300), st.integers(1, 300), st.integers(1, 9), st.integers(1, 5000),
    st.integers(0, 100_000),
)  # fmt: skip
def test_no_stage_is_out_of_range(
    budget: int, smallest: int, stages: int, last: int, computed: int
) -> None:
    policy = DynamicChunks(budget, smallest=smallest, stages=stages, last_stage=last)
    assert min(budget, smallest) <= policy.chunk_size(computed) <= budget
    assert policy.chunk_size(computed + 1) <= policy.chunk_size(computed)


def test_all_prompts_end() -> None:
    jobs = [Job(0.01 * n, 900 * n + 1, 20) for n in range(6)]
    done = Simulation(POLICY, slots=30_000).run(jobs)
    assert all(len(job.token_times) == 20 for job in done)


@pytest.mark.parametrize("field", ["smallest", "stages", "last_stage"])
def test_sizes_below_one_are_refused(field: str) -> None:
    with pytest.raises(ValueError, match="must be at least 1"):
        DynamicChunks(**{field: 0})
