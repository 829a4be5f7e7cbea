"""attacks: what one client, or one folder, can do to a server; each attack worked once.

What it cost in the last version before it was mended stands beside each attack. The bodies are the
largest that a server accepts, or larger.
"""

import asyncio
import contextlib
import http.client
import json as json_module
import os
import re
import signal
import socket
import ssl
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from benchmarks.gateway import run_gateway_process, run_stub_process
from benchmarks.gateway_stub import MODEL
from benchmarks.reliability.overload import Say
from benchmarks.reliability.served import ServedModel, descriptors, resident_bytes, serve_model
from benchmarks.report import publish
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import Machine, describe_machine
from midfill.system.process import raise_open_file_limit
from midfill.system.python_child import python_command, python_environment
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_JSON = {"content-type": "application/json"}
_MIB = 1 << 20
_MB = 1e6
_SPACE = 15 * _MIB
_TIMES = 3  # each body is sent, for the median: other programs make stalls, too
_SECONDS = 120
_KEY = "of-whoever-moves-kv"
_SILENT, _BURST, _UPLOADS, _STOPPED_SECONDS, _DEADLINE_SECONDS = 2400, 6000, 60, 20, 5


@dataclass(frozen=True)
class AttackReport:
    """Rows: attack, what it cost before it was mended, what it costs now."""

    model: str
    machine: Machine
    rows: Sequence[tuple[str, str, str]]


class Process(NamedTuple):
    """Of a server: where it listens, and its id."""

    url: str
    process_id: int


class Body(NamedTuple):
    """A request that once held the event loop up: the attack, what it cost, where to send what."""

    name: str
    before: str
    path: str
    data: bytes
    headers: Mapping[str, str] = _JSON


def _of(**fields: object) -> bytes:
    return json_module.dumps(fields).encode()


def _field(text: str, rest: str = "") -> bytes:
    return f'{{"prompt":{text}{rest}}}'.encode()


