"""EngineClient: when a dead engine is restarted, and how much may be queued."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import pytest

from midfill.config import ModelOptions
from midfill.engine.messages import (
    EngineInfo,
    Failed,
    FromEngine,
    Loading,
    Ready,
    StepReport,
    ToEngine,
)
from midfill.engine.process import client as client_module
from midfill.engine.process.client import EngineClient
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams, EngineStats
from midfill.errors import CheckpointError, EngineDeadError, QueueFullError

INFO = EngineInfo(
    backend="test",
    layers=1,
    weight_bytes=1,
    kv_bytes=1,
    slots=1,
    context=8,
    max_running=1,
    load_seconds=2.5,
)
READY, LOADING = Ready(INFO), Loading("stage", 0, 1)


def report(request_id: str, finish_reason: str | None = None) -> StepReport:
    output = EngineOutput(
        request_id=request_id,
        index=0,
        token_ids=[1],
        finish_reason=finish_reason,  # type: ignore[arg-type]
    )
    return StepReport([output], EngineStats())


ANSWER = report("earlier")


@dataclass
class ScriptedProcess:
    """An engine process that sends what a script says and then dies, or stays up for good."""

    script: list[FromEngine]
    stays_up: bool
    process_id: int = 1
    exit_status: int = -9
    sent: list[ToEngine] = field(default_factory=list)

    scripts: ClassVar[Iterator[list[FromEngine]]]
    last: ClassVar["ScriptedProcess"]

    @classmethod
    def spawn(cls) -> "ScriptedProcess":
        script = next(cls.scripts, None)
        cls.last = cls(script or [READY], stays_up=script is None)
        return cls.last

    def send(self, *messages: ToEngine) -> None:
        self.sent.extend(messages)

    async def received(self) -> AsyncGenerator[FromEngine, None]:
        for message in self.script:
            yield message
        if self.stays_up:
            await asyncio.Event().wait()

    async def close(self) -> None:
        pass


@dataclass
class Delays:
    """The times that the client waited before restarts, instead of waiting."""

    seconds: list[float] = field(default_factory=list)

    async def sleep(self, seconds: float) -> None:
        self.seconds.append(seconds)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> Delays:
    recorded = Delays()
    monkeypatch.setattr(client_module, "EngineProcess", ScriptedProcess)
    monkeypatch.setattr(client_module.asyncio, "sleep", recorded.sleep)
    return recorded


def run_scripts(*scripts: list[FromEngine], max_queued_tokens: int = 100) -> EngineClient:
    """Start a client whose processes follow scripts, and wait until one of them stays up."""
    ScriptedProcess.scripts = iter(scripts)
    return EngineClient(
        Path("unused"), ModelOptions(), max_queued_tokens=max_queued_tokens, step_timeout=0
    )


async def wait_until_up(client: EngineClient) -> None:
    yielded = asyncio.get_running_loop()
    async with asyncio.timeout(60):
        while not ScriptedProcess.last.stays_up or client.state != "ready":
            future = yielded.create_future()
            yielded.call_soon(future.set_result, None)
            await future


def request(name: str, tokens: int, *, background: bool = False) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        token_ids=[1] * tokens,
        sampling=EngineSamplingParams(),
        background=background,
    )


def restarted(*scripts: list[FromEngine]) -> EngineClient:
    client = run_scripts(*scripts)

    async def test() -> None:
        await client.start()
        await wait_until_up(client)
        await client.close()

    asyncio.run(test())
    return client


def test_an_engine_that_had_answered_is_restarted_at_once_every_time(delays: Delays) -> None:
    client = restarted(*[[READY, ANSWER]] * 10)
    assert delays.seconds == [0.0] * 10
    assert client.restarts == 10


def test_the_delay_doubles_while_no_engine_answers(delays: Delays) -> None:
    failures: list[list[FromEngine]] = [
        [READY],
        [LOADING],
        [READY],
        [LOADING],
        [LOADING],
        [LOADING],
    ]
    restarted(*failures)
    assert delays.seconds == [0.5, 1.0, 2.0, 4.0, 5.0, 5.0]


def test_the_delay_starts_again_after_an_answer(delays: Delays) -> None:
    restarted([READY, ANSWER], [READY], [READY], [READY, ANSWER], [READY])
    assert delays.seconds == [0.0, 0.5, 1.0, 0.0, 0.5]


def test_a_checkpoint_that_breaks_later_does_not_end_the_restarts(delays: Delays) -> None:
    client = restarted([READY, ANSWER], [Failed("CheckpointError", "broken")], [READY])
    assert client.restarts == 3


def test_the_first_start_is_not_repeated(delays: Delays) -> None:
    for script, error in (
        ([Failed("CheckpointError", "broken")], CheckpointError),
        ([LOADING], EngineDeadError),
    ):
        client = run_scripts(script)
        with pytest.raises(error):
            asyncio.run(client.start())
        assert client.restarts == 0
    assert delays.seconds == []


def test_an_engine_that_cant_be_spawned_is_tried_again(
    delays: Delays, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawn, attempts = ScriptedProcess.spawn, 0

    def spawn_second() -> ScriptedProcess:
        nonlocal attempts
        attempts += 1
        if attempts == 2:
            raise OSError("no process to be had")
        return spawn()

    monkeypatch.setattr(ScriptedProcess, "spawn", spawn_second)
    restarted([READY, ANSWER])
    assert delays.seconds == [0.0, 0.5]


def test_a_closed_client_does_not_ask_to_try_again(delays: Delays) -> None:
    client = restarted()
    assert client.state == "dead"
    with pytest.raises(EngineDeadError) as raised:
        client.submit(request("a", 1))
    assert raised.value.retry_after is None


def test_the_pool_is_known_before_the_first_step(delays: Delays) -> None:
    client = run_scripts()

    async def test() -> None:
        await client.start()
        assert client.stats == EngineStats(slots_total=INFO.slots, slots_free=INFO.slots)
        await client.close()

    asyncio.run(test())
    assert client.stats == EngineStats()


def test_queued_tokens_are_bounded(delays: Delays) -> None:
    client = run_scripts(max_queued_tokens=100)

    async def test() -> None:
        await client.start()
        client.submit(request("a", 40), request("b", 60))
        assert client.queued_tokens == 100
        sent = len(ScriptedProcess.last.sent)
        with pytest.raises(QueueFullError, match="at most 100") as raised:
            client.submit(request("c", 1))
        assert raised.value.retry_after == 1
        assert len(ScriptedProcess.last.sent) == sent
        await client.close()
        assert client.queued_tokens == 0

    asyncio.run(test())


def test_tokens_leave_the_queue_with_the_first_output_or_a_cancellation(delays: Delays) -> None:
    client = run_scripts(max_queued_tokens=100)

    async def test() -> None:
        await client.start()
        client.submit(request("a", 50))
        second = client.submit(request("b", 50))
        client._handle(report("a"))
        client._handle(report("a", "stop"))
        assert client.queued_tokens == 50
        second.close()
        assert client.queued_tokens == 0
        await client.close()

    asyncio.run(test())


def test_a_request_above_the_bound_is_queued_when_nothing_else_is(delays: Delays) -> None:
    client = run_scripts(max_queued_tokens=100)

    async def test() -> None:
        await client.start()
        client.submit(request("long", 500))
        with pytest.raises(QueueFullError):
            client.submit(request("short", 1))
        await client.close()

    asyncio.run(test())


def test_background_requests_are_neither_counted_nor_refused(delays: Delays) -> None:
    client = run_scripts(max_queued_tokens=100)

    async def test() -> None:
        await client.start()
        client.submit(request("ahead", 1000, background=True))
        assert client.queued_tokens == 0
        client.submit(request("a", 100))
        client.submit(request("ahead, too", 1000, background=True))
        await client.close()

    asyncio.run(test())
