"""The engine's own process: loads the model, then steps the engine and talks to the server.

Started by ``engine.client`` as ``python -m midfill.engine.process ADDRESS``. Requests and
cancellations are taken between steps, so they take effect within one; an idle engine sleeps in
the socket. Standard input is a pipe that the server holds: when it closes, because the server
ends or died, this process ends at once. There is nothing to save.
"""

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import msgspec
import zmq

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
from midfill.engine.output_buffer import OutputBuffer
from midfill.errors import InvalidRequestError, MidfillError
from midfill.system.progress import Progress

if TYPE_CHECKING:
    from midfill.engine.engine import Engine

_PROGRESS_SECONDS = 0.05
_STATS_SECONDS = 0.05  # the server's numbers are at most so old while the engine works
_MESSAGES_A_STEP = 256  # taken at most before the next step, so that a flood can't stop it


class _Channel:
    """The engine's end of the pair."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)

    def send(self, message: FromEngine) -> None:
        self._socket.send(self._encoder.encode(message))

    def receive(self) -> ToEngine:
        """The next message; sleeps until there is one."""
        return self._decoder.decode(self._socket.recv())

    def pending(self) -> bool:
        """Whether ``receive`` would return at once."""
        return bool(self._socket.poll(0))

    def close(self) -> None:
        """Send what is left and end."""
        self._socket.close()
        self._context.term()


def main(address: str) -> NoReturn:
    """Load and run; exits with status 1 when the model can't be loaded."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's to act on
    threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    channel = _Channel(address)
    started = time.perf_counter()
    try:
        start = channel.receive()
        assert isinstance(start, Start)
        engine, buffer, info = _load(start, started, channel.send)
    except Exception as error:
        if not isinstance(error, MidfillError):
            traceback.print_exc()
        message = str(error) or type(error).__name__
        channel.send(Failed(type(error).__name__, message))
        channel.close()
        sys.exit(1)
    channel.send(Ready(info))
    run_loop(engine, buffer, channel)


def run_loop(engine: "Engine", buffer: OutputBuffer, channel: _Channel) -> NoReturn:
    """Alternate between taking messages and stepping."""
    told = 0.0
    while True:
        taken = 0
        while not engine.has_work() or (taken < _MESSAGES_A_STEP and channel.pending()):
            message = channel.receive()
            taken += 1
            if isinstance(message, Cancel):
                engine.cancel(message.request_id, message.index)
            elif isinstance(message, Submit):
                _add(engine, message, buffer, channel)
        produced = engine.step()
        now = time.monotonic()
        buffer.add(produced, now)
        outputs = buffer.take(now)
        if outputs or now - told >= _STATS_SECONDS or not engine.has_work():
            channel.send(StepReport(outputs, engine.stats()))
            told = now


def _add(engine: "Engine", message: Submit, buffer: OutputBuffer, channel: _Channel) -> None:
    try:
        engine.add(message.request)
        buffer.expect(message.request)
    except InvalidRequestError as error:
        request_id = message.request.request_id
        channel.send(Rejected(request_id, str(error), error.param, error.code))


def _load(
    start: Start, started: float, send: Callable[[FromEngine], None]
) -> tuple["Engine", OutputBuffer, EngineInfo]:
    """Load the model and build its engine.

    Raises:
        MidfillError: the checkpoint or the options can't be used.
    """
    send(Loading("loading libraries", 0, 1))
    # The heavy imports: only this process pays for them.
    from midfill.checkpoints.opening import open_model
    from midfill.engine.loading import load_engine

    options = start.options
    checkpoint = open_model(Path(start.path), options.adapter_path, options.weights)
    engine, _, info = load_engine(checkpoint, options, _throttled(send), started)
    return engine, OutputBuffer(checkpoint.tokenizer.token_bytes), info


def _throttled(send: Callable[[FromEngine], None]) -> Progress:
    """Progress that is told when a stage starts or ends, and now and then between."""
    last = [0.0]

    def progress(stage: str, done: int, total: int) -> None:
        now = time.monotonic()
        if 0 < done < total and now - last[0] < _PROGRESS_SECONDS:
            return
        last[0] = now
        send(Loading(stage, done, total))

    return progress


def _end_with_parent() -> None:
    """Wait for the end of standard input: the server is gone, and so must this process be."""
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s engine %(levelname)s %(message)s")
    main(sys.argv[1])
