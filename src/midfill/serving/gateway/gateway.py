"""run_gateway: from GatewayOptions to a running gateway: bind, find the servers, listen."""

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import aiohttp
from starlette.types import ASGIApp

from midfill.errors import MidfillError
from midfill.frontend.prompt_encoder import PromptEncoder
from midfill.infill.window import WindowRule
from midfill.serving.gateway.character_tokenizer import CHARACTERS_PER_TOKEN, SpelledTokens
from midfill.serving.gateway.chat import chat_dialect
from midfill.serving.gateway.discovery import DescribedUpstream, ServedModel, describe, discover
from midfill.serving.gateway.engine import GatewayEngine, upstream_metrics
from midfill.serving.gateway.options import GatewayOptions
from midfill.serving.gateway.pool import UpstreamPool
from midfill.serving.gateway.upstream import Upstream
from midfill.serving.gateway.upstream_api import UpstreamFailedError
from midfill.serving.gateway.upstream_calls import UpstreamCalls
from midfill.serving.gateway.upstream_http import open_session
from midfill.serving.server.app import DIALECTS, create_app
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.dialects import openai
from midfill.serving.server.dialects.dialect import Dialect
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.listening import Listener, answer_until_stopped, listen
from midfill.serving.server.service import ModelService

if TYPE_CHECKING:  # needs an extra
    from midfill.serving.server.tracing import RequestTraces

_log = logging.getLogger(__name__)

_DEFAULT_CONTEXT = 8192  # tokens, where no server says
_RETRY_SECONDS = 0.5
_ENCODED_AT_ONCE = 65_536  # bytes of a request; characters are encoded within a millisecond


class Gateway:
    """A running gateway.

    Attributes:
        service: what its dialects call.
        pool: its upstreams.
        model: how prompts for them are made.
    """

    def __init__(
        self,
        service: ModelService,
        pool: UpstreamPool,
        model: DescribedUpstream,
        options: GatewayOptions,
        session: aiohttp.ClientSession,
        chats: Dialect,
    ) -> None:
        self.service = service
        self._chats = chats
        self.pool = pool
        self.model = model
        self._options = options
        self._session = session
        self._reloading: asyncio.Task[None] | None = None

    def app(
        self,
        keys: KeyRing,
        traces: "RequestTraces | None" = None,
        own_hosts: Sequence[str] | None = None,
    ) -> ASGIApp:
        """Return the ASGI application; see ``create_app``."""
        dialects = [each for each in DIALECTS if each is not openai.DIALECT]
        spoken = [*dialects, self._chats]
        redact = self._options.logs.redact
        return create_app(self.service, keys, traces, spoken, redact=redact, own_hosts=own_hosts)

    def start_reload(self) -> None:
        """Start to read the file of upstreams again."""
        self._reloading = asyncio.create_task(self.reload(), name="reading upstreams again")

    async def reload(self) -> None:
        """Read the file of upstreams again; requests in progress go on.

        If it can't be used, all stays as it was, and a line in the log says so.
        """
        if self._options.upstream_file is None:
            return
        try:
            addresses = self._options.addresses()
        except MidfillError as error:
            _log.error("the servers stay as they were: %s", error)
            return
        known = {each.address: each for each in self.pool.upstreams}
        for each in known.values():
            each.draining = False
        timeout = self._options.upstream_timeout
        self.pool.replace(
            [known.get(each) or Upstream(each, self._session, timeout) for each in addresses]
        )
        await self.pool.check()
        _log.warning("servers behind the gateway: %s", ", ".join(addresses))


def run_gateway(options: GatewayOptions, on_ready: Callable[[str, "Gateway"], None]) -> None:
    """Serve until interrupted.

    Args:
        options: what stands behind it, and how it is served.
        on_ready: called with the URL and the gateway once clients can connect.

    Raises:
        MidfillError: the address can't be used, no server answers, or they don't fit together.
    """

    async def serve(listener: Listener) -> None:
        keys = listener.keys
        async with open_gateway(options, keys.tenants, RateLimits(keys.limits_of)) as gateway:
            await answer_until_stopped(
                gateway.app(keys, listener.traces, listener.own_hosts),
                listener,
                gateway.service,
                lambda: on_ready(listener.url, gateway),
                gateway.start_reload,
            )

    listen(options, serve)


