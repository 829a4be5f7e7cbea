"""A gateway in front of a server that answers whatever could hurt it.

Answers are made from what the APIs send: with values of other kinds and sizes, framed by lengths
that lie, compressed, redirecting, endless, slow, cut anywhere, and mutated byte by byte. Clients
must get an answer or one line of error, nobody else may be asked, and the gateway's event loop may
not stand still: the processor time of its thread between two beats is measured, which other work
on the machine doesn't change.
"""

import asyncio
import contextlib
import ctypes
import gc
import gzip
import json
import os
import random
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from gateway_serving import Served, serve
from hostile_answers import EVENTS, WHOLE, head
from stub_upstream import StubUpstream

from fuzzing.mutation import mutated
from midfill.serving.gateway.breaker import Breaker
from midfill.system.process import freeze_objects

_COMPLETIONS, _CHATS, _TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"
_SELF = ("/v1/models", "/health", "/props", "/metrics")
_EXPECTED = (200, 400, 429, 502, 503)
_UPSTREAM_SECONDS = 0.5
_CLIENTS = 4
_MAX_BYTES = 24_000_000  # of one answer


@dataclass
class HostileRun:
    """What a run has found.

    Attributes:
        answers: hostile answers that were given.
        statuses: what clients got, by status.
        bugs: one line each, with the number of the answer.
        stall: the longest processor time of the gateway's thread between two beats, in seconds.
        stalled_by: the numbers of the answers in progress then.
        grown_bytes: memory that was gained after the first half, its garbage collected.
    """

    answers: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    bugs: list[str] = field(default_factory=list)
    stall: float = 0.0
    stalled_by: tuple[int, ...] = ()
    grown_bytes: int = 0


class _NeverOpen(Breaker):
    """Spares nobody: each answer is to be asked for."""

    def record_failure(self) -> None:
        """Record nothing."""


async def attack(numbers: range, seed: int, report: Callable[[str], None] = print) -> HostileRun:
    """Have a gateway ask for hostile answers.

    Args:
        numbers: which; each can be made again by its seed and number.
        seed: makes them.
        report: is told how far it is.
    """
    run, active = HostileRun(), dict[int, float]()
    with StubUpstream() as upstream, StubUpstream() as canary, ThreadPoolExecutor(_CLIENTS) as pool:
        async with serve(upstream.url, upstream_timeout=_UPSTREAM_SECONDS) as gateway:
            (served,) = gateway.gateway.pool.upstreams
            served.breaker = _NeverOpen()
            freeze_objects()  # as a server's are once it listens
            beat = asyncio.create_task(_beat(run, active))
            loop, memory = asyncio.get_running_loop(), 0
            for start in range(0, len(numbers), _CLIENTS):
                group = numbers[start : start + _CLIENTS]
                made = [Answer(seed, each, canary.url) for each in group]
                waiting = {path: [each for each in made if each.path == path] for path in _PATHS}
                upstream.respond = lambda path, body, waiting=waiting: (
                    waiting[path].pop().sent() if waiting.get(path) else None
                )
                work = []
                for each in made:
                    active[each.number] = time.monotonic()
                    work.append(_ask(each, gateway, loop, pool, run))
                await asyncio.gather(*work)
                active.clear()
                served.fault = None
                upstream.received.clear()
                upstream.chats.clear()
                run.answers += len(made)
                if start % 400 < _CLIENTS:
                    report(f"{run.answers} answers, {len(run.bugs)} bugs, {run.stall:.3f} s stall")
                if not memory and start >= len(numbers) // 2:
                    memory = await asyncio.to_thread(_memory)
            run.grown_bytes = await asyncio.to_thread(_memory) - memory
            upstream.respond = None
            answer = await gateway.complete(prompt="a =", suffix="\n")
            if answer["choices"][0]["text"] != " x + 1":
                run.bugs.append(f"after all, a good answer is {answer}")
            for _ in range(100):
                if not (running := gateway.gateway.service.engine.stats.running):
                    break
                await asyncio.sleep(0.1)
            if running:
                run.bugs.append(f"{running} requests still count as running")
            beat.cancel()
            gc.unfreeze()
        if canary.received or canary.chats or canary.tokenized:
            run.bugs.append("a redirect was followed")
    return run


async def _beat(run: HostileRun, active: dict[int, float]) -> None:
    before = time.thread_time()
    while True:
        await asyncio.sleep(0)
        now = time.thread_time()
        if now - before > run.stall:
            run.stall, run.stalled_by = now - before, tuple(active)
        await asyncio.sleep(0.001)
        before = time.thread_time()


def _memory() -> int:
    gc.collect()
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what is free, but was not given back yet, is no growth
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def _ask(
    answer: "Answer",
    gateway: Served,
    loop: asyncio.AbstractEventLoop,
    pool: ThreadPoolExecutor,
    run: HostileRun,
) -> None:
    """Have the gateway ask for an answer, and judge what becomes of it."""
    if answer.path in _SELF:
        try:
            await asyncio.wait_for(gateway.gateway.pool.check(), 60)
        except Exception as error:
            run.bugs.append(f"answer {answer.number} ends the health checks: {error!r}")
        return
    url = str(gateway.client.base_url)
    status, fault = await loop.run_in_executor(pool, _client, url, answer)
    run.statuses[status] += 1
    if fault:
        run.bugs.append(f"answer {answer.number} to {answer.path}: {fault}")


