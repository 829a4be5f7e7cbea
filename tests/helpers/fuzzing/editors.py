"""Target: the frames that an editor sends to the language server."""

import asyncio
import json
import logging
import ssl
import threading
from functools import cache
from unittest.mock import patch

from lsp_editor import frame
from pygls.io_ import run_async

from fuzzing.target import Target
from midfill.lsp.language_server import MidfillLanguageServer
from midfill.lsp.settings import Settings

_INTERNAL_ERROR = -32603
_NOBODY = Settings(url="http://127.0.0.1:9", debounce_ms=0)


class _Output:
    """What the server writes."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    def close(self) -> None: ...


@cache
def _runner() -> asyncio.Runner:
    logging.getLogger("pygls").setLevel(logging.CRITICAL)
    logging.getLogger("midfill.lsp").setLevel(logging.CRITICAL)
    return asyncio.Runner()


_tls_context = cache(ssl.create_default_context)  # takes longer than all the rest


def _speak(data: bytes) -> None:
    with patch.object(ssl, "create_default_context", _tls_context):
        output = _runner().run(_session(data))
    for message in _messages(output):
        error = message.get("error")
        assert error is None or error["code"] != _INTERNAL_ERROR, f"a bug: {error}"


async def _session(data: bytes) -> bytes:
    """Send a new server some input, and return its output."""
    reader, output, faults = asyncio.StreamReader(limit=1 << 16), _Output(), list[Exception]()
    reader.feed_data(data)
    reader.feed_eof()
    server = MidfillLanguageServer(_NOBODY)
    server.pygls.protocol.set_writer(output)
    try:
        await run_async(
            stop_event=threading.Event(),
            reader=_Frames(reader),
            protocol=server.pygls.protocol,
            logger=logging.getLogger("fuzzing"),
            error_handler=lambda error, _: faults.append(error),
        )
        await asyncio.sleep(0)
    except SystemExit:  # LSP's exit
        pass
    finally:
        await server.close()
    return output.data


class _Frames:
    """Standard input as ``lsp.stdio`` reads it."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream

    async def readline(self) -> bytes:
        await asyncio.sleep(0)
        try:
            return await self._stream.readline()
        except ValueError:
            return b"\n"

    async def readexactly(self, count: int) -> bytes:
        try:
            return await self._stream.readexactly(count)
        except asyncio.IncompleteReadError:
            return b""


def _messages(output: bytes) -> list[dict[str, object]]:
    found = []
    while output:
        header, _, output = output.partition(b"\r\n\r\n")
        (length,) = (
            int(line.removeprefix(b"Content-Length: "))
            for line in header.split(b"\r\n")
            if line.startswith(b"Content-Length")
        )
        found.append(json.loads(output[:length]))
        output = output[length:]
    return found


def _seeds() -> list[bytes]:
    def call(method: str, number: object = None, **params: object) -> bytes:
        message = {"jsonrpc": "2.0", "method": method, "params": params}
        return frame(message if number is None else {**message, "id": number})

    uri = "file:///a.py"
    document = {"uri": uri, "languageId": "python", "version": 1, "text": "a = 1\nb\n"}
    place = {"line": 1, "character": 1}
    start = call("initialize", 1, processId=None, rootUri=None, capabilities={})
    ready = start + call("initialized")
    opened = ready + call("textDocument/didOpen", textDocument=document)
    change = {"range": {"start": place, "end": place}, "text": "c\U0001f642"}
    changed = call(
        "textDocument/didChange",
        textDocument={"uri": uri, "version": 2},
        contentChanges=[change, {"text": "new"}],
    )
    ask = call(
        "textDocument/inlineCompletion", 2, textDocument={"uri": uri}, position=place,
        context={"triggerKind": 1},
    )  # fmt: skip
    goodbye = call("textDocument/didClose", textDocument={"uri": uri}) + call("shutdown", 3)
    configure = call("workspace/didChangeConfiguration", settings={"midfill": {"maxTokens": 5}})
    return [opened + changed + ask + goodbye + call("exit"), opened + changed, ready + configure]


TARGETS = {
    "lsp-frames": Target(
        _speak,
        _seeds,
        2048,
        (b"Content-Length: 9\r\n\r\n", b"\r\n\r\n", b"null", b"-1", b'"id":', b"[]", b"9" * 30),
    )
}
