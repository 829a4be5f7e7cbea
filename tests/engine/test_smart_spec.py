"""SmartSpec as a pure function: drafts where they raise goodput, out of what is left over."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from midfill.engine.policies.sarathi_serve import SarathiServe
from midfill.engine.policies.smart_spec import SmartSpec, draft_lengths
from midfill.engine.scheduler import (
    Chunk,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.kv.radix_cache import CachedPrefix


@dataclass(frozen=True)
class Cache:
    cached: dict[int, CachedPrefix] = field(default_factory=dict)

    def cached_prefix(self, sequence_id: int) -> CachedPrefix:
        return self.cached.get(sequence_id, CachedPrefix(0, 0))

    def common_prefix(self, first: int, second: int) -> int:
        return 0

    def released_by(self, victims: Sequence[int]) -> int:
        return 50 * len(victims)


@dataclass(frozen=True)
class Drafts:
    """Drafts of four tokens, with given chances, where a row costs a tenth of a step."""

    likely: float = 0.9
    row: float = 0.1
    asked: list[int] = field(default_factory=list)

    def chances(self, sequence_id: int) -> Sequence[float]:
        self.asked.append(sequence_id)
        return tuple(self.likely**count for count in range(1, 5))

    def seconds(self, rows: int, context: float) -> float:
        return 1.0 + self.row * (rows - 1)


def decoding(sequence_id: int, length: int = 50) -> RunningSequence:
    return RunningSequence(sequence_id, length, length - 1, True)


def plan(
    running: Sequence[RunningSequence] = (),
    waiting: Sequence[WaitingSequence] = (),
    *,
    drafts: Drafts | None,
    available: int = 1000,
    budget: int = 64,
    cache: Cache | None = None,
) -> StepPlan:
    state = ScheduleState(
        tuple(running), tuple(waiting), available, cache or Cache(), drafts=drafts
    )
    made = SmartSpec(SarathiServe(budget), budget).plan(state)
    ordinary = SarathiServe(budget).plan(state)
    assert StepPlan(made.preempt, made.decodes, made.chunks, made.admit) == ordinary
    return made


class TestWhoGetsDrafts:
    def test_decoding_sequences(self) -> None:
        made = plan([decoding(1)], drafts=Drafts())
        assert made.drafts == (Chunk(1, 4),)
        assert made.rows == 5

    def test_prompts_that_end_in_this_step(self) -> None:
        drafts = Drafts()
        made = plan(
            [RunningSequence(1, 30, 20, False), RunningSequence(2, 90, 20, False)],
            drafts=drafts,
            budget=40,
        )
        assert made.chunks == (Chunk(1, 10), Chunk(2, 30))
        assert drafts.asked == []  # the budget is spent
        made = plan([RunningSequence(1, 30, 20, False)], drafts=Drafts(), budget=40)
        assert made.drafts == (Chunk(1, 4),)

    def test_new_prompts_that_end_in_this_step(self) -> None:
        drafts = Drafts()
        cache = Cache({1: CachedPrefix(25, 25), 2: CachedPrefix(5, 0)})
        waiting = [WaitingSequence(1, 30), WaitingSequence(2, 400)]
        made = plan(waiting=waiting, drafts=drafts, budget=40, cache=cache)
        assert made.admit == (Chunk(1, 5), Chunk(2, 35))
        assert made.drafts == ()
        made = plan(waiting=waiting[:1], drafts=drafts, budget=40, cache=cache)
        assert (made.admit, made.drafts) == ((Chunk(1, 5),), (Chunk(1, 4),))
        assert drafts.asked == [1]

    def test_nobody_without_speculation(self) -> None:
        assert plan([decoding(1)], drafts=None).drafts == ()


class TestWhatIsLeft:
    @pytest.mark.parametrize(("available", "length"), [(1, 0), (2, 1), (3, 2), (100, 4)])
    def test_slots(self, available: int, length: int) -> None:
        made = plan([decoding(1)], drafts=Drafts(), available=available)
        assert sum(chunk.tokens for chunk in made.drafts) == length

    def test_slots_of_new_prompts_are_not_left(self) -> None:
        cache = Cache({2: CachedPrefix(20, 20)})
        made = plan(
            [decoding(1)],
            [WaitingSequence(2, 30)],
            drafts=Drafts(),
            available=1 + 30 + 2,
            cache=cache,
        )
        assert made.admit == (Chunk(2, 10),)
        assert sum(chunk.tokens for chunk in made.drafts) == 2

    @pytest.mark.parametrize(("budget", "length"), [(1, 0), (2, 1), (4, 3), (64, 4)])
    def test_budget(self, budget: int, length: int) -> None:
        made = plan([decoding(1)], drafts=Drafts(), budget=budget)
        assert sum(chunk.tokens for chunk in made.drafts) == length

    def test_nothing_in_a_step_that_preempts(self) -> None:
        drafts = Drafts()
        made = plan([decoding(1), decoding(2)], drafts=drafts, available=1)
        assert (made.preempt, made.decodes, made.drafts) == ((2,), (1,), ())
        assert drafts.asked == []


class TestGoodput:
    @pytest.mark.parametrize(
        ("likely", "row", "length"), [(0.9, 0.0, 4), (0.9, 0.1, 4), (0.6, 0.35, 1), (0.2, 0.3, 0)]
    )
    def test_dear_rows_and_unlikely_tokens_shorten_drafts(
        self, likely: float, row: float, length: int
    ) -> None:
        made = plan([decoding(1)], drafts=Drafts(likely, row))
        assert sum(chunk.tokens for chunk in made.drafts) == length

    def test_with_many_sequences_fewer_drafts_pay(self) -> None:
        lengths = []
        for count in (1, 2, 4, 8, 16):
            made = plan([decoding(index) for index in range(count)], drafts=Drafts(0.6, 0.2))
            lengths.append(sum(chunk.tokens for chunk in made.drafts) / count)
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[0] >= 1
        assert lengths[-1] == 0

    def test_the_likeliest_come_first(self) -> None:
        lengths = draft_lengths(
            {1: (0.5, 0.4), 2: (0.9, 0.8, 0.1), 3: ()},
            rows=3,
            progress=3,
            seconds=lambda rows: 1.0,
            room=4,
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
            room=room,
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
