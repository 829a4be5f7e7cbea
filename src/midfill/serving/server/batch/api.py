"""InProcessApi: the rows of a batch, asked of the server's own routes without a socket.

A row is a request of HTTP in all but its way here: the same route reads its body, checks it, and
makes the response or the error. So batches speak whatever the routes speak, and no line of the
protocol is written twice. The application is called by ASGI, which is a function call.

A row's prompt is planned by the route, too: it goes as far as ``ModelService.generate``, which
notes the prompts and goes no further. ``RowService`` remembers no documents, so the prompt is the
same when the row is answered, and an answer depends on its row alone: not on the order of the rows,
and not on where a batch was interrupted.
"""

import asyncio
import dataclasses
from contextvars import ContextVar

import numpy as np
from fastapi import FastAPI, Request
from msgspec import structs
from starlette.types import ASGIApp, Message

from midfill.errors import InvalidRequestError, MidfillError
from midfill.serving.server.batch.job import Answered, PlannedPrompt
from midfill.serving.server.dialects import openai, openai_completions
from midfill.serving.server.request import Generation, GenerationRequest
from midfill.serving.server.responses import install_error_handlers
from midfill.serving.server.service import ModelService

_TENANT = "midfill.tenant"


_planned: ContextVar[list[GenerationRequest] | None] = ContextVar("_planned", default=None)


class _PlannedError(MidfillError):
    """Ends a request that is only planned."""


class RowService(ModelService):
    """A model as rows of batches see it: nobody waits for them, so they run while others don't."""

    def generate(self, request: GenerationRequest) -> Generation:
        """Prepare the generation of answers, or end it here if it is only planned.

        What a row supersedes is ignored: rows are no keystrokes of which the last one counts.

        Raises:
            InvalidRequestError: the answer would be streamed, but a row has one result.
        """
        if request.streamed:
            raise InvalidRequestError("a row of a batch can't be streamed", param="stream")
        planned = _planned.get()
        if planned is not None:
            planned.append(request)
            raise _PlannedError("planned")
        hints = structs.replace(request.hints, offline=True)
        return super().generate(dataclasses.replace(request, supersedes=None, hints=hints))


class InProcessApi:
    """Answers the rows of one tenant's batch.

    Args:
        service: the model.
        tenant: whose cache to use.
    """

    def __init__(self, service: RowService, tenant: str = "") -> None:
        self._app = _row_app(service)
        self._context = service.context
        self._tenant = tenant

    async def plan(self, url: str, body: bytes) -> PlannedPrompt | Answered:
        """Return what a row will have computed, or the error that it gets."""
        planned: list[GenerationRequest] = []
        token = _planned.set(planned)
        try:
            answered = await self.answer(url, body)
        finally:
            _planned.reset(token)
        if not planned:
            return answered
        prompts, sampling = planned[0].prompts, planned[0].sampling
        lengths = [len(prompt.token_ids) for prompt in prompts]
        outputs = [min(sampling.max_tokens, self._context - length) for length in lengths]
        return PlannedPrompt(
            np.array(prompts[0].token_ids, np.int32), sum(lengths), sampling.n * sum(outputs)
        )

    async def answer(self, url: str, body: bytes) -> Answered:
        """Return a row's answer, or its error."""
        return await call_app(self._app, url, body, self._tenant)


def _row_app(service: RowService) -> ASGIApp:
    """Return the application of the endpoints that rows may name."""
    app = FastAPI(openapi_url=None)

    async def tenant_of(request: Request) -> str:
        return str(request.scope[_TENANT])

    for dialect in (openai_completions.DIALECT, openai.DIALECT):
        app.include_router(dialect.routes(service, tenant_of))
    install_error_handlers(app, {}, {})
    return app


async def call_app(app: ASGIApp, path: str, body: bytes, tenant: str) -> Answered:
    """Call an ASGI application with a POST request of JSON; return its response."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
        ],
        "client": None,
        "server": None,
        _TENANT: tenant,
    }
    received, status, pieces = False, 500, [b""]
    headers: dict[bytes, bytes] = {}

    async def receive() -> Message:
        nonlocal received
        if received:  # there is no connection that could end
            await asyncio.get_running_loop().create_future()
        received = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
            headers.update(message["headers"])
        else:
            pieces.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:
        if len(pieces) == 1:
            raise
        # Starlette answers with status 500, and raises what it has answered for.
    retry_after = headers.get(b"retry-after")
    return Answered(status, b"".join(pieces), None if retry_after is None else float(retry_after))
