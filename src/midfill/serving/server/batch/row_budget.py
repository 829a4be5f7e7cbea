"""RowBudget: how many rows of batches may be in progress; batches take turns for what is free."""

import asyncio
import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

_MEMORY_SHARE = 0.95  # of the slots; the rest is for answers that get longer than expected


class RowBudget:
    """Bounds the rows in progress by KV memory and, where others use the engine, by their number.

    What is free goes to the batch that has the fewest rows in progress, of several to the one whose
    last turn was the longest ago. Nobody overtakes it, so that no row waits for ever. A row that
    needs more memory than there is runs alone.

    Args:
        slots: of the KV pool that rows may use.
        max_rows: maximum number of rows in progress; None bounds them by memory alone.
    """

    def __init__(self, slots: int, max_rows: int | None = None) -> None:
        self._max_tokens = _MEMORY_SHARE * slots
        self._max_rows = math.inf if max_rows is None else max_rows
        self._shares: list[RowShare] = []
        self._turn = 0

    @contextlib.contextmanager
    def share(self) -> "Iterator[RowShare]":
        """Give a batch its share; what it holds at the end of the ``with`` block is free."""
        share = RowShare(self)
        self._shares.append(share)
        try:
            yield share
        finally:
            self._shares.remove(share)
            self.grant()

    def grant(self) -> None:
        """Give what is free to those that wait for it."""
        while waiting := [share for share in self._shares if share.request is not None]:
            chosen = min(waiting, key=lambda share: (share.rows, share.turn))
            rows = sum(share.rows for share in self._shares)
            tokens = sum(share.tokens for share in self._shares)
            request = chosen.request
            assert request is not None
            fits = rows < self._max_rows and tokens + request.tokens <= self._max_tokens
            if rows and not fits:
                return
            self._turn += 1
            chosen.turn, chosen.request = self._turn, None
            chosen.rows += 1
            chosen.tokens += request.tokens
            request.granted.set_result(None)


class _Request(NamedTuple):
    tokens: float
    granted: asyncio.Future[None]


class RowShare:
    """What one batch holds of a budget.

    Attributes:
        rows, tokens: in progress.
        turn: when it was given a row last.
        request: what it waits for; None if it doesn't.
    """

    def __init__(self, budget: RowBudget) -> None:
        self._budget = budget
        self.rows = self.turn = 0
        self.tokens = 0.0
        self.request: _Request | None = None

    async def acquire(self, tokens: float) -> None:
        """Wait until another row that takes so many tokens may run; one call at a time."""
        granted = asyncio.get_running_loop().create_future()
        self.request = _Request(tokens, granted)
        self._budget.grant()
        try:
            await granted
        except asyncio.CancelledError:
            self.request = None
            raise

    def release(self, tokens: float) -> None:
        """Note that a row has ended, and that so many tokens are free."""
        self.rows -= 1
        self.tokens -= tokens
        self._budget.grant()
