"""Serving on standard input and output, which belong to the protocol alone."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from functools import partial
from typing import BinaryIO

from pygls.io_ import run_async

from midfill.lsp.language_server import MidfillLanguageServer
from midfill.lsp.settings import Settings

_log = logging.getLogger(__name__)

_CHUNK = 1 << 16  # bytes
_MAX_HEADER = 1 << 20  # bytes

_LIBRARIES = ("pygls", "httpx", "httpcore", "asyncio")


def serve_stdio(settings: Settings) -> int:
    """Serve the client that has started this process; return the exit status.

    It is LSP's: 0 after an orderly shutdown, 1 if the client is gone without one.
    """
    return asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> int:
    task = asyncio.current_task()
    assert task is not None
    with contextlib.suppress(NotImplementedError):  # Windows has no such handlers
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    server = MidfillLanguageServer(settings)
    server.pygls.protocol.set_writer(StdoutWriter(_take_stdout()))
    try:
        await run_async(
            stop_event=threading.Event(),
            reader=StdinReader(sys.stdin.fileno()),
            protocol=server.pygls.protocol,
            logger=_quiet(),
            error_handler=lambda error, _: _log.warning("a message is ignored: %s", error),
        )
        return 1
    except SystemExit as end:  # pygls ends so after LSP's exit
        return end.code if isinstance(end.code, int) else 1
    except asyncio.CancelledError:
        return 128 + signal.SIGTERM
    finally:
        await server.close()


class StdinReader:
    """Reads a file descriptor without blocking the event loop.

    It is read by a thread that does not keep the process from ending.
    """

    def __init__(self, descriptor: int) -> None:
        self._stream = asyncio.StreamReader(limit=_MAX_HEADER)
        loop = asyncio.get_running_loop()
        threading.Thread(
            target=_feed, args=(descriptor, self._stream, loop), daemon=True, name="stdin"
        ).start()

    async def readline(self) -> bytes:
        """Return the next line; b"" at the end."""
        # A message starts a task. Here it gets to run up to where it first waits, before the next
        # message is read: that is what orders requests and changes of documents.
        await asyncio.sleep(0)
        try:
            return await self._stream.readline()
        except ValueError:
            return b"\n"  # longer than any header: pygls skips it

    async def readexactly(self, count: int) -> bytes:
        """Return so many bytes; b"" if there are fewer before the end."""
        try:
            return await self._stream.readexactly(count)
        except asyncio.IncompleteReadError as error:
            _log.warning(
                "the input ended %d bytes before the end of a message", count - len(error.partial)
            )
            return b""


class StdoutWriter:
    """Writes to a file; once it is closed or broken, what is written is dropped."""

    def __init__(self, file: BinaryIO) -> None:
        self._file: BinaryIO | None = file

    def write(self, data: bytes) -> None:
        """Write a message."""
        if self._file is None:
            return
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            _log.warning("the client no longer reads: %s", error.strerror)
            self._file = None

    def close(self) -> None:
        """Write nothing from now on."""
        self._file = None


def _feed(descriptor: int, stream: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
    """Feed what can be read to a stream, until the end."""
    with contextlib.suppress(RuntimeError):  # the loop has ended
        while True:
            try:
                data = os.read(descriptor, _CHUNK)
            except OSError:
                data = b""
            if not data:
                loop.call_soon_threadsafe(stream.feed_eof)
                return
            loop.call_soon_threadsafe(partial(stream.feed_data, data))


def _take_stdout() -> BinaryIO:
    """Return standard output for the protocol; what anything else prints goes to standard error."""
    sys.stdout.flush()
    file = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return file


def _quiet() -> logging.Logger:
    """Return a logger for pygls's loop, which logs with a traceback what the error handler logs."""
    logger = logging.getLogger(f"{__name__}.loop")
    logger.disabled = True
    return logger


def log_to_stderr(level: str) -> None:
    """Log what midfill has to say from a level on, and the errors of libraries."""
    logging.basicConfig(
        level=level.upper(), stream=sys.stderr, format="midfill lsp: %(levelname)s %(message)s"
    )
    if level == "debug":
        return
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.ERROR)
    logging.getLogger("pygls.protocol.json_rpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether pygls logs something other than the traceback of a fault that is one line already."""
    return not record.getMessage().startswith("Unable to deserialize message")