def _client(url: str, answer: "Answer") -> tuple[int, str]:
    """Ask; return the status and what is wrong with the answer."""
    path = _CHATS if answer.path == _CHATS else _COMPLETIONS
    body: dict[str, Any] = {"stream": answer.streamed, "max_tokens": 40}
    if path == _CHATS:
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        # Text that spells a special token has to be tokenised by the server.
        spelled = "<|fim_middle|>" if answer.path == _TOKENIZE else ""
        body |= {"prompt": f"{spelled}{answer.number} x.app", "suffix": "\n"}
    try:
        response = httpx.post(f"{url}{path}", json=body, timeout=60, trust_env=False)
    except httpx.HTTPError as error:
        return 0, f"no whole answer: {error!r}"
    status, text = response.status_code, response.text
    if status not in _EXPECTED:
        return status, f"status {status}: {text[:200]}"
    if status == 200 and answer.streamed:
        return status, "" if text.endswith("data: [DONE]\n\n") else f"ends with {text[-80:]!r}"
    try:
        value = json.loads(text)
        message = value["error"]["message"] if status != 200 else ""
    except (ValueError, LookupError, TypeError):
        return status, f"no answer of the API: {text[:200]}"
    good = message.isprintable() and len(message) < 1500
    return status, "" if good else f"an odd message: {message[:200]!r}"


_PATHS = (_COMPLETIONS, _CHATS, _TOKENIZE, *_SELF)
_TEXTS: tuple[Any, ...] = (
    "", "x", "\n" * 300, "\x1b[2J", "\ud800", "\0", "x" * 100_000, "é" * 9000, None, 7, ["x"], {},
)  # fmt: skip
_NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2**31, 2**40, 2**63, 2**64, 10**400, 0.5, 1e308, float("nan"), True, None, "7", [7],
)  # fmt: skip


