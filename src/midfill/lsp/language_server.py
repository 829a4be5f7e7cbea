"""MidfillLanguageServer: LSP's features on top of documents, settings and completions."""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any, TypeVar
from uuid import uuid4

import msgspec
from lsprotocol import types
from pygls.exceptions import JsonRpcException
from pygls.lsp.server import LanguageServer

from midfill.errors import MidfillError
from midfill.lsp import protocol
from midfill.lsp.completer import Completer, Kind, Request, caret_after
from midfill.lsp.documents import Document, PositionEncoding, utf16_length
from midfill.lsp.server_access import ServerAccess
from midfill.lsp.settings import SECTION, Settings
from midfill.lsp.statistics import Statistics
from midfill.lsp.suggestions import (
    ACCEPTED_COMMAND,
    ServerBusyError,
    ServerUnreachableError,
    Suggestion,
    inline_items,
    menu_items,
    replaced_text,
    wants_snippets,
)
from midfill.system.progress import Stage
from midfill.version import __version__

_log = logging.getLogger(__name__)

T = TypeVar("T")

STATISTICS_COMMAND = "midfill.statistics"

_MENU_TRIGGERS = tuple(" .,:=([{<+-*/|&")
_CLIENT_SECONDS = 2.0  # to wait for a client's answer
_PATIENCE_SECONDS = 3.0  # before a user is told why there are no completions yet

_ENCODINGS: tuple[PositionEncoding, ...] = ("utf-8", "utf-16", "utf-32")


class Notices:
    """Remembers which kinds of trouble the user was told of; each is told again once it is over."""

    def __init__(self) -> None:
        self._told: set[type[MidfillError]] = set()

    def arises(self, trouble: MidfillError) -> bool:
        """Note a trouble; return whether the user is to be told.

        A server that is busy is none to tell of: it will soon be ready by itself.
        """
        if isinstance(trouble, ServerBusyError) or type(trouble) in self._told:
            return False
        self._told.add(type(trouble))
        return True

    def over(self) -> bool:
        """Note that a server has answered; return whether the user was told of any trouble."""
        told = bool(self._told)
        self._told.clear()
        return told


