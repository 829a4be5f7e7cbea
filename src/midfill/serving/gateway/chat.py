"""POST /v1/chat/completions behind a gateway: passed on to an upstream as it is.

Chats have no caret, so there is nothing to plan, and what upstreams offer there (tools, images,
structured answers) is theirs. A conversation's requests go to the same upstream. Limits and tenants
are the gateway's: a chat is charged to its key, and gets that key's cache salt.
"""

import asyncio
import contextlib
import hashlib
import logging
from collections.abc import AsyncGenerator
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from midfill.engine.routing import document_key, program_key
from midfill.errors import InvalidRequestError
from midfill.serving.gateway.character_tokenizer import CHARACTERS_PER_TOKEN
from midfill.serving.gateway.engine import GatewayEngine
from midfill.serving.gateway.pool import UpstreamPool
from midfill.serving.gateway.upstream import Upstream
from midfill.serving.gateway.upstream_api import RelayedEvent, UpstreamFailedError
from midfill.serving.gateway.upstream_calls import UpstreamCalls
from midfill.serving.server.bodies import read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.dialects.openai import CHAT_PATHS
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.responses import EventStream
from midfill.serving.server.service import ModelService

_log = logging.getLogger(__name__)
_MAX_TOLD = 2**20  # tokens of one chat that an upstream is believed
_SALTED = ("vllm", "sglang")
_OPERATORS = frozenset(
    {
        "priority", "kv_transfer_params", "data_parallel_rank", "rid", "session_params",
        "bootstrap_host", "bootstrap_port", "bootstrap_room",
    }
)  # fmt: skip
"""Fields of vLLM and SGLang by which one tenant could reach what is another's."""


def chat_dialect(engine: GatewayEngine, pool: UpstreamPool, calls: UpstreamCalls) -> Dialect:
    """Return the dialect that passes chats on to a pool's upstreams.

    Args:
        engine: counts them.
        pool: the upstreams.
        calls: knows what keeps tenants apart there.
    """

    def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
        router = APIRouter()

        @router.post(CHAT_PATHS[0])
        @router.post(CHAT_PATHS[1])
        async def chat_completions(
            request: Request, tenant: Annotated[str, Depends(tenant_of)]
        ) -> Response:
            """Pass a chat on."""
            body = await read_json(request, dict[str, Any], service.max_body_bytes)
            model = body.get("model")
            if model is not None and not isinstance(model, str):
                raise InvalidRequestError("model must be a text", param="model")
            service.check_model(model)
            streamed = body.get("stream") or False
            if not isinstance(streamed, bool):
                raise InvalidRequestError("stream must be true or false", param="stream")
            chat = _Chat(engine, pool, calls, service.limits, tenant, body, streamed)
            if streamed:
                return EventStream(chat.events())
            answers = [event async for event in chat.events()]
            return Response(bytes(answers[0]), media_type="application/json")

        return router

    return Dialect(routes=routes)


class _Chat:
    """A chat's way to an upstream. Another one is asked if the first fails before it answers."""

    def __init__(
        self,
        engine: GatewayEngine,
        pool: UpstreamPool,
        calls: UpstreamCalls,
        limits: RateLimits,
        tenant: str,
        body: dict[str, Any],
        streamed: bool,
    ) -> None:
        salt = body.get("cache_salt") or ""
        if not isinstance(salt, str):
            raise InvalidRequestError("cache_salt must be a text", param="cache_salt")
        if calls.has_tenants and (reserved := _OPERATORS.intersection(body)):
            name = min(reserved)
            raise InvalidRequestError(
                f"{name} is for those who run the servers behind the gateway; leave it out",
                param=name,
            )
        job = body.get("job_id") or ""
        if not isinstance(job, str):
            raise InvalidRequestError("job_id must be a text", param="job_id")
        self._engine = engine
        self._pool = pool
        self._program = job and calls.program(tenant, job)
        self._limits = limits
        self._tenant = tenant
        self._body = body
        self._streamed = streamed
        self._salt = calls.cache_salt(tenant, salt)

    async def events(self) -> AsyncGenerator[msgspec.Raw, None]:
        """Yield the answer's events, or its one object, and charge the tenant for it.

        Raises:
            InvalidRequestError: the upstream refuses what the client has sent.
            QueueFullError: too many requests are in progress, or all upstreams are overloaded.
            RateLimitError: the tenant has used what it may.
            UpstreamError: no upstream has answered.
        """
        # In a thread, as a long one takes a moment.
        conversation, size = await asyncio.to_thread(_conversation, self._tenant, self._body)
        prompt, answer = max(1, round(size / CHARACTERS_PER_TOKEN)), 0.0
        told: int | None = None
        with (
            self._limits.generating(self._tenant, prompt) as charge,
            self._engine.relaying(self._tenant, prompt) as count,
        ):
            try:
                async with contextlib.aclosing(self._relayed(conversation)) as events:
                    async for event in events:
                        length = len(bytes(event.body))
                        answer += 1 if self._streamed else length / CHARACTERS_PER_TOKEN
                        if event.completion_tokens is not None:
                            cost = (event.prompt_tokens or prompt) + event.completion_tokens
                            told = max(0, min(cost, _MAX_TOLD) - prompt)
                        yield event.body
            finally:
                charge.tokens = count.tokens = round(answer) if told is None else told

    async def _relayed(self, conversation: str) -> AsyncGenerator[RelayedEvent, None]:
        failed: list[tuple[Upstream, UpstreamFailedError]] = []
        while True:
            upstream = self._pool.choose(conversation, [each for each, _ in failed])
            if upstream is None:
                raise self._pool.error(failed)
            begun = False
            events = upstream.relay(
                CHAT_PATHS[0], self._body_for(upstream), streamed=self._streamed
            )
            try:
                async with contextlib.aclosing(events):
                    async for event in events:
                        begun = True
                        yield event
                return
            except UpstreamFailedError as failure:
                _log.warning("%s %s", upstream.address, failure)
                failed.append((upstream, failure))
                if begun:
                    raise self._pool.error(failed) from None
                self._engine.counts.retries += 1

    def _body_for(self, upstream: Upstream) -> dict[str, Any]:
        salted = self._salt and upstream.kind in _SALTED
        own = {"cache_salt": self._salt} if salted else {}
        if self._program:
            own["job_id"] = self._program
        return {**self._body, "model": upstream.model, **own}


def _conversation(tenant: str, body: dict[str, Any]) -> tuple[str, int]:
    """Return what stands for a conversation, and its length.

    That is the program that it is a step of, or else its first messages, which it keeps.
    """
    messages = body.get("messages")
    size = len(msgspec.json.encode(messages))
    if job := body.get("job_id"):
        return program_key(tenant, job), size
    first = msgspec.json.encode(messages[:2] if isinstance(messages, list) else None)
    return document_key(tenant, hashlib.blake2b(first, digest_size=8).hexdigest()), size
