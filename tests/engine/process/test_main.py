"""The engine in its own process: outputs, refusals, cancellation, broken messages, death."""

import asyncio
import os
import signal
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from slowed_engines import slow_engines

from midfill.config import ModelOptions
from midfill.engine.messages import Cancel, FromEngine, Prepare, RequestFailed, Submit
from midfill.engine.process.client import EngineClient
from midfill.engine.process.main import EarlyMessages, Inbox, Message, run_loop
from midfill.engine.process.output_buffer import OutputBuffer
from midfill.engine.process.outputs import OutputStream
from midfill.engine.process.supervision import EngineProcess
from midfill.engine.request import EngineRequest, EngineSamplingParams, RequestHints
from midfill.errors import (
    CheckpointError,
    EngineDeadError,
    GenerationError,
    InvalidRequestError,
    KvTransferError,
    MidfillError,
)
from midfill.kv.blob import decode_blob

OPTIONS = ModelOptions(threads=1, kv_memory=4 * 2**20)
STEP_SECONDS = 0.01  # so that an answer of some hundred tokens goes on for seconds


@dataclass
class Running:
    """A ready engine, its event loop, and the stages it reported while loading."""

    client: EngineClient
    loop: asyncio.Runner
    stages: list[str]

    def run(self, test: Coroutine[None, None, None]) -> None:
        self.loop.run(test)


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[Running]:
    stages: list[str] = []
    with asyncio.Runner() as loop, slow_engines(STEP_SECONDS):
        client = EngineClient(tiny_folder, OPTIONS, lambda stage, done, total: stages.append(stage))
        loop.run(client.start())
        yield Running(client, loop, stages)
        loop.run(client.close())
        assert client.state == "dead"
        assert client.process_id is None


def request(name: str, *, max_tokens: int = 5, n: int = 1) -> EngineRequest:
    sampling = EngineSamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, n=n)
    return EngineRequest(request_id=name, token_ids=[5, 6, 7], sampling=sampling)


async def idle(client: EngineClient) -> None:
    """Wait until the engine has handled all that was sent, and has reported its numbers."""
    with client.submit(request("last", max_tokens=1)) as stream:
        async for _ in stream:
            pass
    async with asyncio.timeout(60):
        while client.stats.running or client.stats.waiting:
            await asyncio.sleep(0.005)


def test_an_engine_prepares_while_its_model_is_fetched(tiny_folder: Path) -> None:
    options = msgspec.structs.replace(OPTIONS, kv_cache_dtype="f32")  # as of the tiny models

    async def run() -> None:
        process = EngineProcess.spawn()
        process.send(Prepare(options), Prepare(options))
        client = EngineClient(tiny_folder, options, spawned=process)
        await client.start()
        assert client.process_id == process.process_id
        assert client.state == "ready"
        await client.close()

    asyncio.run(run())


def test_it_reports_its_progress_and_its_sizes(engine: Running) -> None:
    assert engine.stages
    client, info = engine.client, engine.client.info
    assert client.state == "ready"
    assert info is not None
    assert info.layers == 3
    assert info.context == 512
    assert info.weight_bytes > 0
    assert OPTIONS.kv_memory is not None
    assert 0.9 * OPTIONS.kv_memory <= info.kv_bytes <= OPTIONS.kv_memory
    assert info.slots == info.kv_bytes // (3 * 2 * 32 * 2 * 4)


