"""POST /v1/chat/completions behind a gateway: passed on to an upstream as it is.

Chats have no caret, so there is nothing to plan, and what upstreams offer there (tools, images,
structured answers) is theirs. A conversation's requests go to the same upstream.
"""

import hashlib
from typing import Annotated, Any

import msgspec
from aiohttp import ClientResponse
from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from midfill.engine.routing import document_key
from midfill.errors import InvalidRequestError
from midfill.serving.gateway.pool import UpstreamPool
from midfill.serving.gateway.upstream import Upstream
from midfill.serving.gateway.upstream_api import UpstreamFailedError
from midfill.serving.server.bodies import read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.service import ModelService

_PATH = "/v1/chat/completions"


def chat_dialect(pool: UpstreamPool) -> Dialect:
    """Return the dialect that passes chats on to a pool's upstreams."""

    def routes(service: ModelService, tenant_of: TenantOf) -> APIRouter:
        router = APIRouter()

        @router.post(_PATH)
        async def chat_completions(
            request: Request, tenant: Annotated[str, Depends(tenant_of)]
        ) -> Response:
            """Pass a chat on."""
            body = await read_json(request, dict[str, Any], service.max_body_bytes)
            model = body.get("model")
            if model is not None and not isinstance(model, str):
                raise InvalidRequestError("model must be a text", param="model")
            service.check_model(model)
            return _Relay(pool, _conversation(tenant, body), body)

        return router

    return Dialect(routes=routes)


def _conversation(tenant: str, body: dict[str, Any]) -> str:
    """Return what stands for a conversation: it keeps its first messages."""
    messages = body.get("messages")
    first = msgspec.json.encode(messages[:2] if isinstance(messages, list) else None)
    return document_key(tenant, hashlib.blake2b(first, digest_size=8).hexdigest())


class _Relay(Response):
    """An upstream's response. Another one is asked if the first fails before it answers."""

    def __init__(self, pool: UpstreamPool, conversation: str, body: dict[str, Any]) -> None:
        super().__init__()
        self._pool = pool
        self._conversation = conversation
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response (ASGI)."""
        failed: list[tuple[Upstream, UpstreamFailedError]] = []
        while True:
            upstream = self._pool.choose(self._conversation, [each for each, _ in failed])
            if upstream is None:
                raise self._pool.error(failed)
            try:
                async with upstream.relay(_PATH, {**self._body, "model": upstream.model}) as answer:
                    await _send(answer, send)
                return
            except UpstreamFailedError as failure:
                failed.append((upstream, failure))


async def _send(answer: ClientResponse, send: Send) -> None:
    head = [(b"content-type", answer.content_type.encode("latin-1"))]
    await send({"type": "http.response.start", "status": answer.status, "headers": head})
    async for chunk in answer.content.iter_any():
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})
