"""Front: midfill's server as a Serve application, in front of the newest engines.

Engines of a model are an application of their own, with a number that grows: a generation. The
server follows them: once a newer generation runs, new requests go to it, and those in progress end
where they began. So a model changes without a request that fails, and a server that restarts finds
its engines by itself.
"""

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.core import CounterMetricFamily
from ray import serve
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from midfill.engine.messages import EngineInfo
from midfill.frontend.prompt_encoder import fim_format
from midfill.models.checkpoints.opening import open_model
from midfill.serving.cluster.kv_moves import Holdings
from midfill.serving.cluster.remote_engine import RemoteEngine
from midfill.serving.cluster.serve_handles import ServeReplicas
from midfill.serving.cluster.spec import FrontSpec, ModelSpec, generation_of, read_spec
from midfill.serving.server.app import create_app
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.metrics import Families, families
from midfill.serving.server.opened_model import assemble_service
from midfill.serving.server.service import ModelService
from midfill.system.logs import configure_logs

_log = logging.getLogger(__name__)

_FOLLOW_SECONDS = 1.0  # between two looks for newer engines
_DRAIN_SECONDS = 0.2  # between two looks whether old requests have ended


class _Generation:
    """The engines that requests go to, and the application that is made for them."""

    def __init__(self, number: int, service: ModelService, engine: RemoteEngine, app: ASGIApp):
        self.number = number
        self.service = service
        self.engine = engine
        self.app = app
        self.active = 0  # requests in progress

    async def close(self) -> None:
        """Wait for the requests in progress, then release what they used."""
        while self.active:
            await asyncio.sleep(_DRAIN_SECONDS)
        self.service.close()
        await self.engine.close()


class Front:
    """The server: all dialects, the planner, and a router to the replicas."""

    # Serve waits for it.
    async def __init__(self, front: dict[str, Any]) -> None:  # type: ignore[misc]
        """Start to look for engines.

        Args:
            front: the fields of a ``FrontSpec``.

        Raises:
            MidfillError: the key file can't be used.
        """
        spec = read_spec(front, FrontSpec)
        configure_logs(spec.logs, process="front")
        self._spec = spec
        self._keys = KeyRing(spec.api_keys, spec.key_path)
        self._limits = RateLimits(self._keys.limits_of)
        self._current: _Generation | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._following = asyncio.create_task(self._follow(), name="following the engines")
        while self._current is None:
            await asyncio.sleep(_DRAIN_SECONDS)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application, for ``serve.ingress``."""

        # uvicorn tells an application of ASGI 3 by its being a function; a method is none.
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await self._answer(scope, receive, send)

        return answer

    async def overview(self) -> dict[str, Any]:
        """Return what ``midfill cluster status`` shows, as plain values."""
        current = self._current
        assert current is not None
        return {
            "spec": msgspec.to_builtins(self._spec),
            "generation": current.number,
            "model": current.service.name,
            "resumed": current.engine.resumed,
            "moved": current.engine.moves.moved,
            "replicas": {name: each.plain() for name, each in current.engine.numbers.items()},
        }

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request by the application of the engines of now."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        current = self._current
        if current is None:
            starting = {"error": {"message": "the server is starting; try again in a moment"}}
            response = JSONResponse(starting, 503, {"retry-after": "2"})
            await response(scope, receive, send)
            return
        current.active += 1
        try:
            await current.app(scope, receive, send)
        finally:
            current.active -= 1

    async def _follow(self) -> None:
        """Adopt newer engines whenever there are any, and keys whenever their file changes."""
        changed = _changed(self._spec.key_path)
        while True:
            try:
                if changed != (changed := await asyncio.to_thread(_changed, self._spec.key_path)):
                    self._keys.reload()
                number, name = await asyncio.to_thread(_newest_engines)
                if name and (self._current is None or number > self._current.number):
                    await self._adopt(number, name)
            except Exception:
                _log.exception("newer engines can't be used")
            await asyncio.sleep(_FOLLOW_SECONDS)

    async def _adopt(self, number: int, name: str) -> None:
        """Send new requests to these engines from now on."""
        handle = await asyncio.to_thread(serve.get_app_handle, name)
        described = await handle.describe.remote()
        spec = read_spec(described["model"], ModelSpec)
        info = msgspec.convert(described["info"], EngineInfo)
        path, options = await asyncio.to_thread(spec.find)
        run = options.options
        checkpoint = await asyncio.to_thread(open_model, path, run.adapter_path, run.weights)
        format = await asyncio.to_thread(fim_format, checkpoint, options.fim_tokens)
        holdings = Holdings() if self._spec.move_kv else None
        engine = RemoteEngine(ServeReplicas(handle, name), info, holdings)
        service = await assemble_service(
            options, checkpoint, format, engine, info, self._keys.tenants, self._limits
        )
        service.metrics.add(partial(move_metrics, engine))
        app = create_app(
            service,
            self._keys,
            redact=self._spec.logs.redact,
            own_hosts=None if self._keys else self._spec.own_hosts,
        )
        old, self._current = self._current, _Generation(number, service, engine, app)
        _log.warning("requests go to %s now: %s", name, service.name)
        if old is not None:
            task = asyncio.create_task(old.close(), name="ending old requests")
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)


def _changed(path: Path | None) -> int:
    """Return when a file was changed last, in ns; 0 if it can't be told."""
    try:
        return 0 if path is None else path.stat().st_mtime_ns
    except OSError:
        return 0


def _newest_engines() -> tuple[int, str]:
    """Return the newest generation of engines that runs, and its name; (0, "") if none does."""
    found = [
        (number, name)
        for name, app in serve.status().applications.items()
        if app.status == "RUNNING" and (number := generation_of(name)) is not None
    ]
    return max(found, default=(0, ""))


async def _live(receive: Receive, send: Send) -> None:
    """Answer the messages of ASGI's lifespan protocol; there is nothing to do."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def move_metrics(engine: RemoteEngine) -> Families:
    """Yield counters of the prompts whose KV another replica had, as of now."""
    counts = engine.moves
    help = "Prompts whose KV another replica had, by what became of it."
    rows = [((each,), getattr(counts, each)) for each in ("moved", "late", "failed", "declined")]
    yield from families(CounterMetricFamily, {"kv_moves": (help, float)}, rows, ("result",))
    yield CounterMetricFamily(
        "midfill:kv_moved_tokens",
        "Tokens whose KV came from another replica.",
        value=counts.moved_tokens,
    )