def test_outputs_of_several_requests_come_in_one_stream(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        await idle(client)
        before = client.stats.generated_tokens
        tokens: dict[tuple[str, int], list[int]] = {}
        with client.submit(request("a"), request("b", max_tokens=3, n=2)) as stream:
            async for output in stream:
                tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
        assert {key: len(ids) for key, ids in tokens.items()} == {
            ("a", 0): 5,
            ("b", 0): 3,
            ("b", 1): 3,
        }
        assert tokens["b", 0] == tokens["b", 1] == tokens["a", 0][:3]
        assert client.stats.generated_tokens - before == 11

    engine.run(test())


def test_a_request_that_can_never_run_is_refused_alone(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        bad = EngineRequest(request_id="bad", token_ids=[1] * 600, sampling=EngineSamplingParams())
        with client.submit(request("good", max_tokens=20)) as good, client.submit(bad) as refused:
            with pytest.raises(InvalidRequestError, match="600 tokens") as raised:
                await anext(refused)
            assert raised.value.param == "prompt"
            assert raised.value.code == "context_length_exceeded"
            assert sum([len(output.token_ids) async for output in good]) == 20

    engine.run(test())


def test_kv_is_exported_and_imported_through_messages(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        await idle(client)
        prompt = list(range(40, 240))
        sampling = EngineSamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
        with client.submit(
            EngineRequest(request_id="a", token_ids=prompt, sampling=sampling, tenant="alice")
        ) as stream:
            async for _ in stream:
                pass
        blob = await client.export_kv("alice", prompt)
        assert decode_blob(blob).tokens.tolist() == prompt
        assert await client.import_kv("alice", blob) == 200
        with pytest.raises(KvTransferError, match="another tenant"):
            await client.import_kv("bob", blob)
        with pytest.raises(KvTransferError, match="truncated or damaged"):
            await client.import_kv("alice", blob[:-1])
        with pytest.raises(KvTransferError, match="none of these tokens is cached"):
            await client.export_kv("bob", prompt)
        await idle(client)
        assert client.stats.exported_bytes == len(decode_blob(blob).data)

    engine.run(test())


def test_a_request_finds_what_was_prefilled_in_the_background(engine: Running) -> None:
    async def test() -> None:
        client, sampling = engine.client, EngineSamplingParams(max_tokens=3, temperature=0)
        prompt = list(range(20, 220))
        ahead = EngineRequest(
            request_id="ahead", token_ids=prompt, sampling=sampling, background=True
        )
        with client.submit(ahead) as stream:
            outputs = [output async for output in stream]
        assert [(output.token_ids, output.finish_reason) for output in outputs] == [([], "stop")]
        await idle(client)
        assert (client.stats.background, client.stats.background_tokens) == (0, 200)
        real = EngineRequest(request_id="real", token_ids=[*prompt, 9], sampling=sampling)
        with client.submit(real) as stream:
            assert (await anext(stream)).cached_tokens == 200

    engine.run(test())


def test_a_required_beginning_reaches_the_engine(engine: Running) -> None:
    async def test() -> None:
        params = EngineSamplingParams(max_tokens=1)
        fields = {"token_ids": [5, 6], "sampling": params, "begins_with": b"\xff" * 200}
        with engine.client.submit(EngineRequest(request_id="long", **fields)) as stream:
            with pytest.raises(InvalidRequestError, match="200 bytes") as raised:
                await anext(stream)
            assert raised.value.param == "begins_with"

    engine.run(test())


def test_leaving_a_stream_cancels_it(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        await idle(client)
        before = client.stats.generated_tokens
        with client.submit(request("a", max_tokens=400, n=4)) as stream:
            await anext(stream)
        await idle(client)
        stats = client.stats
        assert stats.generated_tokens - before < 4 * 400
        assert stats.slots_free + stats.slots_cached == stats.slots_total

    engine.run(test())


def test_one_answer_can_be_ended_while_the_others_continue(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        await idle(client)
        before = client.stats.generated_tokens
        tokens = [0, 0, 0]
        with client.submit(request("a", max_tokens=300, n=3), request("b")) as stream:
            async for output in stream:
                if output.request_id == "b":
                    continue
                tokens[output.index] += len(output.token_ids)
                if output.index == 1:
                    assert tokens[1] == len(output.token_ids), "an output of what was cancelled"
                    stream.cancel("a", 1)
                    stream.cancel("a", 7)  # there is none
        await idle(client)
        assert tokens[0] == tokens[2] == 300
        assert client.stats.generated_tokens - before <= 300 + 300 + 299 + 5 + 1

    engine.run(test())


def test_a_stream_ends_when_its_answers_are_cancelled_one_by_one(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        with client.submit(request("a", max_tokens=400, n=2), request("b")) as stream:
            stream.cancel("a", 1)
            stream.cancel("a", 0)
            assert {output.request_id async for output in stream} == {"b"}
            stream.cancel("b", 0)
        await idle(client)

    engine.run(test())


async def generated(stream: OutputStream) -> int:
    """Return the number of tokens that a stream yields until its end."""
    async with asyncio.timeout(60):
        return sum([len(output.token_ids) async for output in stream])


def test_a_request_that_cant_be_decoded_fails_alone(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        broken = EngineRequest(
            request_id="broken", token_ids="abc", sampling=EngineSamplingParams()
        )  # type: ignore[arg-type]
        restarts = client.restarts
        with client.submit(request("good", max_tokens=50)) as good, client.submit(broken) as bad:
            with pytest.raises(GenerationError, match="server's log"):
                await generated(bad)
            assert await generated(good) == 50
        assert client.restarts == restarts

    engine.run(test())


class FaultyEngine:
    """An engine with bugs: every call raises."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def add(self, request: EngineRequest) -> None:
        raise RuntimeError("a bug")

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self.cancelled.append(request_id)
        raise RuntimeError("another bug")


@pytest.mark.parametrize(
    "payload",
    [
        msgspec.msgpack.encode(Submit(request("a"))),
        msgspec.msgpack.encode(Cancel("a")),
        msgspec.msgpack.encode({"type": "Unknown"}),
        b"\xc1",
        b"",
    ],
)
def test_a_message_that_raises_fails_its_request_alone(payload: bytes) -> None:
    engine, sent = FaultyEngine(), list[FromEngine]()
    inbox = Inbox(engine, OutputBuffer(lambda token_id: b""), sent.append)  # type: ignore[arg-type]
    inbox.handle(b"a", payload)
    (failed,) = sent
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == "a"
    assert "bug" not in failed.message  # the log has it, clients need not see it
    assert engine.cancelled[-1] == "a"


def test_a_request_that_cant_be_encoded_fails_alone(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        broken = EngineRequest(request_id="big", token_ids=[2**70], sampling=EngineSamplingParams())
        with pytest.raises(OverflowError):
            client.submit(request("first"), broken)
        assert client.queued_tokens == 0
        assert await generated(client.submit(request("first"))) == 5

    engine.run(test())


def test_a_killed_engine_fails_its_requests_and_is_restarted(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        for _ in range(2):
            restarts = client.restarts
            stream = client.submit(request("a", max_tokens=400, n=8))
            await anext(stream)
            assert client.process_id is not None
            os.kill(client.process_id, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="in flight") as raised:
                await generated(stream)
            assert raised.value.retry_after is not None
            with pytest.raises(EngineDeadError, match="restarting") as raised:
                client.submit(request("b"))
            assert raised.value.retry_after is not None
            async with asyncio.timeout(120):
                while client.state != "ready":
                    await asyncio.sleep(0.01)
            assert client.restarts == restarts + 1
            assert await generated(client.submit(request("c"))) == 5

    engine.run(test())


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="needs Linux's /proc")
def test_where_memory_runs_out_the_engine_is_killed_before_its_server(engine: Running) -> None:
    scores = [
        int(Path(f"/proc/{process}/oom_score_adj").read_text())
        for process in (engine.client.process_id, "self")
    ]
    assert scores[0] >= scores[1]
    assert scores[0] >= 300


def test_an_engine_that_hangs_while_idle_is_ended_and_restarted(
    tiny_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def test() -> None:
        client = EngineClient(tiny_folder, OPTIONS, step_timeout=4)
        await client.start()
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGSTOP)
        async with asyncio.timeout(60):
            while client.state == "ready":
                await asyncio.sleep(0.01)
        assert client.state == "unresponsive"
        with pytest.raises(EngineDeadError, match="in flight") as raised:
            await generated(client.submit(request("a")))
        assert raised.value.retry_after is not None
        async with asyncio.timeout(120):
            while client.state != "ready":
                await asyncio.sleep(0.01)
        assert client.restarts == 1
        assert await generated(client.submit(request("b"))) == 5
        await client.close()

    asyncio.run(test())
    assert "no step for 4 s" in caplog.text


def test_an_engine_that_was_stopped_for_a_moment_is_ready_again(engine: Running) -> None:
    async def test() -> None:
        client = engine.client
        assert client.process_id is not None
        os.kill(client.process_id, signal.SIGSTOP)
        stream = client.submit(request("stopped"))
        client.state = "unresponsive"
        os.kill(client.process_id, signal.SIGCONT)
        assert await generated(stream) == 5
        assert client.state == "ready"

    engine.run(test())


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (ModelOptions(context=100_000), "--context 100000"),
        (ModelOptions(kv_memory=1000), "--kv-memory"),
        (ModelOptions(backend="torch", device="cuda:77"), "cuda:77|needs torch; install it with"),
    ],
)
def test_options_that_cant_be_satisfied(
    tiny_folder: Path, options: ModelOptions, error: str
) -> None:
    with pytest.raises(MidfillError, match=error):
        asyncio.run(EngineClient(tiny_folder, options).start())


def test_a_broken_checkpoint_is_reported_with_its_file_and_tensor(
    tiny_folder: Path, tmp_path: Path
) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        asyncio.run(EngineClient(tmp_path, OPTIONS).start())


class WokenError(Exception):
    """An engine was stepped."""


class SleepyEngine:
    """An idle engine that has something to do in a while."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def has_work(self) -> bool:
        return False

    def idle_seconds(self) -> float:
        return self.seconds

    def step(self) -> None:
        raise WokenError


class SilentChannel:
    """A channel on which nothing comes."""

    def __init__(self) -> None:
        self.waited: list[float | None] = []

    def pending(self, seconds: float | None = 0.0) -> bool:
        self.waited.append(seconds)
        return False

    def send(self, message: FromEngine) -> None:
        raise AssertionError


def test_an_idle_engine_wakes_up_for_what_it_has_to_do_later() -> None:
    channel = SilentChannel()
    buffer = OutputBuffer(lambda token_id: b"")
    with pytest.raises(WokenError):
        run_loop(SleepyEngine(2.5), buffer, channel)  # type: ignore[arg-type]
    assert channel.waited == [2.5]


class TestEarlyMessages:
    """What arrives amid a step of offline requests."""

    @staticmethod
    def arrived(*requests: EngineRequest) -> EarlyMessages:
        messages = [
            (b"", msgspec.msgpack.encode(Submit(each)), memoryview(b"")) for each in requests
        ]

        class Source:
            def pending(self) -> bool:
                return bool(messages)

            def receive(self) -> Message:
                return messages.pop(0)

        inbox = Inbox(None, None, lambda message: None)  # type: ignore[arg-type]
        return EarlyMessages(Source(), inbox.is_awaited)

    def test_a_request_that_somebody_waits_for_ends_the_step(self) -> None:
        offline = msgspec.structs.replace(request("row"), hints=RequestHints(offline=True))
        early = self.arrived(offline, request("online"))
        assert early.look()
        assert not early.look()
        submits = [msgspec.msgpack.decode(each[1], type=Submit) for each in early.messages]
        assert [each.request.request_id for each in submits] == ["row", "online"]

    def test_nothing_else_does(self) -> None:
        offline = msgspec.structs.replace(request("row"), hints=RequestHints(offline=True))
        background = msgspec.structs.replace(request("next"), background=True)
        early = self.arrived(offline, background)
        assert not early.look()
        assert len(early.messages) == 2

    def test_a_message_that_makes_no_sense_is_left_to_its_handling(self) -> None:
        inbox = Inbox(None, None, lambda message: None)  # type: ignore[arg-type]
        assert not inbox.is_awaited(b"\xc1")
        assert not inbox.is_awaited(msgspec.msgpack.encode(Cancel("a", None)))
