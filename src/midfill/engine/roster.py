"""Roster: who runs, who waits, and who holds which KV slots."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from midfill.engine.cache_view import EngineCacheView
from midfill.engine.scheduler import (
    DraftView,
    RunningSequence,
    ScheduleState,
    WaitingSequence,
)
from midfill.engine.sequence import Sequence
from midfill.kv.pool import KVPool
from midfill.kv.sequence_kv import SequenceKV


class Roster:
    """All sequences of an engine. Whatever KV they computed stays cached when they let go of it.

    Attributes:
        pool: the KV slots.
        sequences: all of them by id.
        running: those that hold slots, in order of arrival.
        waiting: the queue, its head first.
        background: prompts to be cached when nothing else is there, oldest first.
    """

    def __init__(self, slots: int, max_running: int) -> None:
        """For a pool of ``slots``; at most ``max_running`` sequences hold some at a time."""
        self.pool = KVPool(slots)
        self.sequences: dict[int, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.background: deque[Sequence] = deque()
        self._max_running = max_running
        self._requests: dict[str, set[int]] = {}
        self._cache_view = EngineCacheView(self.pool, self.sequences)

    def __bool__(self) -> bool:
        """Whether there is anybody."""
        return bool(self.sequences)

    def __contains__(self, request_id: str) -> bool:
        """Whether a request has unfinished answers."""
        return request_id in self._requests

    def of(self, request_id: str) -> list[Sequence]:
        """The sequences of a request, in order of arrival."""
        return [self.sequences[one] for one in sorted(self._requests.get(request_id, ()))]

    def state(self, drafts: DraftView | None) -> ScheduleState:
        """What a policy may look at."""
        return ScheduleState(
            running=tuple(
                RunningSequence(
                    sequence.sequence_id, sequence.length, sequence.computed, sequence.decoding
                )
                for sequence in self.running
            ),
            waiting=_queued(self.waiting),
            available_slots=self.pool.available,
            cache=self._cache_view,
            background=_queued(self.background),
            drafts=drafts,
        )

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._enter(sequence)
        (self.background if sequence.background else self.waiting).append(sequence)

    def admit(self, sequence: Sequence) -> None:
        """Move a waiting sequence into the running set with what the cache holds of it."""
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.running.sort(key=_arrival)
        sequence.decoding = False
        self.open(sequence)

    def open(self, sequence: Sequence) -> None:
        """Let a sequence hold what the cache has of it."""
        sequence.kv = SequenceKV(self.pool, sequence.tenant, sequence.limit)
        # The last token has to run even if it is cached: its logits are what is wanted. (Not so
        # in the background, where a row more costs nobody anything.)
        sequence.computed = sequence.kv.open(sequence.tokens[:-1])
        if sequence.cached_tokens is None:
            sequence.cached_tokens = sequence.computed

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back to the front of the queue."""
        self.running.remove(sequence)
        self.release(sequence)
        self.waiting.appendleft(sequence)

    def release(self, sequence: Sequence, keep: bool = True) -> None:
        """Let go of a sequence's slots; without ``keep`` what is not shared already is lost."""
        if sequence.kv is not None:
            if keep:
                sequence.kv.close(sequence.computed_tokens)
            else:
                sequence.kv.drop()
        sequence.kv = None
        sequence.computed = 0

    def retire(self, sequence: Sequence, keep: bool = True) -> None:
        """Forget a sequence that has ended, wherever it is."""
        if sequence.background:
            self.background.remove(sequence)
        elif sequence.kv is not None:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self.release(sequence, keep)
        del self.sequences[sequence.sequence_id]
        siblings = self._requests[sequence.request_id]
        siblings.remove(sequence.sequence_id)
        if not siblings:
            del self._requests[sequence.request_id]

    def start_siblings(self, siblings: SequenceOf[Sequence]) -> None:
        """Start a request's other answers on the first one's KV; those without a place queue."""
        first, *others = siblings
        assert first.kv is not None
        first.answers = first.answers[:1]
        places = max(self._max_running - len(self.running), 0)
        for other in others:
            self._enter(other)
        for other in others[:places]:
            other.kv = first.kv.fork()
            other.computed = first.computed
            self.running.append(other)
        self.running.sort(key=_arrival)
        self.waiting.extendleft(reversed(others[places:]))

    def _enter(self, sequence: Sequence) -> None:
        self.sequences[sequence.sequence_id] = sequence
        self._requests.setdefault(sequence.request_id, set()).add(sequence.sequence_id)


def _arrival(sequence: Sequence) -> int:
    return sequence.sequence_id


def _queued(sequences: Iterable[Sequence]) -> tuple[WaitingSequence, ...]:
    return tuple(WaitingSequence(sequence.sequence_id, sequence.length) for sequence in sequences)