def bodies() -> Iterator[Body]:
    """Yield the attacks that are one request each."""
    letters, word = "a b" * (_SPACE // 3 - 99), "b" * (_SPACE - 99)
    role = [{"role": "<|im_end|>" * (7 * _MIB // 10), "content": "a"}]
    tokenize, openai, llama = "/tokenize", "/v1/completions", "/completion"
    yield Body("`/tokenize` with pieces, 15 MiB", "stall 19 to 32 s, +3.1 GB", tokenize,
               _of(content=letters, with_pieces=True))  # fmt: skip
    yield Body("the same, 1 MiB", "", tokenize,
               _of(content="a b" * (_MIB // 3), with_pieces=True))  # fmt: skip
    yield Body("`/tokenize`, one word of 4 MiB", "6.8 s", tokenize, _of(content="a" * (4 * _MIB)))
    yield Body("`/detokenize`, 15 MiB", "2.0 s", "/detokenize",
               b'{"tokens":[%s1]}' % (b"123," * (_SPACE // 4 - 9)))  # fmt: skip
    yield Body("a chat role of 7 MiB", "7.7 to 10 s, +1.5 GB", "/v1/chat/completions",
               _of(messages=role, max_tokens=1))  # fmt: skip
    yield Body("NaN at the end of 15 MiB of JSON", "2.9 s", openai,
               _field("[" + '"a",  ' * (_SPACE // 6 - 9) + '""]', ',"x":NaN'))  # fmt: skip
    yield Body("a text key of 2 MiB in `logit_bias`", "2.4 s", llama,
               _of(prompt="a", n_predict=1, logit_bias={"b" * (2 * _MIB): 1}))  # fmt: skip
    yield Body("a number of 5,000 digits in `logit_bias`", "status 500", llama,
               _of(prompt="a", n_predict=1, logit_bias={"9" * 5000: 1}))  # fmt: skip
    yield Body("`samplers` of 15 MiB", "3.6 s", llama, _of(prompt="a", samplers=word))
    yield Body("an unknown field's name of 15 MiB in `midfill`", "1.5 s", openai,
               _of(prompt="a", midfill={word: 1}))  # fmt: skip
    yield Body("a `midfill.layout` of 15 MiB", "0.7 s", openai,
               _of(prompt="a", midfill={"layout": word}))  # fmt: skip
    yield Body("15 MiB of `\\u00e9`", "0.1 s", openai,
               _field('"' + "\\u00e9" * (_SPACE // 6 - 9) + '"'))  # fmt: skip
    yield Body("a million of `\\u00e9`", "0.04 s", openai,
               _field('"' + "\\u00e9" * (1 << 20) + '"', ',"max_tokens":1'))  # fmt: skip


def imports(key: str, slots: int) -> Iterator[Body]:
    """Yield imports of KV that is none; ``slots`` are the tokens that the KV pool holds."""
    path, headers = "/internal/kv/import", {"authorization": f"Bearer {key}"}
    yield Body("an import of 256 MB of KV", "stall 0.25 s", path, bytes(256_000_000), headers)
    yield Body("an import after all tokens that the KV pool holds", "stall 0.95 s",
               f"{path}?before={slots}", bytes(4 * slots), headers)  # fmt: skip


def chat() -> Body:
    """Return a long chat, for a gateway."""
    messages = [{"role": "user", "content": "a b" * (_SPACE // 3 - 99)}]
    return Body("a chat of 15 MiB, through the gateway", "stall 0.12 s", "/v1/chat/completions",
                _of(model=MODEL, messages=messages, max_tokens=1))  # fmt: skip


class Watch:
    """Follows a server's memory and files, and how long ``/livez`` takes, while a block runs.

    Attributes:
        stall, grown, files: the most seconds, bytes above those at the beginning, and open files.
    """

    def __init__(self, server: ServedModel | Process, asks: bool = True) -> None:
        self._server, self._asks = server, asks
        self._start = resident_bytes(server.process_id)
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._sample)]
        self._threads += [threading.Thread(target=self._ask)] if asks else []
        self.stall, self.grown, self.files = 0.0, 0, 0

    def __enter__(self) -> "Watch":
        for thread in self._threads:
            thread.start()
        time.sleep(0.2)
        self.stall = 0.0  # but for the first connection
        return self

    def __exit__(self, *_: object) -> None:
        time.sleep(0.1)
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self.grown = max(self.grown, resident_bytes(self._server.process_id) - self._start)
            self.files = max(self.files, descriptors(self._server.process_id))

    def _ask(self) -> None:
        client = http.client.HTTPConnection(*_address(self._server), timeout=_SECONDS)
        while not self._ended.wait(0.005):
            started = time.perf_counter()
            try:
                client.request("GET", "/livez")
                client.getresponse().read()
            except (OSError, http.client.HTTPException):
                client.close()
            self.stall = max(self.stall, time.perf_counter() - started)


def _address(server: ServedModel | Process) -> tuple[str, int]:
    parts = urlsplit(server.url)
    return parts.hostname or "", parts.port or 0


def _post(
    server: ServedModel | Process,
    path: str,
    body: bytes,
    tls: ssl.SSLContext | None = None,
    headers: Mapping[str, str] = _JSON,
) -> tuple[int, float]:
    """Return a response's status, 0 without one, and the seconds until its end."""
    started = time.perf_counter()
    kind = (
        http.client.HTTPConnection
        if tls is None
        else partial(http.client.HTTPSConnection, context=tls)
    )
    client = kind(*_address(server), timeout=_SECONDS)
    try:
        client.request("POST", path, body, headers)
        response = client.getresponse()
        response.read()
        return response.status, time.perf_counter() - started
    except (OSError, http.client.HTTPException):
        return 0, time.perf_counter() - started
    finally:
        client.close()


def send(server: ServedModel | Process, body: Body) -> tuple[str, str, str]:
    """Send a body several times; return its row."""
    watches, status = [Watch(server) for _ in range(_TIMES)], 0
    for watch in watches:
        with watch:
            status, _ = _post(server, body.path, body.data, headers=body.headers)
    return body.name, body.before, f"status {status}, {_summary(watches)}"


def _summary(watches: Sequence[Watch]) -> str:
    stall = statistics.median(watch.stall for watch in watches)
    return f"stall {stall:.2f} s, +{max(watch.grown for watch in watches) / _MB:.0f} MB"


def _connect(server: ServedModel | Process, count: int, held: contextlib.ExitStack) -> None:
    """Begin connections, and wait for none; they are closed with ``held``."""
    for _ in range(count):
        connection = held.enter_context(socket.socket())
        connection.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            connection.connect(_address(server))


def silent(server: ServedModel, tls: ssl.SSLContext) -> tuple[str, str, str]:
    """Open TLS connections that say nothing; ask for something beside them."""
    with contextlib.ExitStack() as held, Watch(server, asks=False) as watch:
        _connect(server, _SILENT, held)
        time.sleep(1)
        status, seconds = _post(server, "/v1/completions", _of(prompt="a", max_tokens=1), tls)
        time.sleep(5)
    name, before = f"{_SILENT:,} TLS connections that say nothing", "2,304 files, 62 s, 137 MB"
    logged = f"{server.log.stat().st_size / _MB:.1f} MB of log"
    now = f"{watch.files:,} files, another request {seconds:.1f} s (status {status}), {logged}"
    return name, f"{before} of log", now


def burst(server: ServedModel | Process) -> tuple[str, str, str]:
    """Open more connections than are allowed, at once."""
    with contextlib.ExitStack() as held, Watch(server, asks=False) as watch:
        _connect(server, _BURST, held)
        time.sleep(3)
    name = f"{_BURST:,} connections at once, where 2,048 are the maximum"
    return name, "2,304 files, the most that were allowed", f"{watch.files:,} files"


def pipeline(server: ServedModel | Process) -> tuple[str, str, str]:
    """Send many requests on one connection, and read no answer."""
    request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    watches = [Watch(server) for _ in range(_TIMES)]
    for watch in watches:
        with watch, socket.create_connection(_address(server), 5) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(request * (1_500_000 // len(request)))
            time.sleep(1)
    return "1.5 MB of pipelined requests", "+88 to 109 MB", _summary(watches)


def uploads(server: ServedModel | Process) -> tuple[str, str, str]:
    """Stall at the end of large uploads."""
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {_SPACE}\r\n"
    data = f'{head}Content-Type: application/json\r\n\r\n{{"prompt":"'.encode()
    with contextlib.ExitStack() as held, Watch(server) as watch:
        for _ in range(_UPLOADS):
            upload = held.enter_context(socket.create_connection(_address(server), 3))
            with contextlib.suppress(OSError):
                upload.sendall(data + b"a" * (_SPACE - 100))
    return f"{_UPLOADS} uploads of 15 MiB that stall", "+902 MB", _summary([watch])


def deadline(server: ServedModel) -> tuple[str, str, str]:
    """Ask for an answer by a time at which the engine is stopped."""
    engine = server.engine_id()
    assert engine is not None
    os.kill(engine, signal.SIGSTOP)
    again = threading.Timer(_STOPPED_SECONDS, os.kill, (engine, signal.SIGCONT))
    again.start()
    body = _of(prompt="b", max_tokens=1)
    headers = _JSON | {"x-request-timeout": str(_DEADLINE_SECONDS)}
    status, seconds = _post(server, "/v1/completions", body, headers=headers)
    again.join()
    name = f"a deadline of {_DEADLINE_SECONDS} s, the engine stopped for {_STOPPED_SECONDS} s"
    return name, "20.0 s", f"{seconds:.1f} s, status {status}"


def _takes_hangups(process_id: int) -> bool:
    caught = re.search(r"SigCgt:\s+(\w+)", Path(f"/proc/{process_id}/status").read_text())
    return caught is None or bool(int(caught[1], 16) & 1)


def starts(model: str) -> Iterator[tuple[str, str, str]]:
    """Yield what happens to servers that start amid trouble."""
    with tempfile.TemporaryDirectory() as opened, tempfile.TemporaryDirectory() as users:
        victim = Path(users) / "a file of the user's"
        victim.write_text("precious")
        (Path(opened) / ".numba_config.yaml").write_text(f"chrome_trace: {victim}\n")
        for name in ("random", "numpy", "typer"):
            (Path(opened) / f"{name}.py").write_text(f"open({str(victim)!r}, 'w')")

        def start(*options: str) -> "subprocess.Popen[str]":
            return subprocess.Popen(
                python_command("-m", "midfill", "serve", model, "--port", "0", *options),
                cwd=opened, env=python_environment(), text=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
            )  # fmt: skip

        process = start()
        while not _takes_hangups(process.pid):
            time.sleep(0.01)
        process.send_signal(signal.SIGHUP)
        time.sleep(10)
        lives = "lives" if process.poll() is None else "ended"
        yield "SIGHUP while the model loads", "ends the server", lives
        process.terminate()
        process.communicate()
        found = "nothing" if victim.read_text() == "precious" else "overwritten"
        yield "poisoned modules, `.numba_config.yaml` in the folder", "a file overwritten", found
        _, said = start("--kv-memory", "900GB").communicate()
        yield "`--kv-memory 900GB`", "27 lines", f"{len(said.strip().splitlines())} line"


async def measure_attacks(model: str, say: Say = lambda _: None) -> AttackReport:
    """Attack servers of a model, and ``say`` so; raises MidfillError if one does not start."""
    import trustme

    raise_open_file_limit(2 * _BURST)
    rows: list[tuple[str, str, str]] = []

    async def attack(call: Callable[..., tuple[str, str, str]], *given: Any) -> None:
        rows.append(await asyncio.to_thread(call, *given))
        say(re.sub(r"[^\w ,./-]", "", rows[-1][0]))

    with tempfile.TemporaryDirectory() as folder:
        certificate, trusted = Path(folder) / "server.pem", ssl.create_default_context()
        authority = trustme.CA()
        authority.configure_trust(trusted)
        issued = authority.issue_cert("127.0.0.1", "localhost")
        issued.private_key_and_cert_chain_pem.write_to_path(certificate)
        async with serve_model(model, ["--ssl-certfile", str(certificate)]) as server:
            await attack(silent, server, trusted)
        async with serve_model(model, ["--no-idle-prefill"]) as server:
            for each in (burst, pipeline, uploads):
                await attack(each, server)
        async with serve_model(model, ["--no-idle-prefill"]) as server:
            for body in bodies():
                await attack(send, server, body)
            await attack(deadline, server)
        async with serve_model(model, ["--no-idle-prefill", "--kv-transfer-key", _KEY]) as server:
            slots = int((await server.metrics())["kv_slots"])
            for body in imports(_KEY, slots):
                await attack(send, server, body)
    with run_stub_process() as stub, run_gateway_process(stub) as gateway:
        await attack(send, Process(*gateway), chat())
    rows += await asyncio.to_thread(lambda: list(starts(model)))
    return AttackReport(model, describe_machine(), rows)


def attacks_table(report: AttackReport) -> ResultTable:
    """Return the figures as a table."""
    rows = [dict(zip(("attack", "before", "now"), row, strict=True)) for row in report.rows]
    caption = (
        f"{report.model}. A stall is the longest that `/livez` took to answer a client that asked"
        f" for it all the time, the median of {_TIMES} times but for uploads. On {report.machine}."
    )
    return ResultTable(rows=rows, labels=3, title="Attacks", caption=caption)


def attacks(model: ModelArgument = None, json: JsonOption = None, docs: DocsOption = None) -> None:
    """Attack a server on the loopback interface; print what each attack costs it."""
    with show_steps("starting the server") as say:
        report = asyncio.run(measure_attacks(model or DEFAULT_MODEL, say))
    publish(report, attacks_table(report), section="attacks", json=json, docs=docs)