class Answer:
    """One hostile answer.

    Args:
        seed, number: make it.
        elsewhere: a server that nobody may ask.

    Attributes:
        number: the same.
        path: what it answers.
        streamed: whether the client asks for a stream.
    """

    def __init__(self, seed: int, number: int, elsewhere: str) -> None:
        self._rng = rng = random.Random(f"{seed} {number}")
        self.number = number
        self.path = rng.choices(_PATHS, (8, 6, 1, 2, 1, 1, 1))[0]
        self.streamed = self.path in (_COMPLETIONS, _CHATS) and rng.random() < 0.6
        self._elsewhere = elsewhere

    async def sent(self) -> AsyncIterator[bytes]:
        """Yield its bytes as they are sent; the connection is closed after them."""
        rng = self._rng
        if rng.random() < 0.3:  # lies in what it says alone
            yield head(kind=self._kind) + self._body()
            return
        data = self._framed(self._body())
        if rng.random() < 0.2:
            data = mutated([data[:20_000] or b"x"], (), 20_000, rng.randrange(2**32))
        if rng.random() < 0.3:
            data = data[: rng.randrange(len(data) + 1)]
        kind = rng.random()
        if kind < 0.2:  # byte by byte, or nearly
            size = rng.choice((1, 2, 7))
            for at in range(0, min(len(data), 600), size):
                yield data[at : at + size]
            yield data[600:]
        elif kind < 0.28:  # slowly
            for at in range(0, min(len(data), 300), 30):
                yield data[at : at + 30]
                await asyncio.sleep(0.02)
            yield data[300:]
        else:
            yield data
        if kind > 0.9:  # for ever
            tail = rng.choice((b" ", b"\n", b": c\n", b"data: {}\n\n", b"x", data[-64:] or b"y"))
            block = tail * (65_536 // len(tail))
            for _ in range(rng.choice((1, 16, _MAX_BYTES // 65_536))):
                yield block
        elif kind > 0.86:
            await asyncio.sleep(2 * _UPSTREAM_SECONDS)

    @property
    def _kind(self) -> str:
        streams = self.path == _COMPLETIONS or (self.path == _CHATS and self.streamed)
        return EVENTS if streams else WHOLE

    def _body(self) -> bytes:
        rng, path = self._rng, self.path
        if self._kind == EVENTS:
            events = [self._event() for _ in range(rng.choice((0, 1, 3, 40)))]
            ended = b"data: [DONE]\n\n" if rng.random() < 0.7 else b""
            return b"".join(events) + ended
        if path == "/metrics":
            return b'x{block_size="' + b"9" * rng.choice((1, 9, 9000)) + b'"} 1\n'
        return _dumped(self._value())

    def _event(self) -> bytes:
        rng = self._rng
        if rng.random() < 0.05:
            return rng.choice((b"data: [DONE]\n\n", b": comment\n", b"event: x\n", b"nonsense\n"))
        if rng.random() < 0.05:
            deep = rng.choice((10, 1000, 100_000))
            return b"data: " + b'{"a":[' * deep + b"\n\n"
        if rng.random() < 0.03:
            small = rng.choice((b"data: {}\n", b'data:{"choices":[]}\n', b":\n"))
            return small * rng.choice((1, 1000, 100_000))
        return b"data: " + _dumped(self._value()) + b"\n\n"

    def _value(self) -> Any:
        """Return an answer's object, each of whose parts may be anything."""
        choice = {
            "index": self._number(0), "text": self._text("x"), "token_ids": self._ids(),
            "finish_reason": self._rng.choice((None, "stop", "stop", "length", self._text("stop"))),
            "delta": {"content": self._text("x")},
        }  # fmt: skip
        usage = {
            "prompt_tokens": self._number(3), "completion_tokens": self._number(4),
            "prompt_tokens_details": {"cached_tokens": self._number(1)},
        }  # fmt: skip
        card = {
            "id": self._text("stub-coder"), "owned_by": self._text("vllm"),
            "max_model_len": self._number(4096), "root": self._text(""),
            "midfill": {"fim_tokens": self._ids()},
        }  # fmt: skip
        whole: dict[str, Any] = {
            "choices": _some(choice, self._rng.choice((0, 1, 1, 1, 2, 500))),
            "usage": usage,
            "tokens": self._ids(),
            "data": _some(card, self._rng.choice((0, 1, 1, 1, 900))),
            "total_slots": self._number(4),
            "default_generation_settings": {"n_ctx": self._number(4096)},
        }
        for name in list(whole):
            if self._rng.random() < 0.04:
                whole[name] = self._rng.choice((*_TEXTS, *_NUMBERS))
        if self._rng.random() < 0.04:
            whole["error"] = self._rng.choice((*_TEXTS, {"message": self._text("no")}))
        return whole if self._rng.random() < 0.97 else self._rng.choice((*_TEXTS, *_NUMBERS))

    def _number(self, usual: int) -> Any:
        return usual if self._rng.random() < 0.96 else self._rng.choice(_NUMBERS)

    def _text(self, usual: str) -> Any:
        return usual if self._rng.random() < 0.96 else self._rng.choice(_TEXTS)

    def _ids(self) -> Any:
        odd = self._rng.random()
        if odd < 0.9:
            return [120]
        return [self._rng.choice(_NUMBERS)] * self._rng.choice((0, 1, 3, 30_000))

    def _framed(self, body: bytes) -> bytes:
        """Return a body with a head that may lie about it."""
        rng = self._rng
        kind = self._kind
        status, headers = 200, dict[str, Any]()
        odd = rng.random()
        if odd < 0.05:
            kind = rng.choice(("text/html", "", "x" * 4000, "text/event-stream; charset=\xff"))
        elif odd < 0.12:
            status = rng.choice((301, 302, 303, 307, 308, 304))
            headers["location"] = rng.choice((f"{self._elsewhere}{self.path}", "/x", "", "a:b\\c"))
        elif odd < 0.22:
            status = rng.choice((100, 101, 199, 204, 205, 299, 400, 401, 404, 413, 418, 422, 429,
                                 500, 503, 599, 600, 999))  # fmt: skip
        elif odd < 0.3:
            body = rng.choice((_bomb(), gzip.compress(body)))
            headers["content_encoding"] = rng.choice(("gzip", "deflate", "br", "zstd", "GZIP, x"))
        elif odd < 0.33:
            headers |= {f"h{each}": "y" * rng.choice((1, 100)) for each in range(500)}
        elif odd < 0.35:
            headers["big"] = "y" * 100_000
        framing = rng.random()
        if framing < 0.35:
            headers["content_length"] = len(body)
        elif framing < 0.45:
            lies = (0, 1, len(body) - 1, len(body) + 1, 2**63, -1, "9" * 5000, "1, 2", "0x10", "")
            headers["content_length"] = rng.choice(lies)
        elif framing < 0.7:
            headers["transfer_encoding"] = rng.choice(("chunked",) * 6 + ("gzip, chunked", "x"))
            body = self._chunked(body)
        return head(status, kind, **headers) + body

    def _chunked(self, body: bytes) -> bytes:
        rng = self._rng
        size = rng.choice((1, 64, 65_536)) if len(body) < 9000 else 65_536
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        data = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
        lies = (b"ffffffffffffffff\r\n", b"-1\r\n", b"5;" + b"e" * 9000 + b"\r\n", b"zz\r\n")
        last = (b"0\r\n\r\n", b"0\r\nx: y\r\n\r\n", b"", rng.choice(lies))
        return data + rng.choices(last, (8, 1, 1, 2))[0]


def _dumped(value: Any) -> bytes:
    data = json.dumps(value)  # lone surrogates as escapes, NaN as it is
    return data.encode()


def _some(value: Any, times: int) -> list[Any]:
    """Return a value many times, unless it is large."""
    return [value] * (times if times < 3 or len(_dumped(value)) < 2000 else 2)


@cache
def _bomb() -> bytes:
    """Return gzip of a hundred million bytes."""
    squeezed = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join(squeezed.compress(bytes(10**6)) for _ in range(100)) + squeezed.flush()
