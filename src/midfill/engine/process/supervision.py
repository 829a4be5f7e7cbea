"""EngineProcess: one engine process and the socket pair to it, as the server holds them."""

import asyncio
import math
import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import AsyncGenerator
from contextlib import suppress

import msgspec
import zmq
import zmq.asyncio

from midfill.engine import messages
from midfill.errors import MidfillError
from midfill.system.process import ends_blocked
from midfill.system.python_child import python_command, python_environment

_ABORT_SECONDS = 1.0  # to write where it hangs
_STOP_SECONDS = 5.0  # between being asked to stop and being killed
_LAST_MESSAGES_SECONDS = 0.1  # for messages that a dead engine has left in the socket

_MIN_TICKS = 4
_MAX_TICK_SECONDS = 5.0
_LATE_TICKS = 2
_MIN_RESTART_SECONDS = 0.5
_MAX_RESTART_SECONDS = 5.0


class EngineProcess:
    """A child process that runs ``midfill.engine.process.main``, started by ``spawn``.

    It may be started ahead, without an event loop. Nothing on Windows' event loop that ZeroMQ can
    use starts processes, so a thread waits for the child's end.
    """

    def __init__(
        self, folder: str, socket: zmq.asyncio.Socket, child: subprocess.Popen[bytes]
    ) -> None:
        self._folder = folder
        self._socket = socket
        self._child = child
        self._ended: asyncio.Event | None = None
        self._decoder: msgspec.msgpack.Decoder[messages.FromEngine] = msgspec.msgpack.Decoder(
            messages.FromEngine
        )

    @classmethod
    def spawn(cls) -> "EngineProcess":
        """Start a process; it loads its libraries and waits for a ``Start`` message.

        Raises:
            MidfillError: no process, socket or temporary folder can be had.
        """
        try:
            return cls._spawn()
        except (OSError, zmq.ZMQError) as error:
            raise MidfillError(
                f"the engine's process can't be started: {error.strerror or error}; TMPDIR names"
                " the folder for temporary files"
            ) from error

    @classmethod
    def _spawn(cls) -> "EngineProcess":
        folder = tempfile.mkdtemp(prefix="midfill-")  # readable by this user only
        socket = zmq.asyncio.Context.instance().socket(zmq.PAIR)
        try:
            for option in (zmq.SNDHWM, zmq.RCVHWM, zmq.LINGER):
                socket.setsockopt(option, 0)
            address, key = _bind(socket, folder)
            with ends_blocked():
                child = subprocess.Popen(
                    python_command("-m", "midfill.engine.process.main", address),
                    stdin=subprocess.PIPE,
                    env=python_environment(os.environ | {messages.KEY_VARIABLE: key}),
                )
        except BaseException:
            socket.close()
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return cls(folder, socket, child)

    def discard(self) -> None:
        """End a process that was never used; one that was, ``close`` ends."""
        if self._ended is None and not self._socket.closed:
            self._end_input()
            self._release()

    @property
    def process_id(self) -> int:
        """The operating system's id."""
        return self._child.pid

    @property
    def exit_status(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._child.returncode

    def send(self, *queued: messages.ToEngine) -> None:
        """Queue messages, all or none. Never blocks: the socket's queue is unbounded.

        Raises:
            OverflowError: a message holds an integer of more than 64 bits.
        """
        for frames in [_encode(message) for message in queued]:
            self._socket.send_multipart(frames, copy=False)

    async def received(self) -> AsyncGenerator[messages.FromEngine, None]:
        """Yield what the engine sends, until the process has ended and all of it is read.

        Raises:
            msgspec.DecodeError: a message makes no sense.
        """
        ended = asyncio.ensure_future(self._wait())
        received: asyncio.Future[list[zmq.Frame]] | None = None
        try:
            while True:
                # A copy of a large blob would hold the event loop up.
                received = asyncio.ensure_future(self._socket.recv_multipart(copy=False))
                await asyncio.wait({received, ended}, return_when=asyncio.FIRST_COMPLETED)
                if not received.done():
                    await asyncio.wait({received}, timeout=_LAST_MESSAGES_SECONDS)
                if not received.done():
                    return
                # The two are connected, so the socket's file is no longer needed. Removed now,
                # nothing is left behind even if this process is killed.
                shutil.rmtree(self._folder, ignore_errors=True)
                payload, *kv = received.result()
                message = self._decoder.decode(payload.buffer)
                if kv and isinstance(message, messages.TransferDone):
                    message = msgspec.structs.replace(message, blob=kv[0].buffer)
                yield message
        finally:
            ended.cancel()
            if received is not None:
                received.cancel()

    async def abort(self) -> None:
        """End the process at once; it writes what each of its threads was doing to stderr."""
        try:
            self._child.send_signal(signal.SIGABRT)
        except ValueError:  # Windows has no such signal
            self._child.kill()
        try:
            await asyncio.wait_for(self._wait(), _ABORT_SECONDS)
        except TimeoutError:  # a stopped process gets no signals but this one
            self._child.kill()

    async def close(self) -> None:
        """End the process, by force if it takes too long, and release the socket."""
        self._end_input()
        try:
            await asyncio.wait_for(self._wait(), _STOP_SECONDS)
        except TimeoutError:
            self._child.kill()
            await self._wait()
        self._release()

    async def _wait(self) -> None:
        """Wait until the process has ended."""
        if self._ended is None:
            self._ended = asyncio.Event()
            arguments = (asyncio.get_running_loop(), self._ended)
            threading.Thread(target=self._watch, args=arguments, daemon=True).start()
        await self._ended.wait()

    def _watch(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        self._child.wait()
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(ended.set)

    def _end_input(self) -> None:
        """Close the process's standard input, at whose end it ends."""
        assert self._child.stdin is not None
        with suppress(OSError):
            self._child.stdin.close()

    def _release(self) -> None:
        self._socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


_SIGNAL_CAUSES = {
    "SIGKILL": ", perhaps because memory ran out",
    "SIGILL": ": the chip lacks an instruction; are NUMBA_CPU_NAME or NUMBA_CPU_FEATURES set?",
}


def describe_exit(status: int | None) -> str:
    """Return in words how a process ended.

    Args:
        status: see ``EngineProcess.exit_status``.
    """
    if status is None or status >= 0:
        return f"exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # one without a name
        return f"signal {-status}"
    return f"{name}{_SIGNAL_CAUSES.get(name, '')}"


def _bind(socket: zmq.asyncio.Socket, folder: str) -> tuple[str, str]:
    """Bind a socket to what no other user can reach; return address and key, "" where it has none.

    ZeroMQ's wheels for Windows have no sockets in files. One of TCP can be reached by all users of
    the machine, but those who don't know its key can't say anything there.
    """
    if zmq.has("ipc"):
        address = f"ipc://{folder}/engine"
        socket.bind(address)
        return address, ""
    public, socket.curve_secretkey = zmq.curve_keypair()
    socket.curve_server = True
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    return f"tcp://127.0.0.1:{port}", public.decode()


def _encode(message: messages.ToEngine) -> tuple[bytes | memoryview, ...]:
    """Return frames: the id of the request or transfer that it is about, its msgpack, KV if any.

    With the id apart, the engine can name the request even if it can't decode the message.
    """
    match message:
        case messages.Submit(request):
            request_id = request.request_id
        case messages.Cancel(request_id):
            pass
        case (
            messages.ExportKv(request_id)
            | messages.ImportKv(request_id)
            | messages.FindKv(request_id)
            | messages.EndTransfer(request_id)
        ):
            pass
        case messages.Prepare() | messages.Start() | messages.Ping():
            request_id = ""
    kv: tuple[memoryview, ...] = ()
    if isinstance(message, messages.ImportKv):  # beside it: encoded, it would be copied
        kv, message = (message.blob,), msgspec.structs.replace(message, blob=messages.NO_BLOB)
    return (request_id.encode(), msgspec.msgpack.encode(message), *kv)


class Watchdog:
    """Decides when an engine has been silent for too long.

    At each tick the engine is asked whether it is there, which it answers between two steps.

    Time is counted in ticks and not read from a clock: after the machine slept, or after server and
    engine were stopped together, one tick has passed and the engine still has the others.

    Args:
        seconds: see the attribute.
        tick_seconds: see the attribute; None takes a quarter of ``seconds``, at most 5.

    Attributes:
        seconds: how long an engine may be silent, at least 3/4 of it; 0 is for ever.
        tick_seconds: time between two calls of ``tick``.
    """

    def __init__(self, seconds: float, tick_seconds: float | None = None) -> None:
        self.seconds = seconds
        self.tick_seconds = tick_seconds or min(seconds / _MIN_TICKS, _MAX_TICK_SECONDS)
        self._max_ticks = math.ceil(seconds / self.tick_seconds) if seconds else 0
        self._silent_ticks = 0

    @property
    def late(self) -> bool:
        """Whether the engine has been silent for longer than a step usually takes."""
        return self._silent_ticks >= _LATE_TICKS

    def hear(self) -> None:
        """Note that the engine has sent something."""
        self._silent_ticks = 0

    def tick(self) -> bool:
        """Note that a tick has passed; return whether the engine hangs."""
        self._silent_ticks += 1
        return self._silent_ticks >= self._max_ticks


class RestartDelay:
    """Exponential backoff between the processes of one engine.

    One that had answered anything is restarted at once; after one that had not, 0.5 s pass, and
    twice as long after each further one, up to 5 s.
    """

    def __init__(self) -> None:
        self._seconds = 0.0

    def after_end(self, answered: bool) -> float:
        """Return the seconds to wait, now that a process has ended.

        Args:
            answered: whether it had produced any output.
        """
        self._seconds = (
            0.0
            if answered
            else min(max(2 * self._seconds, _MIN_RESTART_SECONDS), _MAX_RESTART_SECONDS)
        )
        return self._seconds
