"""An editor in tests: pytest-lsp's client of a real ``midfill lsp`` process."""

import contextlib
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from lsprotocol import types
from processes import stopped
from pytest_lsp import LanguageClient, make_test_lsp_client

INLINE = types.TextDocumentClientCapabilities(
    inline_completion=types.InlineCompletionClientCapabilities()
)
AUTOMATIC = types.InlineCompletionTriggerKind.Automatic
INVOKED = types.InlineCompletionTriggerKind.Invoked


def position(line: int, column: int) -> types.Position:
    return types.Position(line, column)


def insertion(line: int, column: int, text: str) -> types.TextDocumentContentChangePartial:
    """What an editor sends when text is typed at a place."""
    place = types.Position(line, column)
    return types.TextDocumentContentChangePartial(types.Range(place, place), text)


def frame(message: object) -> bytes:
    """A message as it is on the wire."""
    body = json.dumps(message).encode()
    return b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


@dataclass
class Editor:
    """A connected client.

    Attributes:
        client: pytest-lsp's.
        result: the server's answer to initialize.
    """

    client: LanguageClient
    result: types.InitializeResult
    _versions: Iterator[int] = field(default_factory=lambda: itertools.count(2))
    _names: Iterator[int] = field(default_factory=itertools.count)

    def open(self, text: str) -> str:
        """Open a new document; return its name."""
        uri = f"file:///project/{next(self._names)}.py"
        document = types.TextDocumentItem(uri, types.LanguageKind.Python, 1, text)
        self.client.text_document_did_open(types.DidOpenTextDocumentParams(document))
        return uri

    def change(self, uri: str, *changes: types.TextDocumentContentChangeEvent) -> None:
        """Tell the server of changes."""
        document = types.VersionedTextDocumentIdentifier(next(self._versions), uri)
        self.client.text_document_did_change(types.DidChangeTextDocumentParams(document, changes))

    def send(self, method: str, params: object) -> None:
        """Send a notification as it is."""
        self.client.protocol._send_data({"jsonrpc": "2.0", "method": method, "params": params})

    def close(self, uri: str) -> None:
        """Close a document."""
        params = types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(uri))
        self.client.text_document_did_close(params)

    async def ask(
        self,
        uri: str,
        line: int,
        column: int,
        kind: types.InlineCompletionTriggerKind = AUTOMATIC,
        message_id: str | None = None,
    ) -> list[types.InlineCompletionItem] | None:
        """Return the inline completions at a place; None is the server's null."""
        params = types.InlineCompletionParams(
            types.InlineCompletionContext(kind),
            types.TextDocumentIdentifier(uri),
            types.Position(line, column),
        )
        answer = await self.client.protocol.send_request_async(
            types.TEXT_DOCUMENT_INLINE_COMPLETION, params, msg_id=message_id
        )
        return None if answer is None else list(answer.items)

    async def menu(self, uri: str, line: int, column: int) -> types.CompletionList:
        """Return the completions of a menu at a place."""
        answer = await self.client.text_document_completion_async(
            types.CompletionParams(types.TextDocumentIdentifier(uri), types.Position(line, column))
        )
        assert isinstance(answer, types.CompletionList)
        return answer

    async def execute(self, command: types.Command) -> Any:
        """Have the server execute a command."""
        return await self.client.workspace_execute_command_async(
            types.ExecuteCommandParams(command.command, command.arguments)
        )

    async def counts(self) -> dict[str, int]:
        """Return the server's statistics."""
        counts = await self.execute(types.Command("", "midfill.statistics"))
        return counts if isinstance(counts, dict) else counts._asdict()

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Have the server read what is sent in the block only after it."""
        with stopped(self.process_id):
            yield

    def cancel(self, message_id: str) -> None:
        """Cancel a request."""
        self.client.cancel_request(types.CancelParams(message_id))

    def configure(self, **settings: object) -> None:
        """Send settings."""
        self.client.workspace_did_change_configuration(
            types.DidChangeConfigurationParams({"midfill": settings})
        )

    async def message_count(self, count: int) -> None:
        """Wait until the user was shown so many messages."""
        while len(self.messages) < count:
            await self.client.wait_for_notification(types.WINDOW_SHOW_MESSAGE)

    @property
    def process_id(self) -> int:
        """The server's process."""
        assert self.client._server is not None
        return self.client._server.pid

    @property
    def messages(self) -> list[str]:
        """What the user was shown."""
        return [message.message for message in self.client.messages]


@contextlib.asynccontextmanager
async def connected(
    *options: str,
    text_document: types.TextDocumentClientCapabilities | None = INLINE,
    encodings: Sequence[types.PositionEncodingKind] | None = None,
    settings: dict[str, object] | None = None,
    configuration: dict[str, object] | None = None,
    progress: bool = False,
) -> AsyncIterator[Editor]:
    """Start ``midfill lsp`` with options and connect to it; it must end well with the block.

    Args:
        options: of the command line.
        text_document: what the client can do with documents.
        encodings: position encodings that the client knows, its favourite first.
        settings: ``initializationOptions``.
        configuration: what the server may ask for by ``workspace/configuration``.
        progress: whether the client shows progress.
    """
    client = make_test_lsp_client()
    await client.start_io(sys.executable, "-m", "midfill", "lsp", *options, env={**os.environ})
    workspace = None
    if configuration is not None:
        client.set_configuration(configuration, section="midfill")
        changes = types.DidChangeConfigurationClientCapabilities(dynamic_registration=True)
        workspace = types.WorkspaceClientCapabilities(
            configuration=True, did_change_configuration=changes
        )
        client.feature(types.CLIENT_REGISTER_CAPABILITY)(lambda params: None)
    general = types.GeneralClientCapabilities(position_encodings=encodings)
    capabilities = types.ClientCapabilities(
        workspace=workspace,
        text_document=text_document,
        general=general,
        window=types.WindowClientCapabilities(work_done_progress=progress),
    )
    result = await client.initialize_session(
        types.InitializeParams(capabilities, initialization_options=settings)
    )
    yield Editor(client, result)
    await client.shutdown_session()
    assert client._server is not None
    assert client._server.returncode == 0
    await client.stop()
