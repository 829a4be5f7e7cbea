"""Bodies share a budget of memory: those that stall give way to those that grow."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from midfill.errors import InvalidRequestError
from midfill.serving.server.bodies import MAX_ESCAPES, HeldBodies, _decode_large
from midfill.serving.server.responses import ApiError

FREE, MAX = 10, 100


class Upload:
    """A body whose pieces arrive when the test says so."""

    def __init__(self, bodies: HeldBodies) -> None:
        self._arrived: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.done = asyncio.Event()
        self.task = asyncio.create_task(self._receive(bodies))

    async def send(self, *sizes: int, end: bool = False) -> None:
        for size in sizes:
            self._arrived.put_nowait(b"x" * size)
        if end:
            self._arrived.put_nowait(None)
        for _ in range(10):
            await asyncio.sleep(0)

    async def status(self) -> int:
        """Return 200 for a whole body, or the error's status."""
        self.done.set()
        return await self.task

    async def _chunks(self) -> AsyncIterator[bytes]:
        while (chunk := await self._arrived.get()) is not None:
            yield chunk

    async def _receive(self, bodies: HeldBodies) -> int:
        try:
            with bodies.body() as body:
                await body.read(self._chunks())
                await self.done.wait()  # where it would be decoded
                assert len(body.take()) == body.size
        except ApiError as error:
            return error.status
        return 200


@pytest.fixture
def bodies() -> HeldBodies:
    return HeldBodies(MAX, FREE)


def test_one_that_stalls_gives_way_to_one_that_grows(bodies: HeldBodies) -> None:
    async def test() -> None:
        stalled, slow, fast = (Upload(bodies) for _ in range(3))
        await stalled.send(60)
        await slow.send(30)
        await slow.send(10)
        await fast.send(40, 20, end=True)
        assert stalled.task.done()
        await slow.send(5, end=True)
        assert [await each.status() for each in (stalled, slow, fast)] == [503, 200, 200]
        assert bodies._counted_bytes == 0

    asyncio.run(test())


def test_one_may_grow_in_the_turn_in_which_it_gives_way(bodies: HeldBodies) -> None:
    async def test() -> None:
        stalled, fast = Upload(bodies), Upload(bodies)
        await stalled.send(60)
        await fast.send(20)
        for each in (fast, stalled):  # both go on in the same turn
            each._arrived.put_nowait(b"x" * 60)
        await fast.send(end=True)
        assert [await each.status() for each in (stalled, fast)] == [503, 200]
        assert bodies._counted_bytes == 0

    asyncio.run(test())


def test_complete_ones_stay(bodies: HeldBodies) -> None:
    """They are needed by requests that will be answered; the new one is told to try again."""

    async def test() -> None:
        complete, late = Upload(bodies), Upload(bodies)
        await complete.send(90, end=True)
        await late.send(20)
        await late.send(20)
        assert await late.status() == 503
        assert await complete.status() == 200

    asyncio.run(test())


def test_small_ones_are_free(bodies: HeldBodies) -> None:
    async def test() -> None:
        full = Upload(bodies)
        await full.send(FREE + MAX, end=True)
        small = [Upload(bodies) for _ in range(20)]
        for each in small:
            await each.send(FREE, end=True)
        assert [await each.status() for each in (full, *small)] == [200] * 21

    asyncio.run(test())


def test_one_alone_may_be_larger(bodies: HeldBodies) -> None:
    async def test() -> None:
        alone = Upload(bodies)
        await alone.send(5 * MAX, end=True)
        assert await alone.status() == 200

    asyncio.run(test())


def test_what_was_cancelled_counts_no_more(bodies: HeldBodies) -> None:
    async def test() -> None:
        gone = Upload(bodies)
        await gone.send(90)
        gone.task.cancel()
        await asyncio.wait({gone.task})
        assert gone.task.cancelled()
        assert bodies._counted_bytes == 0

    asyncio.run(test())


@pytest.mark.parametrize(("escape", "weight"), [(b"\\n", 1), (b"\\u00e9", 4)])
def test_escaped_characters_are_bounded(escape: bytes, weight: int) -> None:
    def body(count: int) -> bytes:
        return b'{"text":"%s"}' % (escape * count)

    most = MAX_ESCAPES // weight
    assert len(_decode_large(body(most), dict[str, str])["text"]) == most
    with pytest.raises(InvalidRequestError, match="too many escaped characters"):
        _decode_large(body(most + 1), dict[str, str])
