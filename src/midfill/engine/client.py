"""EngineClient: the server's side of the engine process. Starts it, talks to it, sees it die."""

import asyncio
import contextlib
import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec
import zmq
import zmq.asyncio

from midfill import errors
from midfill.config import ModelOptions
from midfill.engine.messages import (
    Cancel,
    EngineInfo,
    Failed,
    FromEngine,
    Loading,
    Ready,
    Rejected,
    Start,
    StepReport,
    Submit,
    ToEngine,
)
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats
from midfill.errors import EngineDeadError, InvalidRequestError, MidfillError
from midfill.system.progress import Progress

_log = logging.getLogger(__name__)

EngineState = Literal["starting", "ready", "dead"]

_STOP_SECONDS = 5.0  # from being told to stop until it is killed
_RESTART_SECONDS = 600.0  # an engine that dies again within this time is not restarted
_LAST_WORDS_SECONDS = 0.1  # for what a dead engine still has in the socket


class OutputStream:
    """The outputs of some requests, in the order they come; ends when all answers have.

    Leaving the ``with`` block cancels what is unfinished.
    """

    def __init__(self, client: "EngineClient", requests: tuple[EngineRequest, ...]) -> None:
        self._client = client
        self._queue: asyncio.Queue[EngineOutput | MidfillError] = asyncio.Queue()
        self._unfinished = {
            request.request_id: set(range(request.sampling.n)) for request in requests
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[EngineOutput]:
        return self

    async def __anext__(self) -> EngineOutput:
        """The next output.

        Raises:
            InvalidRequestError: the engine can never run one of the requests.
            EngineDeadError: the engine process ended.
        """
        while self._unfinished:
            item = await self._queue.get()
            if isinstance(item, MidfillError):
                raise item
            answers = self._unfinished.get(item.request_id, set())
            if item.index not in answers:
                continue  # cancelled when it was on its way
            if item.finish_reason is not None:
                answers.remove(item.index)
                if not answers:
                    del self._unfinished[item.request_id]
                    self._client.forget(item.request_id)
            return item
        raise StopAsyncIteration

    def put(self, item: EngineOutput | MidfillError) -> None:
        """For the client: something came in."""
        self._queue.put_nowait(item)

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End one of the requests, or one of its answers; nothing more comes from it."""
        answers = self._unfinished.get(request_id, set())
        if index is not None and answers != {index}:
            if index in answers:
                answers.remove(index)
                self._client.cancel(request_id, index)
        elif answers:
            del self._unfinished[request_id]
            self._client.cancel(request_id)
            self._client.forget(request_id)

    def close(self) -> None:
        """End all of them."""
        for request_id in list(self._unfinished):
            self.cancel(request_id)


class _Process:
    """One engine process and the pair to it."""

    def __init__(self, folder: str, socket: zmq.asyncio.Socket, child: asyncio.subprocess.Process):
        self._folder = folder
        self._socket = socket
        self.child = child
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)

    @classmethod
    async def spawn(cls) -> "_Process":
        folder = tempfile.mkdtemp(prefix="midfill-")  # only this user may look into it
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
            socket.setsockopt(option, 0)
        address = f"ipc://{folder}/engine"
        socket.bind(address)
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "midfill.engine.process", address, stdin=asyncio.subprocess.PIPE
        )
        return cls(folder, socket, child)

    def send(self, message: ToEngine) -> None:
        """Never blocks: the pair's queue has no limit."""
        self._socket.send(self._encoder.encode(message))

    async def receive(self) -> FromEngine:
        return self._decoder.decode(await self._socket.recv())

    async def messages(self) -> AsyncIterator[FromEngine]:
        """What it says, until it has ended and has nothing more to say."""
        ended = asyncio.ensure_future(self.child.wait())
        heard: asyncio.Future[FromEngine] | None = None
        try:
            while True:
                heard = asyncio.ensure_future(self.receive())
                await asyncio.wait({heard, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not heard.done():
                    await asyncio.wait({heard}, timeout=_LAST_WORDS_SECONDS)
                if not heard.done():
                    return
                # Connected, so the socket's file has served its purpose: nothing is left behind
                # even if this process is killed.
                shutil.rmtree(self._folder, ignore_errors=True)
                yield heard.result()
        finally:
            ended.cancel()
            if heard is not None:
                heard.cancel()

    async def close(self) -> None:
        """End it, by force if it takes too long, and clean up."""
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            await asyncio.wait_for(self.child.wait(), _STOP_SECONDS)
        except TimeoutError:
            self.child.kill()
            await self.child.wait()
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineClient:
    """The engine as the server sees it.

    An engine that dies is started again, once; if that one also dies within ten minutes it stays
    dead, since a fault that keeps coming back is better seen than hidden. The requests in flight
    fail with EngineDeadError either way.

    Attributes:
        state: "starting" (also when starting again), "ready" or "dead".
        info: what the engine told of itself when it was last ready; None before.
        stats: the engine's numbers after its last step.
    """

    def __init__(
        self, path: Path, options: ModelOptions, on_progress: Progress | None = None
    ) -> None:
        """For the checkpoint at ``path``; ``on_progress`` hears (stage, done, total) of a load."""
        self.state: EngineState = "starting"
        self.info: EngineInfo | None = None
        self.stats = EngineStats()
        self._start = Start(str(path), options)
        self._on_progress = on_progress
        self._process: _Process | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, OutputStream] = {}
        self._ready: asyncio.Future[EngineInfo] | None = None
        self._numbers = itertools.count()

    @property
    def process_id(self) -> int | None:
        """The engine process's id, None while there is none."""
        return None if self._process is None else self._process.child.pid

    async def start(self) -> EngineInfo:
        """Start the engine and wait until it is ready.

        Raises:
            MidfillError: it can't start; the error its load gave, or EngineDeadError.
        """
        self._ready = asyncio.get_running_loop().create_future()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine supervisor")
        return await self._ready

    async def close(self) -> None:
        """End the engine."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Queue requests; their outputs come from the stream.

        Raises:
            EngineDeadError: the engine is not ready.
        """
        if self.state != "ready" or self._process is None:
            raise EngineDeadError(
                "the engine is starting; try again in a moment"
                if self.state == "starting"
                else "the engine is dead; see the server's log"
            )
        stream = OutputStream(self, requests)
        for request in requests:
            self._streams[request.request_id] = stream
            self._process.send(Submit(request))
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """Have the engine end a request, or one of its answers, if it is still going on."""
        if request_id in self._streams and self.state == "ready" and self._process is not None:
            self._process.send(Cancel(request_id, index))

    def forget(self, request_id: str) -> None:
        """Route no more outputs of a request."""
        self._streams.pop(request_id, None)

    async def _supervise(self) -> None:
        restarted = -_RESTART_SECONDS
        try:
            while True:
                await self._run_process()
                now = time.monotonic()
                if self.state == "dead" or now - restarted < _RESTART_SECONDS:
                    break  # it never got ready, or keeps dying
                restarted = now
                self.state = "starting"
                _log.error("the engine died; starting it again")
        finally:
            self.state = "dead"
            self._lose("the engine was stopped")

    async def _run_process(self) -> None:
        """Run one engine process to its end. State "dead" afterwards: it never got ready."""
        self._process = process = await _Process.spawn()
        try:
            process.send(self._start)
            async for message in process.messages():
                self._handle(message)
        finally:
            was_ready = self.state == "ready"
            self._process = None
            self.state = "starting" if was_ready else "dead"
            await process.close()
        status = process.child.returncode
        self._lose(f"the engine process ended (exit status {status}) with requests in flight")

    def _handle(self, message: FromEngine) -> None:
        match message:
            case StepReport(outputs, stats):
                self.stats = stats
                for output in outputs:
                    self._route(output)
            case Rejected(request_id, text, param, code):
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.put(InvalidRequestError(text, param=param, code=code))
            case Loading(stage, done, total):
                if self._on_progress is not None:
                    self._on_progress(stage, done, total)
            case Ready(info):
                if self.info is not None:
                    _log.warning("the engine is ready again")
                self.state, self.info = "ready", info
                if self._ready is not None and not self._ready.done():
                    self._ready.set_result(info)
            case Failed(error, text):
                if self._ready is None or self._ready.done():
                    _log.error("the engine can't start again: %s", text)
                kind = getattr(errors, error, None)
                if isinstance(kind, type) and issubclass(kind, MidfillError):
                    self._give_up(kind(text))
                else:
                    self._give_up(EngineDeadError(f"the engine can't start: {error}: {text}"))

    def _route(self, output: EngineOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # cancelled here, not yet there
        stream.put(output)

    def _give_up(self, error: MidfillError) -> None:
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(error)

    def _lose(self, why: str) -> None:
        """Fail everything that waits for the engine that has just ended."""
        self.stats = EngineStats()
        self._give_up(EngineDeadError(why))
        streams, self._streams = self._streams, {}
        for stream in set(streams.values()):
            stream.put(EngineDeadError(why))
