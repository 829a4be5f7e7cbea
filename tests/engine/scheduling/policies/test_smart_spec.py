"""SmartSpec as a pure function: drafts where they raise goodput, within what a plan leaves."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding, prefilling

from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.policies.smart_spec import SmartSpec, draft_lengths
from midfill.engine.scheduling.scheduler import (
    Chunk,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
    sampled_sequences,
)
from midfill.kv.radix_cache import CachedPrefix


def plan(
    running: Sequence[RunningSequence] = (),
    waiting: Sequence[WaitingSequence] = (),
    *,
    rate: float = 0.9,
    row: float = 0.1,
    available: int = 1000,
    budget: int = 64,
    cache: CacheFacts | None = None,
) -> StepPlan:
    """Plan a step with drafts of four tokens for every sequence that is sampled.

    Args:
        running: see ``ScheduleState``, as the next.
        waiting: sequences in the queue.
        rate: probability that a drafted token is right if those before are.
        row: cost of a further row, in steps of one row.
        available: slots.
        budget: tokens per step.
        cache: what is cached.
    """

    def seconds(rows: int, context: float) -> float:
        return 1.0 + row * (rows - 1)

    facts = cache or CacheFacts(held=dict.fromkeys(range(10), 50))
    state = ScheduleState(tuple(running), tuple(waiting), available, facts)
    ordinary = SarathiServe(budget).plan(state)
    probabilities = {
        sequence_id: tuple(rate**count for count in range(1, 5))
        for sequence_id in sampled_sequences(state, ordinary)
    }
    policy = SmartSpec(budget)
    room = policy.max_draft_tokens(state, ordinary)
    made = policy.add_drafts(state, ordinary, probabilities, seconds, room)
    assert made == policy.add_drafts(state, ordinary, probabilities, seconds, room), "pure"
    assert replace(made, drafts=()) == ordinary, "the rest of the plan is unchanged"
    assert sum(chunk.tokens for chunk in made.drafts) <= max(room, 0)
    return made


class TestWhoGetsDrafts:
    def test_decoding_sequences(self) -> None:
        made = plan([decoding(1)])
        assert made.drafts == (Chunk(1, 4),)
        assert made.rows == 5

    def test_prompts_that_end_in_this_step(self) -> None:
        made = plan([prefilling(1, 30, 20), prefilling(2, 90, 20)], budget=40)
        assert made.chunks == (Chunk(1, 10), Chunk(2, 30))
        assert made.drafts == ()  # the budget is spent
        made = plan([prefilling(1, 30, 20)], budget=40)
        assert made.drafts == (Chunk(1, 4),)

    def test_new_prompts_that_end_in_this_step(self) -> None:
        cache = CacheFacts({1: CachedPrefix(25, 25), 2: CachedPrefix(5, 0)})
        waiting = [WaitingSequence(1, 30), WaitingSequence(2, 400)]
        made = plan(waiting=waiting, budget=40, cache=cache)
        assert made.admit == (Chunk(1, 5), Chunk(2, 35))
        assert made.drafts == ()
        made = plan(waiting=waiting[:1], budget=40, cache=cache)
        assert (made.admit, made.drafts) == ((Chunk(1, 5),), (Chunk(1, 4),))

    def test_not_unfinished_prompts(self) -> None:
        made = plan([decoding(1), prefilling(2, 200)], budget=40, row=0.0)
        assert made.chunks == (Chunk(2, 39),)
        made = plan([prefilling(2, 200)], [WaitingSequence(3, 100)], budget=90, row=0.0)
        assert (made.chunks, made.drafts) == ((Chunk(2, 90),), ())


class TestRoomForDrafts:
    @pytest.mark.parametrize(("available", "length"), [(1, 0), (2, 1), (3, 2), (100, 4)])
    def test_slots(self, available: int, length: int) -> None:
        made = plan([decoding(1)], available=available)
        assert sum(chunk.tokens for chunk in made.drafts) == length

    def test_slots_of_new_prompts_are_not_left(self) -> None:
        cache = CacheFacts({2: CachedPrefix(20, 20)})
        waiting = [WaitingSequence(2, 30)]
        made = plan([decoding(1)], waiting, available=1 + 30 + 2, cache=cache)
        assert made.admit == (Chunk(2, 10),)
        assert sum(chunk.tokens for chunk in made.drafts) == 2

    @pytest.mark.parametrize(("budget", "length"), [(1, 0), (2, 1), (4, 3), (64, 4)])
    def test_budget(self, budget: int, length: int) -> None:
        made = plan([decoding(1)], budget=budget)
        assert sum(chunk.tokens for chunk in made.drafts) == length

    def test_nothing_in_a_step_that_preempts(self) -> None:
        made = plan([decoding(1), decoding(2)], available=1)
        assert (made.preempt, made.decodes, made.drafts) == ((2,), (1,), ())


class TestGoodput:
    @pytest.mark.parametrize(
        ("rate", "row", "length"), [(0.9, 0.0, 4), (0.9, 0.1, 4), (0.6, 0.35, 1), (0.2, 0.3, 0)]
    )
    def test_expensive_rows_and_unlikely_tokens_shorten_drafts(
        self, rate: float, row: float, length: int
    ) -> None:
        made = plan([decoding(1)], rate=rate, row=row)
        assert sum(chunk.tokens for chunk in made.drafts) == length

    def test_with_many_sequences_fewer_drafts_pay(self) -> None:
        lengths = []
        for count in (1, 2, 4, 8, 16):
            made = plan([decoding(index) for index in range(count)], rate=0.6, row=0.2)
            lengths.append(sum(chunk.tokens for chunk in made.drafts) / count)
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] >= 1
        assert lengths[-1] == 0

    def test_the_most_likely_tokens_come_first(self) -> None:
        lengths = draft_lengths(
            {1: (0.5, 0.4), 2: (0.9, 0.8, 0.1), 3: ()},
            rows=3,
            progress=3,
            seconds=lambda rows: 1.0,
            max_tokens=4,
        )
        assert lengths == {1: 2, 2: 2}

    @given(
        st.lists(
            st.lists(st.floats(0.0, 1.0), max_size=3).map(
                lambda values: tuple(sorted(values, reverse=True))
            ),
            min_size=1,
            max_size=3,
        ),
        st.lists(st.floats(0.0, 1.0), min_size=16, max_size=16),
        st.integers(0, 5),
    )
    def test_no_other_choice_is_better(
        self, chances: list[tuple[float, ...]], growth: list[float], room: int
    ) -> None:
        times = [1.0, *itertools.accumulate(growth, initial=1.0)]

        def goodput(lengths: Sequence[int]) -> float:
            gained = sum(sum(own[:count]) for own, count in zip(chances, lengths, strict=True))
            return (len(chances) + gained) / seconds(len(chances) + sum(lengths))

        seconds: Callable[[int], float] = times.__getitem__
        chosen = draft_lengths(
            dict(enumerate(chances)),
            rows=len(chances),
            progress=len(chances),
            seconds=seconds,
            max_tokens=room,
        )
        assert all(count >= 1 for count in chosen.values())
        best = max(
            goodput(lengths)
            for lengths in itertools.product(*(range(len(own) + 1) for own in chances))
            if sum(lengths) <= room
        )
        assert goodput([chosen.get(index, 0) for index in range(len(chances))]) == pytest.approx(
            best
        )
