"""ServerAccess: which server is asked, and the one that is started where none answers."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import cached_property
from typing import TYPE_CHECKING

from midfill.errors import MidfillError
from midfill.lsp.child_server import ChildServer
from midfill.lsp.settings import Settings
from midfill.lsp.suggestions import (
    CompletionQuery,
    Completions,
    ServerBusyError,
    ServerStartError,
    ServerUnreachableError,
)
from midfill.system.progress import Stage

if TYPE_CHECKING:
    from midfill.lsp.api_client import ApiClient

Loading = Callable[[str], AbstractAsyncContextManager[Callable[[Stage], None]]]

_ENDING_SECONDS = 2.0  # from the end of a connection to its server
_FIRST_PAUSE, _LAST_PAUSE = 5.0, 300.0  # seconds between attempts to start a server


class ServerAccess:
    """Asks the server at ``url``, or one of the language server's own.

    Args:
        settings: which.
        show_loading: returns a context in which the user sees that a model (by its name) is loaded;
            what it yields is called with what that is waiting for.
        on_failure: called when the language server's own server can't be started.
    """

    def __init__(
        self,
        settings: Settings,
        show_loading: Loading,
        on_failure: Callable[[ServerStartError], None],
    ) -> None:
        self._settings = settings
        self._own = _OwnServer(settings.model, show_loading, on_failure)

    async def prepare(self) -> None:
        """Start the language server's own server if it will be needed."""
        settings, client = self._settings, self._client
        if settings.model or (settings.start and not await client.is_healthy()):
            self._own.start()

    async def complete(self, query: CompletionQuery) -> Completions:
        """Return completions.

        Raises:
            ServerUnreachableError, ServerBusyError, RequestRefusedError: see ``ApiClient``.
            ServerStartError: the language server's own server is needed, but can't be started.
        """
        if self._settings.model is None:
            try:
                return await self._client.complete(query)
            except ServerUnreachableError:
                if not self._settings.start:
                    raise
        return await self._own.complete(query)

    async def close(self) -> None:
        """Close connections, and end the language server's own server."""
        if "_client" in vars(self):
            await self._client.close()
        await self._own.close()

    @cached_property
    def _client(self) -> "ApiClient":
        return _connect(self._settings.url, self._settings.sent_key)


class _OwnServer:
    """A ``ChildServer`` that is started when it is needed, and again when it has died."""

    def __init__(
        self,
        model: str | None,
        show_loading: Loading,
        on_failure: Callable[[ServerStartError], None],
    ) -> None:
        self._model = model
        self._show_loading = show_loading
        self._on_failure = on_failure
        self._child: ChildServer | None = None
        self._client: ApiClient | None = None  # of the child, once it is ready
        self._loading: asyncio.Task[None] | None = None
        self._failures = 0  # since the last successful start
        self._not_before = 0.0  # time.monotonic() of the next attempt

    def start(self) -> None:
        """Start the server, unless it runs or was tried too recently."""
        ready = self._client is not None and self._child is not None and self._child.running
        if not ready and self._loading is None and time.monotonic() >= self._not_before:
            self._loading = asyncio.create_task(self._load(), name="start of a server")

    async def complete(self, query: CompletionQuery) -> Completions:
        """Return completions; see ``ServerAccess.complete``."""
        if self._client is not None:
            try:
                return await self._client.complete(query)
            except ServerUnreachableError:
                # Connections break a little before the end of a process is known.
                if self._child is not None and not await self._child.has_ended(_ENDING_SECONDS):
                    raise
        self.start()
        if self._loading is None:
            raise ServerStartError("the server could not be started; it will be tried again")
        raise ServerBusyError("the model is being loaded")

    async def close(self) -> None:
        """End the server, also while it is loading."""
        if self._loading is not None:
            self._loading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._loading
        await self._close_child()

    async def _load(self) -> None:
        try:
            await self._close_child()
            async with self._show_loading(self._model or "the default model") as show_stage:
                self._child = await ChildServer.start(self._model)
                url = await self._child.ready(show_stage)
            self._client = _connect(url, self._child.api_key)
            self._failures = 0
        except MidfillError as error:
            self._failures += 1
            self._not_before = time.monotonic() + pause_after(self._failures)
            self._on_failure(ServerStartError(str(error)))
        finally:
            self._loading = None

    async def _close_child(self) -> None:
        if self._client is not None:
            await self._client.close()
        if self._child is not None:
            await self._child.close()
        self._client = self._child = None


def _connect(url: str, api_key: str | None) -> "ApiClient":
    # Its libraries take a tenth of a second to import, for which no editor need wait at the start.
    from midfill.lsp.api_client import ApiClient

    return ApiClient(url, api_key)


def pause_after(failures: int) -> float:
    """Return the seconds to wait before the next attempt, after so many failed in a row."""
    return float(min(_FIRST_PAUSE * 2 ** (failures - 1), _LAST_PAUSE))
