"""Calls of a server's API as bytes on a connection: at every bound, cut, slow, and no HTTP at all.

What makes calls of the API's description (``api``) sends whole requests of well-formed JSON. Here a
field's value is whatever JSON can spell, or can't: numbers of thousands of digits, keys and texts
of any length, nesting of any depth; so are headers and paths, and what is on the wire at all.
"""

import contextlib
import http.client
import json
import random
import socket
import struct
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fuzzing.api import Calls

_SECONDS = 120  # for an answer, also beside other work
_CLIENTS = 3
_UNAVAILABLE = ("deadline_exceeded", "engine_restarting", "server_stopping")
"""Codes of the answers with status 503 that docs/server.md names."""

_MAX_BYTES = 32 << 20  # of an array; a server refuses bodies of half as many
_DIGITS = (1, 18, 19, 20, 309, 400, 4300, 4301, 100_000)
_LENGTHS = (0, 1, 64, 65, 128, 256, 257, 1024, 65_536, 1_000_000)
_INTEGERS = (0, 1, -1, 2, 16, 20, 21, 64, 65, 127, 128, 129, 1024, 1025, 2**15, 2**31 - 1, 2**31,
             2**32, 2**53, 2**63 - 1, 2**63, 2**64, -(2**31) - 1, -(2**63))  # fmt: skip
_WORDS = ("null", "true", "NaN", "-Infinity", "1e999", "-0.0", "1e-400", "0.5", "2.0", "[]", "{}",
          '"\\ud800"', '"\\u0000"', '"\\u202e"', '[""]', "[null]", '[{"text":1}]', "", "[",
          '"\\x"')  # fmt: skip
_BASE: dict[str, Any] = {
    "prompt": "def f(x):\n    return ", "suffix": "\n", "max_tokens": 2, "n_predict": 2,
    "input_prefix": "a = ", "input_suffix": "\n", "content": "a", "tokens": [1, 2],
    "messages": [{"role": "user", "content": "hi"}], "segments": {"prefix": "a", "suffix": "b"},
    "type": "view", "options": {"num_predict": 2}, "midfill": {},
}  # fmt: skip
_HEADERS = ("authorization", "content-length", "content-type", "content-encoding", "expect",
            "x-request-timeout", "x-stainless-timeout", "x-request-id", "traceparent", "host",
            "origin", "transfer-encoding", "connection", "upgrade", "x-forwarded-for", "cookie",
            "if-none-match", "accept-encoding", "range")  # fmt: skip
_HELLO = bytes.fromhex("160301020001fc0303") + bytes(504)
_NO_HTTP = (_HELLO, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\0" * 300, b"\r\n" * 5000,
            b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 100_000,
            b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 30_000)  # fmt: skip


def _number(rng: random.Random) -> str:
    if rng.random() < 0.5:
        return str(rng.choice(_INTEGERS))
    digits = rng.choice("19") * rng.choice(_DIGITS)
    return rng.choice(("{}", "-{}", "0.{}", "{}.5", "1e{}", "1e-{}")).format(digits)