@contextlib.asynccontextmanager
async def open_gateway(
    options: GatewayOptions,
    tenants: Sequence[str] = ("",),
    limits: RateLimits | None = None,
) -> AsyncIterator[Gateway]:
    """Find the servers and stand in front of them until the ``with`` block ends.

    Args:
        options: what stands behind it.
        tenants: everybody who may send requests.
        limits: what they may use; None is everything.

    Raises:
        MidfillError: no server answers, or they don't fit together.
    """
    async with open_session(options.upstream_key) as session:
        upstreams = [
            Upstream(each, session, options.upstream_timeout) for each in options.addresses()
        ]
        found = await _wait_for_models(upstreams, options)
        asked, served = next(iter(found.items()))
        model = await describe(asked, served, options)
        pool = UpstreamPool(upstreams, options.upstream_api, served.name, model.end_token)
        await pool.try_out()
        calls = _calls(options, served, model, tenants)
        service, engine = _service(options, served, model, pool, calls, tenants, limits)
        watch = asyncio.create_task(pool.watch(), name="health checks")
        try:
            chats = chat_dialect(engine, pool, calls)
            yield Gateway(service, pool, model, options, session, chats)
        finally:
            watch.cancel()
            service.close()
            await engine.close()


def _calls(
    options: GatewayOptions, served: ServedModel, model: DescribedUpstream, tenants: Sequence[str]
) -> UpstreamCalls:
    spelled = SpelledTokens(tuple(options.fim_tokens or served.fim_tokens or ()))
    salts = secrets.token_bytes(32) if tuple(tenants) != ("",) else b""
    return UpstreamCalls(model.tokenizer, spelled, model.tokenizes, salts)


def _service(
    options: GatewayOptions,
    served: ServedModel,
    model: DescribedUpstream,
    pool: UpstreamPool,
    calls: UpstreamCalls,
    tenants: Sequence[str],
    limits: RateLimits | None,
) -> tuple[ModelService, GatewayEngine]:
    context = room = options.context or served.context or _DEFAULT_CONTEXT
    if not model.has_tokenizer:
        room = int(context * CHARACTERS_PER_TOKEN)  # for what is counted in characters
    engine = GatewayEngine(pool, calls, room)
    window = None if options.window is None else WindowRule(*options.window)
    service = ModelService(
        options.served_name or served.name,
        engine,
        model.tokenizer,
        PromptEncoder(model, model.format, room, window, options.snippets, options.document_memory),
        options.max_body_bytes,
        aliases=options.aliases,
        idle_prefill=options.idle_prefill,
        min_confidence=0.0,  # no upstream tells what it takes
        tenants=tenants,
        limits=limits,
        context=context,
        encodes_at_once=0 if model.has_tokenizer else _ENCODED_AT_ONCE,
    )
    service.metrics.add(partial(upstream_metrics, pool, engine.counts))
    return service, engine


async def _wait_for_models(
    upstreams: Sequence[Upstream], options: GatewayOptions
) -> dict[Upstream, ServedModel]:
    """Return the model of each server that answers; the others have a fault from now on.

    Raises:
        MidfillError: none answers, or they serve different models.
    """
    end, warned = time.monotonic() + options.wait, False
    while True:
        found = await _find_models(upstreams, options)
        if found or time.monotonic() >= end:
            break
        if not warned:
            faults = "; ".join(f"{each.address} {each.fault}" for each in upstreams)
            _log.warning("waiting up to %g s for a server: %s", options.wait, faults)
            warned = True
        await asyncio.sleep(_RETRY_SECONDS)
    if not found:
        faults = "; ".join(f"{each.address} {each.fault}" for each in upstreams)
        raise MidfillError(f"no server to stand in front of: {faults}")
    for each in upstreams:
        if each not in found:
            _log.warning("%s %s; it gets no requests", each.address, each.fault)
    names = {model.name: upstream.address for upstream, model in found.items()}
    if len(names) > 1:
        listed = ", ".join(f"{name} ({address})" for name, address in names.items())
        raise MidfillError(
            f"all servers behind a gateway serve one model, not {listed}; choose one with --model"
        )
    return found


async def _find_models(
    upstreams: Sequence[Upstream], options: GatewayOptions
) -> dict[Upstream, ServedModel]:
    found: dict[Upstream, ServedModel] = {}

    async def find(upstream: Upstream) -> None:
        try:
            found[upstream] = await discover(upstream, options.upstream_api, options.model)
            upstream.fault = None
        except UpstreamFailedError as failure:
            upstream.fault = str(failure)

    await asyncio.gather(*map(find, upstreams))
    return {each: found[each] for each in upstreams if each in found}
