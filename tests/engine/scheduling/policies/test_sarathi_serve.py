"""SarathiServe as a pure function: plans for states, without a model."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding, prefilling

from midfill.engine.scheduling.policies.sarathi_serve import MAX_BUDGET, SarathiServe
from midfill.engine.scheduling.scheduler import (
    Chunk,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.kv.radix_cache import CachedPrefix


def plan(
    policy: SarathiServe,
    running: Sequence[RunningSequence] = (),
    waiting: Sequence[tuple[int, int]] = (),
    available: int = 10_000,
    cache: CacheFacts | None = None,
) -> StepPlan:
    queue = tuple(WaitingSequence(*one) for one in waiting)
    return policy.plan(ScheduleState(tuple(running), queue, available, cache or CacheFacts()))


@st.composite
def states(draw: st.DrawFn) -> ScheduleState:
    running = []
    held = {}
    for sequence_id in range(draw(st.integers(0, 6))):
        length = draw(st.integers(1, 40))
        if draw(st.booleans()):
            running.append(decoding(sequence_id, length))
        else:
            running.append(prefilling(sequence_id, length, draw(st.integers(0, length - 1))))
        held[sequence_id] = draw(st.integers(0, length))
    waiting = []
    cached = {}
    for sequence_id in range(10, 10 + draw(st.integers(0, 4))):
        length = draw(st.integers(1, 60))
        waiting.append(WaitingSequence(sequence_id, length))
        matched = draw(st.integers(0, length - 1))
        cached[sequence_id] = CachedPrefix(matched, draw(st.integers(0, matched)))
    common = draw(
        st.dictionaries(st.tuples(st.integers(10, 13), st.integers(0, 13)), st.integers(0, 60))
    )
    view = CacheFacts(cached, common, held)
    return ScheduleState(tuple(running), tuple(waiting), draw(st.integers(0, 80)), view)


class TestBudget:
    def test_decodes_first_then_started_prompts_then_new_ones(self) -> None:
        made = plan(
            SarathiServe(token_budget=100),
            [decoding(1), decoding(2), prefilling(3, 60, 20)],
            [(4, 30), (5, 200)],
        )
        assert made.decodes == (1, 2)
        assert made.chunks == (Chunk(3, 40),)
        assert made.admit == (Chunk(4, 30), Chunk(5, 28))
        assert made.rows == 100

    def test_decodes_alone_may_exceed_it_and_leave_no_negative_chunk(self) -> None:
        running = [*(decoding(index) for index in range(6)), prefilling(6, 50)]
        made = plan(SarathiServe(token_budget=4), running, [(7, 10)])
        assert made == StepPlan(decodes=(0, 1, 2, 3, 4, 5))

    def test_a_budget_of_one_still_moves_a_prompt(self) -> None:
        made = plan(SarathiServe(token_budget=1), [prefilling(1, 50, 7), prefilling(2, 50)])
        assert made == StepPlan(chunks=(Chunk(1, 1),))

    def test_cached_tokens_do_not_count(self) -> None:
        cache = CacheFacts(cached={1: CachedPrefix(500, 0)})
        made = plan(SarathiServe(token_budget=16), waiting=[(1, 510), (2, 30)], cache=cache)
        assert made.admit == (Chunk(1, 10), Chunk(2, 6))

    @pytest.mark.parametrize(("most", "tokens"), [(40, 40), (500, 100), (None, 100)])
    def test_slow_steps_have_fewer_rows(self, most: int | None, tokens: int) -> None:
        queue = (WaitingSequence(1, 300),)
        state = ScheduleState((), queue, 10_000, CacheFacts(), max_rows=most)
        assert SarathiServe(token_budget=100).plan(state).admit == (Chunk(1, tokens),)

    @pytest.mark.parametrize("field", ["token_budget", "max_running"])
    def test_sizes_below_one_are_refused(self, field: str) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            SarathiServe(**{field: 0})


class TestAdmission:
    def test_needs_slots_for_the_whole_prompt(self) -> None:
        policy = SarathiServe(token_budget=16)
        assert plan(policy, waiting=[(1, 100)], available=99).admit == ()
        assert plan(policy, waiting=[(1, 100)], available=100).admit == (Chunk(1, 16),)

    def test_no_sequence_overtakes_a_head_that_does_not_fit(self) -> None:
        assert plan(SarathiServe(), waiting=[(1, 100), (2, 5)], available=50).admit == ()

    def test_a_cached_prefix_needs_no_slots_but_is_no_longer_evictable(self) -> None:
        cache = CacheFacts(cached={1: CachedPrefix(80, 30)})
        policy = SarathiServe()
        assert plan(policy, waiting=[(1, 100)], available=49, cache=cache).admit == ()
        made = plan(policy, waiting=[(1, 100)], available=50, cache=cache)
        assert made.admit == (Chunk(1, 20),)

    def test_no_more_run_than_max_running(self) -> None:
        policy = SarathiServe(max_running=3)
        made = plan(policy, [decoding(1), decoding(2)], [(3, 5), (4, 5)])
        assert made.admit == (Chunk(3, 5),)

    def test_a_sequence_waits_for_a_prompt_that_computes_its_prefix(self) -> None:
        policy = SarathiServe(token_budget=100)
        shared = CacheFacts(common={(2, 1): 40})
        made = plan(policy, [prefilling(1, 50)], [(2, 60)], cache=shared)
        assert made == StepPlan(chunks=(Chunk(1, 50),))
        # The same holds for one admitted in this very step, ...
        made = plan(policy, waiting=[(1, 50), (2, 60)], cache=shared)
        assert made.admit == (Chunk(1, 50),)
        # ... but not for a common start of a few tokens, or one that is cached already.
        few = CacheFacts(common={(2, 1): 3})
        assert len(plan(policy, waiting=[(1, 50), (2, 60)], cache=few).admit) == 2
        done = CacheFacts(common={(2, 1): 40}, cached={2: CachedPrefix(40, 0)})
        assert len(plan(policy, waiting=[(1, 50), (2, 60)], cache=done).admit) == 2


class TestShortPromptsBesideLongOnes:
    policy = SarathiServe(token_budget=100, short_share=0.5)

    def test_a_keystroke_does_not_wait_for_a_long_prompt(self) -> None:
        made = plan(self.policy, [prefilling(1, 2000)], [(2, 12)])
        assert made.chunks == (Chunk(1, 88),)
        assert made.admit == (Chunk(2, 12),)

    def test_the_long_prompt_keeps_its_part_however_many_there_are(self) -> None:
        running = [decoding(0), decoding(1), prefilling(2, 2000), prefilling(3, 300)]
        made = plan(self.policy, running, [(4, 40), (5, 40)])
        assert made.chunks == (Chunk(2, 25), Chunk(3, 24))
        assert made.admit == (Chunk(4, 40), Chunk(5, 9))
        assert made.rows == 100

    @given(
        st.integers(1, 200),
        st.sampled_from([0.25, 0.5, 0.9]),
        st.integers(100, 1000),
        st.integers(4, 20),
        st.lists(st.floats(0.08, 0.25), max_size=12),  # none much shorter than another
        st.integers(0, 12),
    )
    def test_keystrokes_do_not_keep_a_prompt_waiting_behind_a_much_longer_one(
        self, budget: int, share: float, length: int, factor: int, typed: list[float], started: int
    ) -> None:
        keystrokes = [int(part * length) for part in typed]
        running = [prefilling(0, factor * length), prefilling(1, length)]
        running += [prefilling(2 + at, one) for at, one in enumerate(keystrokes[:started])]
        waiting = [(20 + at, one) for at, one in enumerate(keystrokes[started:])]
        made = plan(SarathiServe(budget, short_share=share), running, waiting)
        rows = {chunk.sequence_id: chunk.tokens for chunk in (*made.chunks, *made.admit)}
        considered = sum(keystrokes[:started]) + sum(keystrokes[started:][:8])
        theirs = min(considered, int(share * budget))
        assert rows[0] >= 1
        assert rows.get(1, 0) >= min(length, int(share * (budget - theirs)))
        assert sum(rows.values()) - rows[0] - rows.get(1, 0) >= theirs

    def test_prompts_of_similar_length_keep_their_order(self) -> None:
        made = plan(self.policy, [prefilling(1, 400)], [(2, 101)])
        assert made == StepPlan(chunks=(Chunk(1, 100),))

    def test_a_long_prompt_at_the_queue_s_head_lets_a_keystroke_pass(self) -> None:
        made = plan(self.policy, waiting=[(1, 2000), (2, 12)])
        assert made.admit == (Chunk(1, 88), Chunk(2, 12))
        made = plan(self.policy, [prefilling(0, 2000)], [(1, 2000), (2, 12)])
        assert made.chunks == (Chunk(0, 88),)
        assert made.admit == (Chunk(1, 1), Chunk(2, 11))

    def test_cached_tokens_do_not_count(self) -> None:
        cache = CacheFacts(cached={2: CachedPrefix(1990, 0)})
        made = plan(self.policy, [prefilling(1, 2000)], [(2, 2000)], cache=cache)
        assert made.chunks == (Chunk(1, 90),)
        assert made.admit == (Chunk(2, 10),)

    def test_nothing_is_left_to_one_that_waits_for_the_long_prompt(self) -> None:
        shared = CacheFacts(common={(2, 1): 40})
        made = plan(self.policy, [prefilling(1, 2000)], [(2, 60)], cache=shared)
        assert made == StepPlan(chunks=(Chunk(1, 100),))

    def test_a_share_of_everything_is_refused(self) -> None:
        with pytest.raises(ValueError, match="short_share"):
            SarathiServe(short_share=1.0)

    @settings(max_examples=200, deadline=None)
    @given(st.data(), st.integers(1, 50), st.sampled_from([0.25, 0.5, 0.9]))
    def test_no_step_exceeds_the_budget_and_all_its_chunks_fit(
        self, data: st.DataObject, budget: int, share: float
    ) -> None:
        state = data.draw(states())
        made = SarathiServe(token_budget=budget, max_running=8, short_share=share).plan(state)
        alone = SarathiServe(token_budget=budget, max_running=8).plan(state)
        assert (made.preempt, made.decodes) == (alone.preempt, alone.decodes)
        assert made.rows <= max(budget, len(made.decodes))
        assert bool(made.rows) == bool(alone.rows)
        by_id = {one.sequence_id: one for one in state.running}
        assert all(1 <= tokens <= by_id[one].remaining for one, tokens in made.chunks)
        waiting = [one.sequence_id for one in state.waiting]
        admitted = [chunk.sequence_id for chunk in made.admit]
        assert admitted == waiting[: len(admitted)], "the queue keeps its order"
        available = state.available_slots - len(made.decodes)
        for one in state.waiting[: len(admitted)]:
            available -= one.needs(state.cache.cached_prefix(one.sequence_id))
        assert not admitted or available >= 0


class TestGap:
    """The budget follows from what steps cost: here 5 ms, and 1 ms per row."""

    def budget(self, gap: float, *running: RunningSequence, known: bool = True) -> int:
        made = SarathiServe(token_budget=100, gap=gap).plan(
            ScheduleState(
                running,
                (WaitingSequence(9, 5000),),
                10_000,
                CacheFacts(),
                max_rows=40,
                step_seconds=(lambda rows, keys: 0.005 + 0.001 * rows) if known else None,
            )
        )
        return made.rows

    def test_a_step_takes_no_longer(self) -> None:
        assert self.budget(0.05) == pytest.approx(45, abs=1)
        assert self.budget(0.05, decoding(1), decoding(2)) == pytest.approx(45, abs=1)
        assert self.budget(1.0) == pytest.approx(995, abs=1)

    def test_it_has_an_end(self) -> None:
        assert self.budget(1000.0) == MAX_BUDGET

    def test_prompts_go_on_where_no_step_is_short_enough(self) -> None:
        assert self.budget(0.001) == 4
        decodes = [decoding(number) for number in range(8)]
        assert self.budget(0.001, *decodes) == 8 + 4

    def test_before_costs_are_known_the_budget_is_the_given_one(self) -> None:
        assert self.budget(0.05, known=False) == 100

    @pytest.mark.parametrize("gap", [-1.0, float("nan"), float("inf")])
    def test_what_is_no_time_is_refused(self, gap: float) -> None:
        with pytest.raises(ValueError, match="gap must be a number of seconds"):
            SarathiServe(gap=gap)


class TestPreemption:
    def test_the_latest_arrival_is_preempted(self) -> None:
        cache = CacheFacts(held={3: 20})
        running = [decoding(1), decoding(2), decoding(3)]
        made = plan(SarathiServe(), running, available=1, cache=cache)
        assert made == StepPlan(preempt=(3,), decodes=(1, 2))

    def test_as_many_as_necessary_latest_first(self) -> None:
        cache = CacheFacts(held={4: 0, 3: 1})
        running = [decoding(index) for index in range(5)]
        made = plan(SarathiServe(), running, available=2, cache=cache)
        assert made == StepPlan(preempt=(4, 3), decodes=(0, 1, 2))

    def test_a_prompt_in_prefill_is_preempted_before_earlier_decodes(self) -> None:
        cache = CacheFacts(held={2: 30})
        made = plan(SarathiServe(), [decoding(1), prefilling(2, 40)], available=0, cache=cache)
        assert made == StepPlan(preempt=(2,), decodes=(1,))

    def test_a_decode_without_later_arrivals_is_preempted_itself(self) -> None:
        running = [prefilling(1, 40), decoding(2)]
        made = plan(
            SarathiServe(token_budget=8), running, available=0, cache=CacheFacts(held={2: 9})
        )
        assert made == StepPlan(preempt=(2,), chunks=(Chunk(1, 8),))

    def test_no_sequence_is_admitted_in_the_same_step(self) -> None:
        cache = CacheFacts(held={2: 30})
        made = plan(SarathiServe(), [decoding(1), decoding(2)], [(3, 5)], 1, cache)
        assert made.preempt == (2,)
        assert made.admit == ()


@settings(max_examples=400, deadline=None)
@given(states(), st.integers(1, 50), st.integers(1, 8))
def test_every_plan_keeps_the_invariants(
    state: ScheduleState, budget: int, max_running: int
) -> None:
    policy = SarathiServe(token_budget=budget, max_running=max_running)
    made = policy.plan(state)
    assert made == policy.plan(state), "a pure function"
    by_id = {one.sequence_id: one for one in state.running}
    waiting = {one.sequence_id: one for one in state.waiting}
    ids = [one.sequence_id for one in state.running]

    # Victims are the latest arrivals, latest first; every decode that stays runs.
    assert list(made.preempt) == ids[::-1][: len(made.preempt)]
    staying = [one for one in state.running if one.sequence_id not in made.preempt]
    assert made.decodes == tuple(one.sequence_id for one in staying if one.decoding)
    # No stall: only lack of slots preempts.
    if state.available_slots >= sum(one.decoding for one in state.running):
        assert made.preempt == ()

    assert made.rows <= max(budget, len(made.decodes))
    for chunk in made.chunks:
        assert 1 <= chunk.tokens <= by_id[chunk.sequence_id].remaining
        assert not by_id[chunk.sequence_id].decoding
    for chunk in made.admit:
        cached = state.cache.cached_prefix(chunk.sequence_id).tokens
        assert 1 <= chunk.tokens <= waiting[chunk.sequence_id].length - cached

    # First come, first served: chunks and admissions are prefixes of their queues, and only the
    # last chunk of a step is cut short.
    started = [one.sequence_id for one in staying if not one.decoding]
    assert [chunk.sequence_id for chunk in made.chunks] == started[: len(made.chunks)]
    assert [chunk.sequence_id for chunk in made.admit] == list(waiting)[: len(made.admit)]
    if made.admit:
        assert len(made.chunks) == len(started)
    for chunk in made.chunks[:-1]:
        assert chunk.tokens == by_id[chunk.sequence_id].remaining

    # No more slots are allocated than are available.
    spent = len(made.decodes) + sum(
        waiting[chunk.sequence_id].length
        - state.cache.cached_prefix(chunk.sequence_id).tokens
        + state.cache.cached_prefix(chunk.sequence_id).evictable
        for chunk in made.admit
    )
    assert spent <= state.available_slots + state.cache.released_by(made.preempt)
    assert len(staying) + len(made.admit) <= max(max_running, len(staying))

    # A running sequence always makes progress.
    if staying:
        assert made.rows > 0
