"""Retention: keeps the KV of programs between their requests, as long as a policy says."""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

from midfill.engine.scheduling.programs import FinishedTurn, Programs
from midfill.engine.scheduling.scheduler import Pin, ProgramId, ScheduleState
from midfill.engine.sequences.request_queues import RequestQueues
from midfill.engine.sequences.sequence import Sequence
from midfill.kv.radix_cache import RadixNode


@runtime_checkable
class RetentionPolicy(Protocol):
    """Decides how long KV is kept between a program's requests."""

    @property
    def max_pinned(self) -> float:
        """Share of the KV pool that may be kept."""

    def time_to_live(self, turn: FinishedTurn) -> float:
        """Return for how many seconds a turn's KV is kept; 0 leaves it to the cache."""

    def release(self, state: ScheduleState) -> tuple[ProgramId, ...]:
        """Return whose KV is kept no longer; asked again until there are none."""


class _PinnedKv(NamedTuple):
    """A locked path of the prefix cache."""

    node: RadixNode
    deadline: float
    program_arrived: float


class Retention:
    """Pins the KV of finished turns in the prefix cache, and releases it.

    Only exact KV is pinned: what a method has left is its own. A pin that is there when the
    program's next request is admitted has done its work; the request has locked what it shares.

    Args:
        policy: decides for how long KV is kept, and what is released when slots are missing.
        programs: what is known of the programs.
        tool_of: returns the name of the tool that a sequence's answer calls; "" if it calls none.
    """

    def __init__(
        self, policy: RetentionPolicy, programs: Programs, tool_of: Callable[[Sequence], str]
    ) -> None:
        self._policy = policy
        self._programs = programs
        self._tool_of = tool_of
        self._pins: dict[ProgramId, _PinnedKv] = {}

    def __len__(self) -> int:
        """Number of pins."""
        return len(self._pins)

    @property
    def next_deadline(self) -> float | None:
        """When the first pin is due; None if there is none."""
        return min((pin.deadline for pin in self._pins.values()), default=None)

    def pinned_slots(self, queues: RequestQueues) -> int:
        """Return how many slots would become available if all pins were released."""
        return queues.pool.cache.released_by(pin.node for pin in self._pins.values())

    def record_arrival(self, program: ProgramId, now: float) -> float:
        """Note that a program's request has arrived; return when its first one did."""
        return self._programs.record_arrival(program, now)

    def record_admission(self, queues: RequestQueues, sequence: Sequence, now: float) -> None:
        """Note that a sequence was admitted, and release what was pinned for it."""
        program = sequence.hints.program
        if program is None:
            return
        pinned = self._release(queues, program)
        self._programs.record_admission(program, now - sequence.arrived, retained=pinned)

    def record_step(self, rows: int, keys: float, seconds: float) -> None:
        """Learn from the time that a step took; see ``StepCost.observe``."""
        self._programs.cost.record_step(rows, keys, seconds)

    def finish_turn(
        self, queues: RequestQueues, sequence: Sequence, now: float, *, complete: bool
    ) -> None:
        """Pin what a finished sequence has left in the cache, if that pays.

        Args:
            queues: what the sequence was in.
            sequence: it has released its slots.
            now: the time.
            complete: whether its answer ended by itself; otherwise no tool was called.
        """
        program = sequence.hints.program
        if program is None:
            return
        tool = self._tool_of(sequence) if complete else ""
        computed = sequence.length - 1
        last = sequence.hints.last_step
        turn = self._programs.finish_turn(program, tool, computed, now, last_step=last)
        self._release(queues, program)
        if turn is None or not sequence.method.is_null or not isinstance(sequence.cache_root, str):
            return
        time_to_live = self._policy.time_to_live(turn)
        if time_to_live <= 0.0:
            return
        cache = queues.pool.cache
        node = cache.match(sequence.cache_root, sequence.tokens[:computed]).node
        if node is None:
            return
        cache.lock(node)
        arrived = sequence.hints.program_arrived
        self._pins[program] = _PinnedKv(node, now + time_to_live, arrived)
        if self.pinned_slots(queues) > self._policy.max_pinned * queues.pool.slots.total:
            self._release(queues, program)

    def is_due(self, now: float) -> bool:
        """Whether a pin's time is over."""
        deadline = self.next_deadline
        return deadline is not None and deadline <= now

    def release(self, queues: RequestQueues, state: ScheduleState) -> ScheduleState:
        """Release the pins that the policy names; return the state as it is then, with all pins.

        Args:
            queues: what ``state`` was made of.
            state: a state without pins.
        """
        if not self._pins:
            return state
        state = replace(state, pins=self._described(queues, state.now))
        while released := self._policy.release(state):
            for program in released:
                self._release(queues, program)
            pins = self._described(queues, state.now)
            state = replace(queues.state(state.now), pins=pins)
        return state

    def _described(self, queues: RequestQueues, now: float) -> tuple[Pin, ...]:
        queued: set[ProgramId | None] = set()
        if self.is_due(now):
            queued = {each.hints.program for each in (*queues.waiting, *queues.loading)}
        cache = queues.pool.cache
        return tuple(
            Pin(
                program,
                pin.deadline,
                pin.program_arrived,
                cache.released_by([pin.node]),
                pin.deadline <= now and program in queued,
            )
            for program, pin in self._pins.items()
        )

    def _release(self, queues: RequestQueues, program: ProgramId) -> bool:
        """Release a program's pin; return whether there was one."""
        pin = self._pins.pop(program, None)
        if pin is not None:
            queues.pool.cache.unlock(pin.node)
        return pin is not None
