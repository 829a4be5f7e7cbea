"""YieldingEngine: rows run while nobody waits, leave at once when somebody does, and go on."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams
from midfill.errors import EngineDeadError
from midfill.serving.server.batch.yielding import InteractiveLoad, YieldingEngine


class StubEngine(EngineClient):
    """Generates the numbers from 0 on, one per turn of the event loop.

    Attributes:
        submitted: all requests, in order.
        running: those that are not over.
    """

    def __init__(self) -> None:
        self.submitted: list[EngineRequest] = []
        self.running: set[str] = set()
        self.is_dead = False

    def submit(self, *requests: EngineRequest) -> OutputStream:
        if self.is_dead:
            raise EngineDeadError("dead", retry_after=1)
        stream = OutputStream(self, requests)
        for request in requests:
            self.submitted.append(request)
            self.running.add(request.request_id)
            asyncio.get_running_loop().create_task(self._generate(request, stream))
        return stream

    async def _generate(self, request: EngineRequest, stream: OutputStream) -> None:
        count = request.sampling.max_tokens
        for token in range(len(request.answered), count):
            await asyncio.sleep(0.001)
            if request.request_id not in self.running:
                return
            for index in range(request.sampling.n):
                stream.put(
                    EngineOutput(
                        request_id=request.request_id,
                        index=index,
                        token_ids=[token],
                        cached_tokens=100 * len(request.answered),
                        finish_reason="length" if token == count - 1 else None,
                    )
                )

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.running.discard(request_id)

    def forget(self, request_id: str) -> None:
        self.running.discard(request_id)


def request(name: str, tokens: int = 20, n: int = 1) -> EngineRequest:
    sampling = EngineSamplingParams(max_tokens=tokens, n=n)
    return EngineRequest(
        request_id=name, token_ids=[1], sampling=sampling, stream_interval=float("inf"),
        deadline=1.0,
    )  # fmt: skip


async def collect(stream: OutputStream) -> list[EngineOutput]:
    with stream:
        return [output async for output in stream]


def tokens(outputs: Sequence[EngineOutput], index: int = 0) -> list[int]:
    return [each for output in outputs if output.index == index for each in output.token_ids]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.001)


def test_rows_run_at_once_where_nobody_waits() -> None:
    async def run() -> None:
        engine = StubEngine()
        outputs = await collect(YieldingEngine(engine, InteractiveLoad(0)).submit(request("a")))
        assert tokens(outputs) == list(range(20))
        assert engine.submitted[0].stream_interval < 1  # so that little is lost
        assert engine.submitted[0].deadline is None

    asyncio.run(run())


def test_a_row_leaves_for_others_and_goes_on_after_what_it_has_generated() -> None:
    async def run() -> None:
        engine, load = StubEngine(), InteractiveLoad(0)
        answers = asyncio.ensure_future(
            collect(YieldingEngine(engine, load).submit(request("a", 300), request("b", 300)))
        )
        for _ in range(2):
            await until(lambda: bool(engine.running))
            await asyncio.sleep(0.005)
            before = len(engine.submitted)
            load.record(1)
            assert not engine.running  # at once
            load.record(2)
            await asyncio.sleep(0.01)
            assert len(engine.submitted) == before
            load.record(1)
            load.record(0)
            await until(lambda before=before: len(engine.submitted) > before)  # type: ignore[misc]
        outputs = await answers
        for name in "ab":
            own = [output for output in outputs if output.request_id == name]
            assert tokens(own) == list(range(300))
            assert {output.cached_tokens for output in own} == {0}
        assert any(each.answered for each in engine.submitted)

    asyncio.run(run())


def test_a_request_for_several_answers_runs_to_its_end() -> None:
    async def run() -> None:
        engine, load = StubEngine(), InteractiveLoad(0)
        stream = YieldingEngine(engine, load).submit(request("a", n=2))
        answers = asyncio.ensure_future(collect(stream))
        await until(lambda: bool(engine.running))
        load.record(1)
        outputs = await answers
        assert tokens(outputs, 0) == tokens(outputs, 1) == list(range(20))
        assert len(engine.submitted) == 1

    asyncio.run(run())


def test_rows_wait_a_moment_after_the_last_request() -> None:
    async def run() -> None:
        seconds = 0.0
        engine, load = StubEngine(), InteractiveLoad(0.05, lambda: seconds)
        load.record(1)
        load.record(0)
        answers = asyncio.ensure_future(collect(YieldingEngine(engine, load).submit(request("a"))))
        await asyncio.sleep(0.12)
        assert not engine.submitted
        seconds = 1.0
        await answers

    asyncio.run(run())


def test_a_row_that_is_cancelled_leaves_nothing_behind() -> None:
    async def run() -> None:
        engine, load = StubEngine(), InteractiveLoad(0)
        yielding = YieldingEngine(engine, load)
        with yielding.submit(request("a"), request("b")) as stream:
            await until(lambda: bool(engine.running))
            stream.cancel("a")
            assert engine.running == {"b"}
        await asyncio.sleep(0.01)
        assert not engine.running
        load.record(1)
        with yielding.submit(request("c")):
            await asyncio.sleep(0.01)
        load.record(0)
        await asyncio.sleep(0.01)
        assert [each.request_id for each in engine.submitted] == ["a", "b"]
        assert not load.on_busy

    asyncio.run(run())


def test_an_engine_that_is_not_ready_is_the_rows_error() -> None:
    async def run() -> None:
        engine = StubEngine()
        engine.is_dead = True
        with pytest.raises(EngineDeadError):
            await collect(YieldingEngine(engine, InteractiveLoad(0)).submit(request("a")))

    asyncio.run(run())


def test_what_a_server_asks_of_an_engine_is_the_engines() -> None:
    engine = EngineClient(Path("x"), ModelOptions())
    yielding = YieldingEngine(engine, InteractiveLoad())
    for name in ("state", "info", "stats", "tenants", "restarts", "queued_tokens", "retry_after"):
        assert getattr(yielding, name) == getattr(engine, name)
    yielding.check_admission("", None)
