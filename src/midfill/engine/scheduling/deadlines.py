"""Deadlines: which requests nobody waits for any more."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from midfill.engine.request import EngineRequest

_MIN_ENTRIES = 64


class Deadline(NamedTuple):
    """When a request's client gives up.

    Attributes:
        time: by ``time.monotonic``.
        request_id: the request.
        whole: whether it waits for the whole answer then, and not only for the first token.
    """

    time: float
    request_id: str
    whole: bool


class Deadlines:
    """The deadlines of unfinished requests.

    Args:
        is_unfinished: whether a request is unfinished.
    """

    def __init__(self, is_unfinished: Callable[[str], bool]) -> None:
        self._is_unfinished = is_unfinished
        self._heap: list[Deadline] = []
        self._max_entries = _MIN_ENTRIES

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: EngineRequest) -> None:
        """Remember a request's deadline, if it has one."""
        if request.deadline is None:
            return
        whole = request.stream_interval == float("inf")
        heapq.heappush(self._heap, Deadline(request.deadline, request.request_id, whole))
        if len(self._heap) > self._max_entries:  # most requests end before their deadlines
            self._heap = [one for one in self._heap if self._is_unfinished(one.request_id)]
            heapq.heapify(self._heap)
            self._max_entries = max(2 * len(self._heap), _MIN_ENTRIES)

    def take_expired(self, now: float) -> list[Deadline]:
        """Return the deadlines that have passed, the earliest first, and forget them."""
        expired: list[Deadline] = []
        while self._heap and self._heap[0].time <= now:
            one = heapq.heappop(self._heap)
            if self._is_unfinished(one.request_id):
                expired.append(one)
        return expired
