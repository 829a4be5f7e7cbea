"""A small server of OpenAI's or llama.cpp's API behind a gateway, which can misbehave.

It has real sockets, and a model that knows what to answer. Its tokens are characters, but for
special tokens, which it parses in every text. It counts what a cache of whole blocks would hold.
"""

import asyncio
import json
import math
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

from processes import bound_socket

Behaviour = Literal[
    "well", "silent", "garbage", "html", "closes", "closes-midway", "error-event", "refuses",
    "fails", "busy", "unauthorised", "endless-line", "unknown-model",
]  # fmt: skip

QWEN = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|endoftext|>", "<|fim_pad|>",
        "<|repo_name|>", "<|file_sep|>", "<|im_end|>")  # fmt: skip
PAD = "\ue000"
"""In an answer of llama.cpp's kind: the special token <|fim_pad|>, which has no text."""
CHAT_USAGE = {"prompt_tokens": 30, "completion_tokens": 20}
"""What the server says that a chat has cost."""
_SPECIAL = 0x200000  # ids of special tokens
_BOS = 0x300000


@dataclass
class StubModel:
    """What the server says.

    Attributes:
        answer: the answer to a prompt, which shows special tokens by their names.
        special: its special tokens.
        name, owner, root: how it is listed.
        context: maximum tokens of a prompt and its answer.
        tokenizes: whether it has /tokenize.
        piece: characters per message.
        block: tokens of its cache's blocks.
        forces: whether it knows regular expressions and grammars for an answer; "own-end" lets no
            token end such an answer but the tokenizer's own.
    """

    answer: Callable[[str], str] = lambda prompt: "x + 1" if prompt.endswith(" ") else " x + 1"
    special: tuple[str, ...] = QWEN
    name: str = "stub-coder"
    owner: str = "vllm"
    root: str = ""
    context: int = 4096
    tokenizes: bool = True
    piece: int = 2
    block: int = 1
    forces: Literal["yes", "own-end", "no"] = "no"

    def ids(self, text: str, *, parse: bool = True) -> list[int]:
        """Tokenise a text."""
        pattern = "|".join(map(re.escape, self.special)) if parse and self.special else "(?!)"
        ids: list[int] = []
        start = 0
        for match in re.finditer(pattern, text):
            ids += map(ord, text[start : match.start()])
            ids.append(_SPECIAL + self.special.index(match.group()))
            start = match.end()
        return [*ids, *map(ord, text[start:])]

    def text(self, ids: Iterable[int]) -> str:
        """Return the text of tokens, special ones in double brackets."""
        return "".join(
            f"⟦{self.special[each - _SPECIAL]}⟧"
            if _SPECIAL <= each < _BOS
            else ""
            if each == _BOS
            else chr(each)
            for each in ids
        )


@dataclass
class Received:
    """A request for a completion.

    Attributes:
        path, body: as it came.
        prompt: what the model reads.
        ids: its tokens.
        headers: lower-case names.
        abandoned: whether the client closed the connection before the answer's end.
    """

    path: str
    body: dict[str, Any]
    prompt: str
    ids: list[int]
    headers: dict[str, str]
    abandoned: bool = False