def _value(rng: random.Random) -> str:
    """Return some JSON, or what looks like it."""
    match rng.randrange(8):
        case 0 | 1 | 2:
            return _number(rng)
        case 3:
            return json.dumps(rng.choice("x\n\0é9") * rng.choice(_LENGTHS))
        case 4:
            key = rng.choice("k9") * rng.choice((*_LENGTHS, *_DIGITS))
            return json.dumps({key: 1, rng.choice("-01"): 1})
        case 5:
            item, count = rng.choice((_number(rng), '"x"', "[]")), rng.choice((1, 65, 1025, 20_000))
            items = [item] * min(count, _MAX_BYTES // len(item))
            return f"[{','.join(items)}]"
        case 6:
            opening, deep = rng.choice(("[", '{"a":')), rng.choice((5, 500, 5000, 100_000))
            closing = "]" if opening == "[" else "}"
            return opening * deep + "1" + closing * (deep if rng.random() < 0.7 else 0)
        case _:
            return rng.choice(_WORDS)


@dataclass(frozen=True)
class Endpoint:
    """Where to send what.

    Attributes:
        method, path: the operation.
        fields: names that its body knows, those of objects in it with a dot before.
    """

    method: str
    path: str
    fields: tuple[str, ...]


def endpoints(description: Mapping[str, Any]) -> list[Endpoint]:
    """Return the operations of an OpenAPI description."""
    schemas = description["components"]["schemas"]

    def fields(schema: Mapping[str, Any], prefix: str, depth: int) -> Iterator[str]:
        for one in (schema, *schema.get("anyOf", ())):
            target = schemas.get(one.get("$ref", "").rpartition("/")[2], one)
            for name, inner in target.get("properties", {}).items():
                yield prefix + name
                if depth:
                    yield from fields(inner, f"{prefix}{name}.", depth - 1)

    found = []
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            content = operation.get("requestBody", {}).get("content", {})
            body = content.get("application/json", {}).get("schema", {})
            named = tuple(dict.fromkeys(fields(body, "", 2)))
            found.append(Endpoint(method.upper(), path.replace("{name}", "x"), named))
    return found


def body_of(endpoint: Endpoint, rng: random.Random) -> bytes:
    """Return a body of which one or two fields have any value."""
    values = {name: json.dumps(value) for name, value in _BASE.items()}
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        if not endpoint.fields:
            break
        outer, *inner = rng.choice(endpoint.fields).split(".")
        text = _value(rng)
        for name in reversed(inner):
            text = f'{{"{name}":{text}}}'
        values[outer] = text
    if rng.random() < 0.1:
        values[json.dumps("k" * rng.choice(_LENGTHS))[1:-1]] = "1"
    body = "{%s}" % ",".join(f'"{name}":{value}' for name, value in values.items())  # noqa: UP031
    data = body.encode(errors="surrogatepass")
    if rng.random() < 0.05:
        data = data[: rng.randrange(len(data))] + rng.randbytes(3)
    return data


def request_of(endpoint: Endpoint, rng: random.Random) -> tuple[bytes, bytes]:
    """Return a request's head and body."""
    body = body_of(endpoint, rng) if endpoint.method == "POST" else b""
    headers = {"host": "localhost", "content-type": "application/json"}
    if body:
        headers["content-length"] = str(len(body))
    path = endpoint.path
    odd = rng.random()
    if odd < 0.2:
        name = rng.choice(_HEADERS)
        headers[name] = _header(name, rng)
    elif odd < 0.25:
        path += rng.choice(("?a=%00", "/%ff", "/..//", "?" + "9" * 5000, "%2e%2e/etc", "/" * 3000))
    lines = [f"{endpoint.method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace"), body


def _header(name: str, rng: random.Random) -> str:
    own = {
        "authorization": ("Bearer ", "Bearer " + "k" * rng.choice((1, 9000, 60_000)), "Basic !!",
                          "Basic " + "QQ" * 9000, "Digest x", "bearer \xff\xfe"),
        "content-length": ("0", "-1", "+1", "1 1", "9" * 18, "9" * 19, "9" * 5000, "0x10", ""),
        "content-type": ("text/plain", "application/json; charset=" + "x" * 9000, ""),
        "transfer-encoding": ("chunked", "gzip, chunked", "x"),
        "content-encoding": ("gzip", "identity", "x" * 9000),
        "expect": ("100-continue", "x"),
        "upgrade": ("websocket", "h2c"),
        "host": ("evil.example", "[::1", "x" * 9000, ""),
        "origin": ("null", "https://evil.example"),
    }.get(name, ())  # fmt: skip
    return rng.choice((*own, _number(rng)[:60_000], "x" * rng.choice((0, 300, 60_000)), "\xff"))


class Stalls:
    """Asks whether a server is alive, again and again, and sees what its event loop computes then.

    The processor time of the server's first thread from a question to its answer is for how long
    the question waited for other work; what else the machine does doesn't count.

    Attributes:
        worst: the longest, in seconds.
        during: what was being sent then.
        over: how many took more than 0.1 s, by what was being sent.
    """

    def __init__(self, url: str, process: int) -> None:
        parts = urlsplit(url)
        self._address = parts.hostname or "", parts.port or 80
        self._times = Path(f"/proc/{process}/task/{process}/schedstat")
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.active: dict[int, str] = {}
        self.worst, self.during = 0.0, ""
        self.over: list[str] = []

    def __enter__(self) -> "Stalls":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(60)

    def _seconds(self) -> float:
        return int(self._times.read_text().split()[0]) / 1e9

    def _watch(self) -> None:
        client = http.client.HTTPConnection(*self._address, timeout=_SECONDS)
        while not self._ended.wait(0.004):
            before, during = self._seconds(), "; ".join(self.active.values())
            try:
                client.request("GET", "/livez")
                client.getresponse().read()
            except (OSError, http.client.HTTPException):
                client.close()
                continue
            took = self._seconds() - before
            if took > 0.1:
                self.over.append(f"{took:.3f} s: {during}")
            if took > self.worst:
                self.worst, self.during = took, during


@dataclass
class ByteCalls:
    """Sends calls to a server, and judges what comes back.

    Attributes:
        calls: gets what happened.
    """

    url: str
    found: list[Endpoint]
    calls: Calls
    stalls: Stalls
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send_all(self, numbers: range) -> None:
        """Make and send the calls of some numbers."""
        with ThreadPoolExecutor(_CLIENTS) as pool:
            for _ in pool.map(self.send, numbers):
                pass

    def send(self, number: int) -> None:
        """Make and send the call of a number."""
        rng = random.Random(f"bytes {number}")
        posts = [each for each in self.found if each.method == "POST"]
        endpoint = rng.choice(posts if rng.random() < 0.9 else self.found)
        head, body = request_of(endpoint, rng)
        way = rng.choices(("whole", "split", "cut", "unread", "twice", "no-http"),
                          (80, 6, 6, 3, 3, 2))[0]  # fmt: skip
        if way == "no-http":
            head, body = rng.choice(_NO_HTTP), b""
        name = f"call {number} ({way}): {head.partition(bytes([13]))[0][:60]!r}"
        self.stalls.active[number] = name
        started = time.monotonic()
        try:
            status, text = self._exchange(head, body, way, rng)
        except Exception as error:
            status, text = 0, repr(error)
        finally:
            del self.stalls.active[number]
        took = time.monotonic() - started
        documented = status == 503 and any(code in text for code in _UNAVAILABLE)
        wrong = status >= 500 and not documented
        with self._lock:
            self.calls.statuses[status] += 1
            if wrong or took > _SECONDS or (status == 0 and way == "whole" and text):
                said = f"{status} in {took:.1f} s: {text[:300]}"
                self.calls.bugs.append(f"{name}: {said}: {body[:300]!r}")

    def _exchange(self, head: bytes, body: bytes, way: str, rng: random.Random) -> tuple[int, str]:
        """Return a response's status and text; 0 if none is to be expected, or has come."""
        parts = urlsplit(self.url)
        with socket.create_connection((parts.hostname, parts.port), _SECONDS) as connection:
            data = head + body
            if way == "cut":
                connection.sendall(data[: rng.randrange(len(data))])
                if rng.random() < 0.5:
                    reset = struct.pack("ii", 1, 0)
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, reset)
                return 0, ""
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                if way == "split":
                    for at in range(0, min(len(data), 200), 3):
                        connection.sendall(data[at : at + 3])
                        time.sleep(0.0005)
                    connection.sendall(data[200:])
                else:
                    connection.sendall(data * (2 if way == "twice" else 1))
            if way == "unread":
                return 0, ""
            response = http.client.HTTPResponse(connection)
            try:
                response.begin()
                return response.status, response.read().decode(errors="replace")
            except (OSError, http.client.HTTPException):
                return 0, ""
