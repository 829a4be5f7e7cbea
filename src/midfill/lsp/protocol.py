"""The protocol as pygls speaks it, with two differences: what is read, and how faults end.

Requests about documents are decoded into this server's own structs. A message that can't be decoded
is answered with an error if it is a request, so that its client never waits, and is one line in the
log otherwise.
"""

import contextlib
import logging
from typing import Any

import msgspec
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams
from pygls.protocol import JsonRPCNotification, JsonRPCRequestMessage, LanguageServerProtocol

from midfill.lsp.documents import Change, Count, Position

COMPLETION = "textDocument/completion"
DID_CHANGE = "textDocument/didChange"
DID_CLOSE = "textDocument/didClose"
DID_OPEN = "textDocument/didOpen"
DID_PARTIALLY_ACCEPT = "textDocument/didPartiallyAcceptCompletion"
DID_SHOW = "textDocument/didShowCompletion"
INLINE_COMPLETION = "textDocument/inlineCompletion"

_log = logging.getLogger(__name__)


class Message(msgspec.Struct, rename="camel"):
    """Base of what clients send, as far as this server reads it.

    Clients differ in what they leave out or send as null; these structs accept all of it. Unknown
    fields are ignored. Names on the wire are LSP's, in camel case, and, for the last two, those of
    GitHub's Copilot language server, which clients know for what LSP has no message for.
    """


class TextDocument(Message):
    """A document by its name."""

    uri: str


class OpenedTextDocument(TextDocument):
    """A document with its text."""

    text: str


class DidOpen(Message):
    text_document: OpenedTextDocument


class DidChange(Message):
    text_document: TextDocument
    content_changes: list[Change]


class DidClose(Message):
    text_document: TextDocument


class TriggerContext(Message):
    """Why completions are asked for.

    Attributes:
        trigger_kind: of an inline completion, 1 if the user asked for it.
    """

    trigger_kind: int = 2


class AskCompletion(Message):
    """The parameters of both completion requests."""

    text_document: TextDocument
    position: Position
    context: TriggerContext | None = None

    @property
    def invoked(self) -> bool:
        """Whether the user asked for an inline completion, rather than the editor by itself."""
        return self.context is not None and self.context.trigger_kind == 1


class ItemCommand(Message):
    """The command of an item that this server has sent."""

    arguments: list[Any] | None = None


class ShownItem(Message):
    """An item that this server has sent."""

    command: ItemCommand | None = None

    @property
    def suggestion(self) -> object:
        """What should be the id of the item's suggestion."""
        arguments = None if self.command is None else self.command.arguments
        return arguments[0] if arguments else None


class DidShow(Message):
    item: ShownItem


class DidPartiallyAccept(Message):
    """
    Attributes:
        accepted_length: UTF-16 code units of the item's insertText that were accepted so far.
    """

    item: ShownItem
    accepted_length: Count = 0


PARAMETERS: dict[str, type[Message]] = {
    COMPLETION: AskCompletion,
    DID_CHANGE: DidChange,
    DID_CLOSE: DidClose,
    DID_OPEN: DidOpen,
    DID_PARTIALLY_ACCEPT: DidPartiallyAccept,
    DID_SHOW: DidShow,
    INLINE_COMPLETION: AskCompletion,
}


class MidfillProtocol(LanguageServerProtocol):
    """Decodes messages and hands them to the features that are registered for them."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        """Return a JSON object as it is; ``handle_message`` decodes the whole message."""
        return data

    def handle_message(self, message: Any) -> None:
        """Decode a message and start what it asks for."""
        if not isinstance(message, dict):
            _log.warning("ignored: a message that is no object")
            return
        try:
            decoded = self._decode(message)
        except (msgspec.ValidationError, JsonRpcException) as error:
            self._report_fault(message, error)
            return
        super().handle_message(decoded)

    def _decode(self, message: dict[str, Any]) -> Any:
        method = message.get("method")
        if not isinstance(method, str) or method not in PARAMETERS:
            return super().structure_message({"jsonrpc": "2.0", **message})
        params = msgspec.convert(message.get("params"), PARAMETERS[method])
        if "id" in message:
            return JsonRPCRequestMessage(message["id"], method, "2.0", params)
        return JsonRPCNotification(method, "2.0", params)

    def _report_fault(self, message: dict[str, Any], error: Exception) -> None:
        """Answer a request that can't be decoded; log a notification that can't."""
        method = message.get("method") or "a message"
        fault = f"{method} can't be read: {error}"
        _log.warning("%s", fault)
        if "id" in message and "method" in message:
            self._send_response(
                message["id"], error=JsonRpcInvalidParams(fault).to_response_error()
            )
        elif method == DID_CHANGE:
            # What the document holds now is unknown. No completions are better than those of
            # another text.
            with contextlib.suppress(msgspec.ValidationError):
                close = msgspec.convert(message.get("params"), DidClose)
                super().handle_message(JsonRPCNotification(DID_CLOSE, "2.0", close))
