"""The engine's own process: loads the model, then steps the engine and exchanges messages.

Started by ``engine.process.supervision`` as ``python -m midfill.engine.process.main ADDRESS``.
Requests and cancellations are received between steps, so they take effect within one step. An idle
engine sleeps in the socket. Standard input is a pipe that the server holds: when it closes, because
the server ends or died, this process ends at once; only KV on its way to the warm tier is written
before.
"""

import contextlib
import faulthandler
import logging
import math
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, Protocol

import msgspec
import numpy as np
import zmq

from midfill.engine import messages
from midfill.engine.process.output_buffer import OutputBuffer
from midfill.engine.request import EngineRequest
from midfill.errors import InvalidRequestError, MidfillError
from midfill.system.logs import configure_logs
from midfill.system.process import freeze_objects, ignore_ends, without_collections
from midfill.system.progress import Progress

if TYPE_CHECKING:
    from midfill.engine.engine import Engine
    from midfill.engine.kv_transfer.transfers import KvTransfers

_log = logging.getLogger(__name__)

_PROGRESS_SECONDS = 0.05  # minimum between two reports of one loading stage
_STATS_SECONDS = 0.05  # maximum age of the server's numbers while the engine works
_SAVE_SECONDS = 2.0  # less than the server waits for this process to end
_MEMORY_KILL_SCORE = 300  # of 1000; a process like any other has 0
_MAX_SLEEP_SECONDS = 3600.0  # of an idle engine that has something to do later
_MAX_MESSAGES_PER_STEP = 256  # so that a flood of messages can't keep the engine from stepping

_Handled = (
    messages.Submit
    | messages.Cancel
    | messages.ExportKv
    | messages.ImportKv
    | messages.FindKv
    | messages.EndTransfer
    | messages.Ping
)

Send = Callable[[messages.FromEngine], None]


class _Channel:
    """The engine's end of the socket pair."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        if key := os.environ.pop(messages.KEY_VARIABLE, ""):
            own, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.curve_publickey, self._socket.curve_serverkey = own, key.encode()
        self._socket.connect(address)

    def send(self, message: messages.FromEngine) -> None:
        """Queue a message; never blocks. KV is a frame of its own, which nobody copies."""
        kv = []
        if isinstance(message, messages.TransferDone) and message.blob:
            kv, message = [message.blob], msgspec.structs.replace(message, blob=messages.NO_BLOB)
        self._socket.send_multipart([msgspec.msgpack.encode(message), *kv], copy=False)

    def receive(self) -> "Message":
        """Wait for the next message; return its request's id (b"" for none), its msgpack and KV."""
        request_id, payload, *kv = self._socket.recv_multipart(copy=False)
        return request_id.bytes, payload.bytes, kv[0].buffer if kv else messages.NO_BLOB

    def receive_first(self) -> messages.Prepare | messages.Start:
        """Receive one of the messages that come before the model is loaded."""
        _, payload, _ = self.receive()
        return msgspec.msgpack.decode(payload, type=messages.Prepare | messages.Start)

    def pending(self, seconds: float | None = 0.0) -> bool:
        """Whether ``receive`` would return at once, or does so within some time; None: any."""
        if seconds is None:
            return bool(self._socket.poll())
        return bool(self._socket.poll(math.ceil(1000.0 * min(seconds, _MAX_SLEEP_SECONDS))))

    def close(self) -> None:
        """Send what is queued and close the socket."""
        self._socket.close()
        self._context.term()


def main(address: str) -> NoReturn:
    """Load the model and run the engine; exit with status 1 if the model can't be loaded."""
    # Ctrl-C and many supervisors signal all of a server's processes: this one ends when its server
    # closes its input, so that answers in progress may end before.
    ignore_ends()
    faulthandler.enable()  # a crash, or the server's SIGABRT, tells where each thread was
    _volunteer_for_memory_kill()
    end = _End()
    threading.Thread(target=end.watch, name="parent-watch", daemon=True).start()
    channel = _Channel(address)
    started = time.perf_counter()
    try:
        channel.send(messages.Loading("loading libraries", 0, 1))
        progress = _throttled(channel.send)
        with without_collections():
            # The heavy imports: only this process pays for them, while the server gets ready.
            from midfill.engine.loading import load_engine
            from midfill.models.checkpoints.opening import open_model
            from midfill.runners.loading import prepare_runner

            while isinstance(start := channel.receive_first(), messages.Prepare):
                prepare_runner(start.options, progress)
            configure_logs(start.logs, process="engine")
            options = start.options
            progress("opening the model", 0, 1)
            checkpoint = open_model(Path(start.path), options.adapter_path, options.weights)
            buffer = OutputBuffer(checkpoint.tokenizer.token_bytes)
        engine, _, info = load_engine(checkpoint, options, progress, started)
    except Exception as error:
        if not isinstance(error, MidfillError):
            traceback.print_exc()
        channel.send(messages.Failed.of(error))
        channel.close()
        sys.exit(1)
    end.before = lambda: engine.kv_traffic.close(_SAVE_SECONDS)
    channel.send(messages.Ready(info))
    engine.prepare()  # while the server gets ready, too
    freeze_objects()
    run_loop(engine, buffer, channel)