@dataclass
class StubUpstream:
    """The server; use it as a context manager.

    Attributes:
        model: what it serves.
        behaviour: how it answers completions; may be changed while it runs.
        received: the completions that it was asked for.
        hold: seconds between two pieces of an answer.
        chats: the chats that it was asked for.
        tried: requests that only find out what it can do.
        requests_per_connection: it closes a connection on which more come, as if that had been idle
            for too long.
        respond: returns the bytes of the whole answer to a path and a body, after which the
            connection is closed; None answers as ever.
    """

    model: StubModel = field(default_factory=StubModel)
    behaviour: Behaviour = "well"
    received: list[Received] = field(default_factory=list)
    hold: float = 0.0
    chats: list[dict[str, Any]] = field(default_factory=list)
    tried: list[dict[str, Any]] = field(default_factory=list)
    requests_per_connection: float = math.inf
    respond: Callable[[str, Any], AsyncIterator[bytes] | None] | None = None
    port: int = 0
    healthy: bool = True
    tokenized: int = 0

    def __post_init__(self) -> None:
        self._cached: set[tuple[int, ...]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._server: asyncio.Server | None = None
        self._socket = bound_socket()
        self.port = self._socket.getsockname()[1]

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def prompts(self) -> list[str]:
        """What the model was asked to continue."""
        return [each.prompt for each in self.received]

    def __enter__(self) -> "StubUpstream":
        self._thread.start()
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._socket.close()

    def start(self) -> None:
        """Listen."""

        async def listen() -> None:
            self._server = await asyncio.start_server(self._serve, sock=self._socket)

        asyncio.run_coroutine_threadsafe(listen(), self._loop).result(60)

    def stop(self) -> None:
        """Listen no more, but keep the port, and cut off whoever is connected."""

        async def end() -> None:
            if self._server is not None:
                self._server.close()
                self._server = None
                self._socket = bound_socket(self.port)
            others = [each for each in asyncio.all_tasks() if each is not asyncio.current_task()]
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(60)

    # --- HTTP ---

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served = 0
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                first, *lines = head.strip().split("\r\n")
                headers = {
                    name.lower(): value.strip()
                    for name, _, value in (line.partition(":") for line in lines)
                }
                data = await reader.readexactly(int(headers.get("content-length", 0)))
                served += 1
                if served > self.requests_per_connection:
                    return
                method, path, _ = first.split(" ")
                body = json.loads(data) if data else None
                await self._route(method, path, body, headers, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _route(
        self,
        method: str,
        path: str,
        body: Any,
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        model = self.model
        raw = None if self.respond is None else self.respond(path, body)
        if raw is not None:
            async for chunk in raw:
                writer.write(chunk)
                await writer.drain()
            raise ConnectionError  # the connection ends with the answer
        if path == "/health":
            _send(writer, 200 if self.healthy else 500, {})
        elif path == "/v1/models":
            entry = {"id": model.name, "owned_by": model.owner, "max_model_len": model.context}
            _send(writer, 200, {"data": [{**entry, "root": model.root}]})
        elif path == "/props":
            settings = {"n_ctx": model.context}
            _send(writer, 200, {"total_slots": 4, "default_generation_settings": settings})
        elif path == "/tokenize" and model.tokenizes:
            self.tokenized += 1
            parse = body.get("parse_special", True)
            ids = model.ids(body.get("content", body.get("prompt")), parse=parse)
            if body.get("add_special") or body.get("add_special_tokens"):
                ids = [_BOS, *ids]
            _send(writer, 200, {"tokens": ids})
        elif path in ("/v1/completions", "/completion"):
            await self._complete(path, body, headers, reader, writer)
        elif path == "/v1/chat/completions":
            self.chats.append(body)
            if self.behaviour == "fails":
                _send(writer, 500, {"error": {"message": "no"}})
            elif "messages" not in body:
                _send(writer, 400, {"error": {"message": "messages are missing"}})
            elif body.get("stream"):
                begin(writer)
                for piece in ({"said": "Hello"}, {"said": " there", "usage": CHAT_USAGE}):
                    write(writer, b"data: " + json.dumps(piece).encode() + b"\n\n")
                write(writer, b"data: [DONE]\n\n")
                write(writer, b"")
            else:
                _send(writer, 200, {"said": "Hello there", "usage": CHAT_USAGE})
        else:
            _send(writer, 404, {"error": {"message": f"nothing at {path}"}})
        await writer.drain()

    async def _complete(
        self,
        path: str,
        body: dict[str, Any],
        headers: dict[str, str],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        prompt = body["prompt"]
        ids = prompt if isinstance(prompt, list) else [_BOS, *self.model.ids(prompt)]
        request = Received(path, body, self.model.text(ids), ids, headers)
        if body["prompt"] == "1" and body.get("logit_bias"):
            self.tried.append(body)
        else:
            self.received.append(request)
        cached = self._look_up(ids)
        if not await self._misbehave(request, writer):
            return
        chunks = self._chunks(path, body, request, cached)
        watch = asyncio.ensure_future(reader.read(1))
        begin(writer)
        for number, chunk in enumerate(chunks):
            if self.behaviour == "closes-midway" and number == 1:
                writer.close()
                raise ConnectionError
            await asyncio.sleep(self.hold)
            if watch.done():
                request.abandoned = True
                raise ConnectionError
            write(writer, b"data: " + json.dumps(chunk).encode() + b"\n\n")
            await writer.drain()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
        if path == "/v1/completions":
            write(writer, b"data: [DONE]\n\n")
        write(writer, b"")

    def _look_up(self, ids: list[int]) -> int:
        """Return how many tokens were cached, and cache all whole blocks."""
        block = self.model.block
        ends = range(block, len(ids) + 1, block)
        cached = max((end for end in ends if tuple(ids[:end]) in self._cached), default=0)
        self._cached.update(tuple(ids[:end]) for end in ends)
        return min(cached, len(ids) - 1)

    async def _misbehave(self, request: Received, writer: asyncio.StreamWriter) -> bool:
        """Behave; return whether the completion is to be answered."""
        statuses = {"refuses": 400, "fails": 500, "busy": 429, "unauthorised": 401,
                    "unknown-model": 404}  # fmt: skip
        behaviour = self.behaviour
        if behaviour in statuses:
            messages = {"refuses": "maximum context length is 16 tokens",
                        "unknown-model": "The model does not exist."}  # fmt: skip
            message = messages.get(behaviour, "no")
            _send(writer, statuses[behaviour], {"error": {"message": message}})
        elif behaviour == "silent":
            await asyncio.sleep(3600)
        elif behaviour == "html":
            _send(writer, 200, b"<html>It works!</html>", "text/html")
        elif behaviour in ("closes", "garbage", "error-event", "endless-line"):
            said = {
                "closes": b"",
                "garbage": b"data: {nonsense\n\n",
                "error-event": b'data: {"error": {"message": "CUDA is out of luck"}}\n\n',
                "endless-line": b"data: " + b"x" * 5_000_000,
            }
            begin(writer)
            if said[behaviour]:
                write(writer, said[behaviour])
            await writer.drain()
            raise ConnectionError
        else:
            return True
        return False

    def _answer(self, body: dict[str, Any], prompt: str) -> str:
        """Return what the model writes, after what it has to begin with."""
        stops = {str(each) for each in body.get("stop_token_ids", ())}
        wanted = stops.intersection(body.get("logit_bias", {}))
        if self.model.forces == "no":
            return "" if wanted else self.model.answer(prompt)
        start = _forced_start(body)
        if wanted and self.model.forces == "own-end" and start:
            wanted = set()
        return start if wanted else start + self.model.answer(prompt + start)

    def _chunks(
        self, path: str, body: dict[str, Any], request: Received, cached: int
    ) -> list[dict[str, Any]]:
        limit = body.get("max_tokens", body.get("n_predict"))
        text = self._answer(body, request.prompt)
        ended = "length" if len(text) >= limit else "stop"
        text = text[:limit]
        pieces = [text[at : at + self.model.piece] for at in range(0, len(text), self.model.piece)]
        prompt_tokens = len(request.ids)
        if path == "/completion":
            events: list[dict[str, Any]] = [
                {"content": "", "tokens": [_SPECIAL + 4], "stop": False}
                if PAD in piece
                else {"content": piece, "tokens": list(map(ord, piece)), "stop": False}
                for piece in pieces
            ]
            kind = "limit" if ended == "length" else "eos"
            last = {"content": "", "stop": True, "stop_type": kind, "tokens_predicted": len(text),
                    "tokens_evaluated": prompt_tokens, "timings": {"cache_n": cached}}  # fmt: skip
            return [*events, last]
        usage = {"prompt_tokens": prompt_tokens, "completion_tokens": len(text) * body.get("n", 1),
                 "prompt_tokens_details": {"cached_tokens": cached}}  # fmt: skip
        chunks = []
        for index in range(body.get("n", 1)):
            for piece in pieces:
                choice = {"index": index, "text": piece, "finish_reason": None}
                if body.get("return_token_ids"):
                    choice["token_ids"] = list(map(ord, piece))
                chunks.append({"choices": [choice]})
            end = {"index": index, "text": "", "finish_reason": ended}
            chunks.append({"choices": [end]})
        return [*chunks, {"choices": [], "usage": usage}]


def _forced_start(body: dict[str, Any]) -> str:
    """Return what an answer has to begin with."""
    grammar = re.fullmatch(r'root ::= "(.*)" \[\^\\x00\]\*', body.get("grammar", ""))
    regex = body.get("structured_outputs", {}).get("regex", body.get("regex", ""))
    start = grammar[1] if grammar else regex.removesuffix(r"[\s\S]*")
    return re.sub(r"\\(.)", lambda match: {"n": "\n"}.get(match[1], match[1]), start)


def begin(writer: asyncio.StreamWriter) -> None:
    """Begin a stream of events."""
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    )


def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write a chunk; an empty one ends the response."""
    writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _send(
    writer: asyncio.StreamWriter, status: int, body: object, kind: str = "application/json"
) -> None:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = [f"HTTP/1.1 {status} X", f"content-type: {kind}", f"content-length: {len(data)}", "", ""]
    writer.write("\r\n".join(head).encode() + data)
