"""ModelSwitch: hands each request to the model that it names."""

from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from midfill.errors import MidfillError
from midfill.serving.server.auth import KeyRing, find_tenant
from midfill.serving.server.dialects.dialect import Dialect
from midfill.serving.server.models.host import ModelHost
from midfill.serving.server.request import current_request
from midfill.serving.server.responses import (
    ApiError,
    error_response,
    openai_error_body,
)
from midfill.system.logs import log_context

_TAG = ":latest"  # Ollama's; a name means the same with and without


class _Named(msgspec.Struct):
    """What bodies say of the model; ``name`` is Ollama's older spelling."""

    model: str | None = None
    name: str | None = None


_read_names = msgspec.json.Decoder(_Named).decode


class ModelSwitch:
    """ASGI application of several models.

    A POST request is the model's that its JSON body names, and the default's where it names none.
    What it names must exist; whoever answers says so. All else is of the server as a whole, and any
    model in memory answers it.

    Args:
        host: the models.
        keys: tell whose request it is: nobody else has models loaded.
        dialects: know how errors look at a path.
        max_body_bytes: of larger bodies no model is looked for; they are refused in any case.
    """

    def __init__(
        self, host: ModelHost, keys: KeyRing, dialects: Sequence[Dialect], max_body_bytes: int
    ) -> None:
        self._host = host
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._at_path = {path: each.error_body for each in dialects for path in each.queued}
        self._below = {each.prefix: each.error_body for each in dialects if each.prefix is not None}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        # The next request of a connection may begin in the last one's context. What that has noted
        # of its sender must not speak for this one.
        current_request.set(None)
        log_context.set({})
        name: str | None = None
        if scope["type"] == "http" and scope["method"] == "POST" and self._may_ask(scope):
            body = await _Body.read(receive, self._max_body_bytes)
            name, receive = self._model_of(body), body.replayed(receive)
        elif (running := self._host.running) is not None:
            await running.app(scope, receive, send)
            return
        elif self._host.is_loading:
            await self._refuse(_is_loading(), scope, receive, send)
            return
        try:
            async with self._host.use(name) as model:
                await model.app(scope, receive, send)
        except MidfillError as error:  # it isn't loaded: models answer for what happens in them
            await self._refuse(error, scope, receive, send)

    def _may_ask(self, scope: Scope) -> bool:
        try:
            find_tenant(Request(scope), self._keys)
        except MidfillError:  # any model refuses it, without a look at the body
            return False
        return True

    def _model_of(self, body: "_Body") -> str | None:
        try:
            named = _read_names(body.content)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        name = named.model or named.name or ""
        for each in (name, name.removesuffix(_TAG)):
            if each in self._host.names:
                return each
        return None

    async def _refuse(
        self, error: MidfillError, scope: Scope, receive: Receive, send: Send
    ) -> None:
        path = scope["path"]
        below = (shape for prefix, shape in self._below.items() if path.startswith(prefix))
        shape = self._at_path.get(path) or next(below, openai_error_body)
        await error_response(error, shape)(scope, receive, send)


def _is_loading() -> ApiError:
    return ApiError(
        503, "a model is being loaded; try again in a moment", code="model_loading",
        headers={"retry-after": "1"},
    )  # fmt: skip


class _Body:
    """A request's body, read ahead."""

    def __init__(self, messages: list[Message], *, is_whole: bool) -> None:
        self._messages = messages
        self._is_whole = is_whole

    @classmethod
    async def read(cls, receive: Receive, limit: int) -> "_Body":
        """Read it to its end, or until it is larger than so many bytes."""
        messages: list[Message] = []
        size = 0
        while True:
            message = await receive()
            messages.append(message)
            size += len(message.get("body", b""))
            if not message.get("more_body", False) or size > limit:
                return cls(messages, is_whole=size <= limit)

    @property
    def content(self) -> bytes:
        """The whole body; nothing of one that is too large."""
        if not self._is_whole:
            return b""
        return b"".join(message.get("body", b"") for message in self._messages)

    def replayed(self, receive: Receive) -> Receive:
        """Return what receives these messages once more, and then those that follow them."""
        ahead = iter(self._messages)

        async def replay() -> Message:
            message = next(ahead, None)
            return await receive() if message is None else message

        return replay