def run_loop(engine: "Engine", buffer: OutputBuffer, channel: _Channel) -> NoReturn:
    """Receive messages, step the engine, send outputs; repeat."""
    inbox = Inbox(engine, buffer, channel.send)
    early = EarlyMessages(channel, inbox.is_awaited)
    engine.interrupted = early.look
    reported = 0.0
    while True:
        received = 0
        while received < _MAX_MESSAGES_PER_STEP or not engine.has_work():
            if not early.messages:
                if not channel.pending(0.0 if engine.has_work() else engine.idle_seconds()):
                    break
                early.messages.append(channel.receive())
            inbox.handle(*early.messages.popleft())
            received += 1
        produced = engine.step()
        for result in engine.kv_traffic.transfers.take_results():
            channel.send(result)
        now = time.monotonic()
        buffer.add(produced, now)
        outputs = buffer.take(now)
        is_due = now - reported >= _STATS_SECONDS or not engine.has_work()
        if outputs or is_due:
            # The tenants may be many, so not each step reports them.
            channel.send(
                messages.StepReport(
                    outputs, engine.stats(), engine.tenant_stats() if is_due else None
                )
            )
        if is_due:
            reported = now


Message = tuple[bytes, bytes, memoryview]
"""A request's id, msgpack, and KV."""


class MessageSource(Protocol):
    """Where messages come from; see ``_Channel``."""

    def pending(self) -> bool:
        """Whether there is a message."""

    def receive(self) -> Message:
        """Return the next message."""


class EarlyMessages:
    """Messages that were received amid a step. They are handled after it.

    Args:
        source: where they come from.
        is_awaited: whether a message's msgpack is a request that somebody waits for.

    Attributes:
        messages: the first one first.
    """

    def __init__(self, source: MessageSource, is_awaited: Callable[[bytes], bool]) -> None:
        self.messages: deque[Message] = deque()
        self._source = source
        self._is_awaited = is_awaited

    def look(self) -> bool:
        """Receive what is there; return whether somebody waits for some of it."""
        found = False
        while self._source.pending() and len(self.messages) < _MAX_MESSAGES_PER_STEP:
            message = self._source.receive()
            self.messages.append(message)
            found = found or self._is_awaited(message[1])
        return found


class Inbox:
    """Carries out the server's messages. A message that can't be handled fails its request alone.

    Args:
        engine: the engine.
        buffer: where the outputs of new requests will go.
        send: sends a message to the server.
    """

    def __init__(self, engine: "Engine", buffer: OutputBuffer, send: Send) -> None:
        self._engine = engine
        self._buffer = buffer
        self._send = send
        self._decoder: msgspec.msgpack.Decoder[_Handled] = msgspec.msgpack.Decoder(_Handled)

    def handle(self, request_id: bytes, payload: bytes, kv: memoryview | None = None) -> None:
        """Carry out one message.

        Args:
            request_id: the id of the request that it is about, UTF-8.
            payload: the message as msgpack.
            kv: the blob of an ImportKv, which travels beside it.
        """
        try:
            match self._decoder.decode(payload):
                case messages.Submit(request):
                    self._submit(request)
                case messages.Cancel(cancelled, index):
                    self._engine.cancel(cancelled, index)
                case messages.ExportKv(transfer_id, tenant, token_ids, start):
                    tokens = np.array(token_ids, np.int32)
                    self._transfers.start_export(transfer_id, tenant, tokens, start)
                case messages.ImportKv(transfer_id, tenant, blob, before):
                    tokens = np.array(before, np.int32)
                    self._transfers.start_import(transfer_id, tenant, kv or blob, tokens)
                case messages.EndTransfer(transfer_id):
                    self._transfers.end(transfer_id)
                case messages.FindKv(transfer_id, tenant, token_ids):
                    self._transfers.find(transfer_id, tenant, np.array(token_ids, np.int32))
                case messages.Ping():
                    self._send(messages.Pong())
        except Exception:
            name = request_id.decode(errors="replace")
            _log.exception("request %s could not be handled", name)
            # In case the request was added before the failure; the engine ignores unknown ones.
            with contextlib.suppress(Exception):
                self._engine.cancel(name)
            text = "the engine could not handle this request; the server's log has the details"
            self._send(messages.RequestFailed(name, text))

    def is_awaited(self, payload: bytes) -> bool:
        """Whether a message's msgpack is a request that somebody waits for."""
        with contextlib.suppress(msgspec.MsgspecError):  # handling it says what is wrong
            message = self._decoder.decode(payload)
            return isinstance(message, messages.Submit) and message.request.is_awaited
        return False

    @property
    def _transfers(self) -> "KvTransfers":
        return self._engine.kv_traffic.transfers

    def _submit(self, request: EngineRequest) -> None:
        try:
            self._engine.add(request)
        except InvalidRequestError as error:
            self._send(messages.Rejected(request.request_id, str(error), error.param, error.code))
        else:
            self._buffer.register(request)


def _volunteer_for_memory_kill() -> None:
    """Have Linux end this process, which is restarted, and not the server, if memory is out."""
    with contextlib.suppress(OSError, ValueError):
        path = Path("/proc/self/oom_score_adj")
        path.write_text(str(max(int(path.read_text()), _MEMORY_KILL_SCORE)))


def _throttled(send: Send) -> Progress:
    """Return a progress callback that skips reports which follow too soon on the last one."""
    last = 0.0

    def progress(stage: str, done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if 0 < done < total and now - last < _PROGRESS_SECONDS:
            return
        last = now
        send(messages.Loading(stage, done, total))

    return progress


class _End:
    """Ends this process when standard input ends, which means that the server is gone.

    Attributes:
        before: called first, for what is to be saved.
    """

    def __init__(self) -> None:
        self.before: Callable[[], None] = lambda: None

    def watch(self) -> None:
        """Wait for the end of standard input."""
        while os.read(0, 4096):
            pass
        with contextlib.suppress(Exception):
            self.before()
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