class MidfillLanguageServer:
    """One client's language server. Make it, and call its methods, in the event loop.

    Args:
        settings: of the command line; the client's come on top of them.

    Attributes:
        pygls: speaks the protocol.
    """

    def __init__(self, settings: Settings) -> None:
        self.pygls = LanguageServer("midfill", __version__, protocol_cls=protocol.MidfillProtocol)
        self._base = settings  # of the command line and the client's initializationOptions
        self._settings = settings
        self._documents: dict[str, Document] = {}  # open ones, in their present state
        self._encoding: PositionEncoding = "utf-16"  # of those that are opened from now on
        self._snippets = False  # whether menu items are snippets
        self._statistics = Statistics()
        self._notices = Notices()
        self._problems: list[str] = []  # with the settings that the client has sent last
        self._numbers = itertools.count()
        self._access = self._new_access()
        self._completer = Completer(
            self._access, settings, self._statistics, self._report, self._report_recovery
        )
        self._closing: set[asyncio.Task[None]] = set()
        self._register()

    async def close(self) -> None:
        """End all work, and the server of the language server's own."""
        self._completer.end()
        await asyncio.gather(self._access.close(), *self._closing)
        _log.info("statistics: %s", msgspec.json.encode(self._statistics.counts).decode())

    def _register(self) -> None:
        """Register the features that do not depend on the client."""
        feature, command = self.pygls.feature, self.pygls.command
        builtin = self.pygls.protocol.fm.add_builtin_feature  # in place of pygls's documents
        builtin(protocol.DID_OPEN, self._did_open)
        builtin(protocol.DID_CHANGE, self._did_change)
        builtin(protocol.DID_CLOSE, self._did_close)

        @feature(types.INITIALIZE)
        def initialize(params: types.InitializeParams) -> None:
            self._initialize(params)

        @feature(types.INITIALIZED)
        async def initialized(params: types.InitializedParams) -> None:
            await self._initialized()

        @feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
        async def configure(params: types.DidChangeConfigurationParams) -> None:
            await self._configure(params.settings)

        @feature(protocol.INLINE_COMPLETION, types.InlineCompletionOptions())
        async def inline(params: protocol.AskCompletion) -> types.InlineCompletionList | None:
            return await self._inline(params)

        @feature(protocol.DID_SHOW)
        def did_show(params: protocol.DidShow) -> None:
            self._statistics.record_shown(params.item.suggestion)

        @feature(protocol.DID_PARTIALLY_ACCEPT)
        def did_partially_accept(params: protocol.DidPartiallyAccept) -> None:
            self._statistics.record_partially_accepted(
                params.item.suggestion, params.accepted_length
            )

        @command(ACCEPTED_COMMAND)
        def accepted(*suggestions: Any) -> None:
            for suggestion in suggestions:
                self._statistics.record_accepted(suggestion)

        @command(STATISTICS_COMMAND)
        def statistics(*_: Any) -> dict[str, int]:
            return dict(msgspec.to_builtins(self._statistics.counts))

    # Documents

    def _did_open(self, params: protocol.DidOpen) -> None:
        document = params.text_document
        uri = document.uri
        self._documents[uri] = Document.opened(uri, document.text, self._encoding)
        self._completer.document_changed(document.uri)

    def _did_change(self, params: protocol.DidChange) -> None:
        uri = params.text_document.uri
        changes = params.content_changes
        before = self._documents.get(uri)
        if before is None:
            _log.warning("ignored: a change of %s, which is not open", uri)
            return
        after = self._documents[uri] = before.changed(changes)
        self._completer.document_changed(uri)
        caret = caret_after(before, changes)
        if caret is not None:
            self._completer.caret_moved(after, caret)

    def _did_close(self, params: protocol.DidClose) -> None:
        self._documents.pop(params.text_document.uri, None)
        self._completer.document_closed(params.text_document.uri)

    # Completions

    async def _inline(self, params: protocol.AskCompletion) -> types.InlineCompletionList | None:
        asked = self._request(params, "inline", params.invoked)
        if asked is None:
            return None
        request, document = asked
        suggestions = await self._completer.complete(request, document)
        if suggestions is None:
            return None
        self._record_sent(suggestions, replaced_text(document, request.index))
        return types.InlineCompletionList(inline_items(document, request.index, suggestions))

    async def _menu(self, params: protocol.AskCompletion) -> types.CompletionList:
        # Editors ask with the trigger kind "invoked" for each typed letter, too.
        asked = self._request(params, "menu", invoked=False)
        items: list[types.CompletionItem] = []
        if asked is not None:
            request, document = asked
            suggestions = await self._completer.complete(request, document)
            if suggestions is not None:
                self._record_sent(suggestions, "")
                items = menu_items(document, request.index, suggestions, snippets=self._snippets)
        return types.CompletionList(is_incomplete=True, items=items)

    def _request(
        self, params: protocol.AskCompletion, kind: Kind, invoked: bool
    ) -> tuple[Request, Document] | None:
        """Return a request and its document in the present state; None if that is not open."""
        document = self._documents.get(params.text_document.uri)
        if document is None:
            _log.warning("nothing to complete: %s is not open", params.text_document.uri)
            return None
        index = document.index_at(params.position)
        number = next(self._numbers)
        return Request(number, document.uri, document.revision, index, kind, invoked), document

    def _record_sent(self, suggestions: list[Suggestion], replaced: str) -> None:
        for suggestion in suggestions:
            self._statistics.record_sent(
                suggestion.id, utf16_length(replaced), utf16_length(suggestion.text)
            )

    # Settings

    def _initialize(self, params: types.InitializeParams) -> None:
        self._base = self._updated(self._base, params.initialization_options)
        self._use(self._base)
        # For clients that never say that they are initialized.
        asyncio.get_running_loop().call_later(2 * _CLIENT_SECONDS, self._completer.start)
        agreed = self.pygls.workspace.position_encoding  # an enumeration, equal to its values
        (self._encoding,) = (each for each in _ENCODINGS if each == agreed)
        capabilities = params.capabilities.text_document
        knows_inline = capabilities is not None and capabilities.inline_completion is not None
        menu = self._settings.menu
        self._snippets = wants_snippets(params)
        if menu == "always" or (menu == "auto" and not knows_inline):

            @self.pygls.feature(
                protocol.COMPLETION,
                types.CompletionOptions(trigger_characters=_MENU_TRIGGERS),
            )
            async def complete(params: protocol.AskCompletion) -> types.CompletionList:
                return await self._menu(params)

    async def _initialized(self) -> None:
        await self._configure(None)
        self._completer.start()
        workspace = self.pygls.client_capabilities.workspace
        changes = workspace and workspace.did_change_configuration
        if changes and changes.dynamic_registration:
            method = types.WORKSPACE_DID_CHANGE_CONFIGURATION
            options = types.DidChangeConfigurationRegistrationOptions(section=SECTION)
            registration = types.Registration(str(uuid4()), method, options)
            with _client_errors_logged(
                types.CLIENT_REGISTER_CAPABILITY, "it may not tell when its settings change"
            ):
                params = types.RegistrationParams([registration])
                await _soon(self.pygls.client_register_capability_async(params))

    async def _configure(self, given: object) -> None:
        """Use the client's settings: those it has sent or, if it sends none, those it has."""
        workspace = self.pygls.client_capabilities.workspace
        if not given and workspace and workspace.configuration:
            item = types.ConfigurationItem(section=SECTION)
            with _client_errors_logged(
                types.WORKSPACE_CONFIGURATION, "the settings known so far are used"
            ):
                params = types.ConfigurationParams([item])
                (given,) = await _soon(self.pygls.workspace_configuration_async(params))
        self._use(self._updated(self._base, given))
        await self._access.prepare()

    def _updated(self, settings: Settings, given: object) -> Settings:
        """Return settings with the client's on top; tell the user what is newly wrong with these.

        Clients often send the same settings several times.
        """
        updated, problems = settings.updated(given)
        for problem in problems:
            if problem not in self._problems:
                self._tell(types.MessageType.Warning, f"a setting is ignored: {problem}")
        self._problems = problems
        return updated

    def _use(self, settings: Settings) -> None:
        if settings == self._settings:
            return
        before, self._settings = self._settings, settings
        if settings.access != before.access:
            old, self._access = self._access, self._new_access()
            self._notices.over()
            closing = asyncio.create_task(old.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        self._completer.configure(self._access, settings)

    def _new_access(self) -> ServerAccess:
        return ServerAccess(self._settings, self._show_loading, self._report)

    # What the user is told

    def _report(self, trouble: MidfillError) -> None:
        """Log a trouble, and tell the user the first time."""
        _log.info("%s", trouble)
        if self._notices.arises(trouble):
            advice = ""
            if isinstance(trouble, ServerUnreachableError):
                advice = "; start one with: midfill serve"
            self._tell(types.MessageType.Warning, f"{trouble}{advice}")

    def _report_recovery(self) -> None:
        if self._notices.over():
            text = "midfill: completions work again"
            self.pygls.window_log_message(types.LogMessageParams(types.MessageType.Info, text))

    def _tell(self, kind: types.MessageType, text: str) -> None:
        _log.warning("%s", text)
        self.pygls.window_show_message(types.ShowMessageParams(kind, f"midfill: {text}"))

    def _show_message(self, text: str) -> None:
        _log.info("%s", text)
        self.pygls.window_show_message(types.ShowMessageParams(types.MessageType.Info, text))

    @contextlib.asynccontextmanager
    async def _show_loading(self, model: str) -> AsyncIterator[Callable[[Stage], None]]:
        """Show that a model is being loaded, and what that waits for, as the client can."""
        window = self.pygls.client_capabilities.window
        title = f"midfill: loading {model}"
        _log.info("%s", title)
        progress, token = self.pygls.work_done_progress, str(uuid4())
        shown = False
        if window and window.work_done_progress:
            with _client_errors_logged(
                types.WINDOW_WORK_DONE_PROGRESS_CREATE, "it can't show that a model is loading"
            ):
                await _soon(progress.create_async(token))
                shown = True
        if not shown:
            messages = LoadingMessages(title, self._show_message)
            timer = asyncio.get_running_loop().call_later(_PATIENCE_SECONDS, messages.begin)
            try:
                yield messages.stage
            finally:
                timer.cancel()
            return
        # Without percentages: each stage has its own, and LSP's must not go down.
        progress.begin(token, types.WorkDoneProgressBegin(title))
        try:
            yield lambda stage: progress.report(
                token, types.WorkDoneProgressReport(message=str(stage))
            )
        finally:
            progress.end(token, types.WorkDoneProgressEnd())


class LoadingMessages:
    """What the user of a client that shows no progress is told while a model is loaded.

    It begins a little after the load: one that is short needs no words.

    Args:
        title: what is going on.
        show: shows the user a message.
    """

    def __init__(self, title: str, show: Callable[[str], None]) -> None:
        self._title = title
        self._show = show
        self._stage = Stage("starting")
        self._begun = False

    def begin(self) -> None:
        """Tell of the present stage, and of each that follows."""
        self._begun = True
        self._show(f"{self._title} ({self._stage}); completions come after that")

    def stage(self, stage: Stage) -> None:
        """Note what is being waited for."""
        before, self._stage = self._stage, stage
        if self._begun and stage.name != before.name:
            self.begin()


@contextlib.contextmanager
def _client_errors_logged(method: str, consequence: str) -> Iterator[None]:
    """Log that a request to the client has no usable answer and what follows from it, and go on."""
    try:
        yield
    except (JsonRpcException, ValueError) as error:
        _log.warning("the client's answer to %s is ignored (%s): %s", method, error, consequence)
    except TimeoutError:
        _log.warning(
            "the client has not answered %s within %g s: %s", method, _CLIENT_SECONDS, consequence
        )


async def _soon(answer: Awaitable[T]) -> T:
    """Return a client's answer.

    Raises:
        TimeoutError: it has none; without it, nothing of this server would start.
    """
    return await asyncio.wait_for(answer, _CLIENT_SECONDS)
