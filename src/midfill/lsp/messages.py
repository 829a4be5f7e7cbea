"""What clients send, as far as this server reads it.

Clients differ in what they leave out or send as null; these structs accept all of it. Unknown
fields are ignored. Names on the wire are LSP's and, for the last two, those of GitHub's Copilot
language server, which clients know for what LSP has no message for.
"""

from typing import Annotated, Any

import msgspec

from midfill.lsp.documents import Change, Place

COMPLETION = "textDocument/completion"
DID_CHANGE = "textDocument/didChange"
DID_CLOSE = "textDocument/didClose"
DID_OPEN = "textDocument/didOpen"
DID_PARTIALLY_ACCEPT = "textDocument/didPartiallyAcceptCompletion"
DID_SHOW = "textDocument/didShowCompletion"
INLINE_COMPLETION = "textDocument/inlineCompletion"

Count = Annotated[int, msgspec.Meta(ge=0)]


class Message(msgspec.Struct, rename="camel"):
    """Base of all: LSP's names are in camel case."""


class Position(Message):
    """A place in a document; a character is a code unit of the agreed encoding."""

    line: Count
    character: Count

    def place(self) -> Place:
        return Place(self.line, self.character)


class Range(Message):
    """Two places in a document."""

    start: Position
    end: Position


class TextDocument(Message):
    """A document by its name."""

    uri: str


class OpenedTextDocument(TextDocument):
    """A document with its text."""

    text: str


class ContentChange(Message):
    """A change of a part of a document or, without a range, of all of it."""

    text: str
    range: Range | None = None

    def change(self) -> Change:
        if self.range is None:
            return Change(self.text)
        return Change(self.text, self.range.start.place(), self.range.end.place())


class DidOpen(Message):
    text_document: OpenedTextDocument


class DidChange(Message):
    text_document: TextDocument
    content_changes: list[ContentChange]


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
