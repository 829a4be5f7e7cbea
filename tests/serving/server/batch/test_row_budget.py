"""RowBudget: rows start while there is room, and batches take turns."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from midfill.serving.server.batch.row_budget import RowBudget, RowShare


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(test)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Batch:
    """A batch that starts rows as fast as it may.

    Attributes:
        started: how many rows it has started.
    """

    def __init__(self, share: RowShare, tokens: float = 1) -> None:
        self.share, self.tokens, self.started = share, tokens, 0
        self.task = asyncio.ensure_future(self._start())

    async def _start(self) -> None:
        while True:
            await self.share.acquire(self.tokens)
            self.started += 1

    async def end_row(self) -> None:
        self.share.release(self.tokens)
        await settle()


def test_rows_are_bounded_by_memory() -> None:
    async def test() -> None:
        with RowBudget(100).share() as share:
            batch = Batch(share, 30)
            await settle()
            assert batch.started == 3  # 95 of 100 tokens may be used
            await batch.end_row()
            assert (batch.started, share.rows, share.tokens) == (4, 3, 90)

    run(test())


def test_rows_are_bounded_by_number() -> None:
    async def test() -> None:
        with RowBudget(100, max_rows=2).share() as share:
            batch = Batch(share)
            await settle()
            assert batch.started == 2

    run(test())


def test_a_row_that_is_larger_than_memory_runs_alone() -> None:
    async def test() -> None:
        with RowBudget(100).share() as share:
            batch = Batch(share, 1000)
            await settle()
            assert batch.started == 1
            await batch.end_row()
            assert batch.started == 2

    run(test())


def test_a_new_batch_soon_has_as_many_rows_in_progress_as_an_old_one() -> None:
    async def test() -> None:
        budget = RowBudget(100, max_rows=4)
        with budget.share() as first, budget.share() as second:
            old = Batch(first)
            await settle()
            assert old.started == 4
            new = Batch(second)
            await settle()
            for _ in range(2):
                await old.end_row()
            assert (first.rows, second.rows) == (2, 2)
            for _ in range(3):
                await old.end_row()
                await new.end_row()
            assert (first.rows, second.rows) == (2, 2)

    run(test())


def test_batches_take_turns_for_a_single_place() -> None:
    async def test() -> None:
        budget, order = RowBudget(100, max_rows=1), []
        with budget.share() as a, budget.share() as b, budget.share() as c:
            batches = {"a": Batch(a), "b": Batch(b), "c": Batch(c)}
            await settle()
            for _ in range(9):
                (name,) = [name for name, each in batches.items() if each.share.rows]
                order.append(name)
                await batches[name].end_row()
        assert order == list("abc" * 3)

    run(test())


def test_a_large_row_is_not_overtaken_for_ever() -> None:
    async def test() -> None:
        budget = RowBudget(100)
        with budget.share() as first, budget.share() as second:
            small = Batch(first, 10)
            await settle()
            large = Batch(second, 80)
            await settle()
            for _ in range(8):
                await small.end_row()
            assert (large.started, small.started) == (1, 9)

    run(test())


def test_what_a_batch_held_is_free_when_it_ends() -> None:
    async def test() -> None:
        budget = RowBudget(100, max_rows=3)
        with budget.share() as second:
            with budget.share() as first:
                ended = Batch(first)
                await settle()
                waiting = Batch(second)
                await settle()
                assert (ended.started, waiting.started) == (3, 0)
                ended.task.cancel()
                await settle()
            await settle()
            assert waiting.started == 3

    run(test())


def test_a_wait_that_is_cancelled_takes_nothing() -> None:
    async def test() -> None:
        with RowBudget(100, max_rows=1).share() as share:
            await share.acquire(1)
            waiting = asyncio.ensure_future(share.acquire(1))
            await settle()
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            share.release(1)
            assert (share.rows, share.tokens) == (0, 0)
            await share.acquire(1)

    run(test())
