"""OutputStream: outputs in their order, and what happens if nobody reads them."""

import asyncio

import pytest

from midfill.engine.process.outputs import MAX_UNDELIVERED, OutputStream
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams
from midfill.errors import EngineDeadError, GenerationError


class Owner:
    """Notes what is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[tuple[str, int | None]] = []
        self.forgotten: list[str] = []

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.cancelled.append((request_id, index))

    def forget(self, request_id: str) -> None:
        self.forgotten.append(request_id)


def stream_request(name: str) -> EngineRequest:
    return EngineRequest(request_id=name, token_ids=[1], sampling=EngineSamplingParams())


def stream_output(name: str, token: int, reason: str | None = None) -> EngineOutput:
    return EngineOutput(
        request_id=name,
        index=0,
        token_ids=[token],
        finish_reason=reason,  # type: ignore[arg-type]
    )


async def read(stream: OutputStream) -> list[int]:
    return [token async for one in stream for token in one.token_ids]


def test_all_outputs_of_all_requests_come_in_their_order() -> None:
    async def test() -> None:
        owner = Owner()
        stream = OutputStream(owner, (stream_request("a"), stream_request("b")))
        for name, token, reason in (("a", 1, None), ("b", 2, "stop"), ("a", 3, "length")):
            stream.put(stream_output(name, token, reason))
        assert stream.undelivered == 3
        assert await read(stream) == [1, 2, 3]
        assert stream.undelivered == 0
        assert owner.forgotten == ["b", "a"]
        assert owner.cancelled == []

    asyncio.run(test())


def test_a_stream_that_nobody_reads_ends_and_frees_its_outputs() -> None:
    async def test() -> None:
        owner = Owner()
        stream = OutputStream(owner, (stream_request("a"),))
        for token in range(MAX_UNDELIVERED + 1):
            stream.put(stream_output("a", token))
        assert stream.undelivered == 0
        assert owner.cancelled == [("a", None)]
        for token in range(10):  # on their way when it was cancelled
            stream.put(stream_output("a", token))
        with pytest.raises(GenerationError, match="too slowly"):
            await read(stream)

    asyncio.run(test())


def test_one_that_is_read_late_but_in_time_loses_nothing() -> None:
    async def test() -> None:
        stream = OutputStream(Owner(), (stream_request("a"),))
        for token in range(MAX_UNDELIVERED - 1):
            stream.put(stream_output("a", token))
        stream.put(stream_output("a", -1, "length"))
        assert await read(stream) == [*range(MAX_UNDELIVERED - 1), -1]

    asyncio.run(test())


def test_an_error_ends_it_after_what_came_before() -> None:
    async def test() -> None:
        stream = OutputStream(Owner(), (stream_request("a"),))
        stream.put(stream_output("a", 7))
        stream.put(EngineDeadError("dead"))
        assert (await anext(stream)).token_ids == [7]
        with pytest.raises(EngineDeadError):
            await anext(stream)

    asyncio.run(test())


def test_a_stream_yields_what_it_has_absorbed_and_ends_with_it() -> None:
    async def test() -> None:
        owner = Owner()
        stream = OutputStream(owner, (stream_request("a"),))
        other = OutputStream(owner, (stream_request("b"),))
        other.put(stream_output("b", 1))
        stream.absorb(other)
        stream.put(stream_output("a", 2, "stop"))
        other.put(stream_output("b", 3, "stop"))
        assert await read(stream) == [1, 2, 3]
        assert owner.forgotten == ["a", "b"]

    asyncio.run(test())


def test_what_a_stream_has_absorbed_is_cancelled_with_it() -> None:
    async def test() -> None:
        owner = Owner()
        stream = OutputStream(owner, (stream_request("a"),))
        other = OutputStream(owner, (stream_request("b"),))
        stream.absorb(other)
        other.close()
        assert owner.cancelled == []
        stream.close()
        assert owner.cancelled == [("a", None), ("b", None)]

    asyncio.run(test())
