"""Suggestions at a caret: what a server is asked, what it suggests, what editors are sent."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

import msgspec
from lsprotocol import types

from midfill.errors import MidfillError
from midfill.lsp.documents import Document

ACCEPTED_COMMAND = "midfill.accepted"
_RUN = re.compile(r"\S*\Z")
_WORD = re.compile(r"\w*\Z")
_SPECIAL = re.compile(r"[\\$}]")  # in snippets
_MAX_LABEL = 60  # characters


@dataclass(frozen=True)
class Caret:
    """A caret in one state of a document, as the model is shown it.

    Attributes:
        uri: the document.
        prefix, suffix: the text before and after the caret; lines end in ``\\n``.
    """

    uri: str
    prefix: str
    suffix: str

    @classmethod
    def in_text(cls, uri: str, text: str, index: int) -> "Caret":
        """Return the caret before a character of a text with any line breaks."""
        prefix, suffix = text[:index], text[index:]
        if "\r" in text:
            prefix, suffix = (
                part.replace("\r\n", "\n").replace("\r", "\n") for part in (prefix, suffix)
            )
        return cls(uri, prefix, suffix)

    @property
    def at_line_end(self) -> bool:
        """Whether nothing follows in the caret's line."""
        return not self.suffix or self.suffix.startswith("\n")


@dataclass(frozen=True)
class Suggestion:
    """A text to insert at a caret.

    Attributes:
        id: names it in messages from the client.
        text: what to insert, never blank; lines end in ``\\n``.
    """

    id: str
    text: str


class ServerUnreachableError(MidfillError):
    """No server answers."""


class ServerBusyError(MidfillError):
    """The server can't answer now; the same request may succeed soon."""


class RequestRefusedError(MidfillError):
    """The server refuses the request, and would refuse it again."""


class CompletionQuery(msgspec.Struct, frozen=True):
    """What to ask for.

    Attributes:
        caret: where.
        lines: "single" ends a completion at its first line break, "block" where the block around
            the caret ends.
        max_tokens: maximum tokens of a completion.
        count: number of completions; more than one are sampled.
        temperature: 0 takes the most likely tokens.
        suggestion: whether only what is worth showing is wanted of them.
        min_confidence: withhold completions that are less sure; None leaves that to the server, 0
            withholds none.
    """

    caret: Caret
    lines: Literal["single", "block"]
    max_tokens: int
    count: int = 1
    temperature: float = 0.0
    suggestion: bool = True
    min_confidence: float | None = None


class Completions(msgspec.Struct, frozen=True):
    """A server's answer.

    Attributes:
        texts: the completions, which may be empty.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were not computed.
    """

    texts: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int


class ServerStartError(MidfillError):
    """A server is needed that can't be started."""


class LastSuggestions:
    """The suggestion that each document was given last, for as long as the user types along it.

    What the user has typed of it needs no model: the rest still fits, and showing it again keeps
    the editor from flickering.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[Caret, Suggestion]] = {}

    def remember(self, caret: Caret, suggestion: Suggestion) -> None:
        """Note what was suggested at a caret."""
        self._last[caret.uri] = (caret, suggestion)

    def forget(self, uri: str | None = None) -> None:
        """Forget what was suggested in a document, or in all."""
        if uri is None:
            self._last.clear()
        else:
            self._last.pop(uri, None)

    def rest(self, caret: Caret) -> Suggestion | None:
        """Return what is left of the last suggestion if its beginning was typed since then."""
        if caret.uri not in self._last:
            return None
        before, suggestion = self._last[caret.uri]
        if caret.suffix != before.suffix or not caret.prefix.startswith(before.prefix):
            return None
        typed = caret.prefix[len(before.prefix) :]
        rest = suggestion.text[len(typed) :]
        if not suggestion.text.startswith(typed) or not rest.strip():
            return None
        return Suggestion(suggestion.id, rest)


def inline_items(
    document: Document, index: int, suggestions: Sequence[Suggestion]
) -> list[types.InlineCompletionItem]:
    """Return items of ``textDocument/inlineCompletion``.

    An item replaces the characters before the caret up to a blank by themselves and the suggestion.
    Clients then know what it continues when further characters are typed, and those that indent
    lines anew see no indentation where there is none.
    """
    replaced = replaced_text(document, index)
    range = _range(document, index, replaced)
    return [
        types.InlineCompletionItem(
            insert_text=replaced + suggestion.text,
            filter_text=replaced + suggestion.text,
            range=range,
            command=_accepted(suggestion),
        )
        for suggestion in suggestions
    ]


def menu_items(
    document: Document, index: int, suggestions: Sequence[Suggestion], *, snippets: bool = False
) -> list[types.CompletionItem]:
    """Return items of ``textDocument/completion``, which menus filter by the word at the caret.

    Args:
        document: the document.
        index: the caret's, in the document's text.
        suggestions: what to offer.
        snippets: whether an item is a snippet that the client indents, see ``wants_snippets``.
    """
    word = _text_before(document, index, _WORD)
    range = _range(document, index, word)
    indentation = _indentation(document, index, word)
    format = types.InsertTextFormat.Snippet if snippets else types.InsertTextFormat.PlainText
    items = []
    for place, suggestion in enumerate(suggestions):
        text = word + suggestion.text
        if snippets:
            text = _as_far_right(text, indentation)
        label = text.strip().partition("\n")[0].rstrip()
        # Of a snippet, the label is what stands in the text while the item is selected.
        whole = snippets or len(label) <= _MAX_LABEL
        items.append(
            types.CompletionItem(
                label=label if whole else f"{label[: _MAX_LABEL - 1]}…",
                label_details=types.CompletionItemLabelDetails(description="midfill"),
                kind=types.CompletionItemKind.Text,
                documentation=text,
                sort_text=f" {place}",  # before what other servers offer
                filter_text=text,
                insert_text_format=format,
                insert_text_mode=types.InsertTextMode.AsIs,
                text_edit=types.TextEdit(range, _snippet(text, indentation) if snippets else text),
                command=_accepted(suggestion),
            )
        )
    return [item for item in items if item.label]


def wants_snippets(params: types.InitializeParams) -> bool:
    """Whether a client's menu inserts the whole of a snippet only.

    Of a plain text edit, the menu of Neovim 0.11 inserts what stands before the first blank, and
    that of 0.12 the first line. Plugins that are menus of Neovim insert all of it; they say that
    they can replace text as well, which the editor's own menu does not.
    """
    capabilities = params.capabilities.text_document
    menu = capabilities and capabilities.completion and capabilities.completion.completion_item
    if not menu or params.client_info is None or params.client_info.name != "Neovim":
        return False
    return bool(menu.snippet_support) and not menu.insert_replace_support


def _indentation(document: Document, index: int, word: str) -> str:
    """Return the blanks that the caret's line begins with once the word is taken out."""
    start, end = document.line_bounds(document.line_at(index))
    line = document.text[start : index - len(word)] + document.text[index:end]
    return line[: len(line) - len(line.lstrip(" \t"))]


def _as_far_right(text: str, indentation: str) -> str:
    """Return a text up to its first line that is indented less; blank lines don't count."""
    first, *others = text.split("\n")
    kept = takewhile(lambda line: not line.strip() or line.startswith(indentation), others)
    return "\n".join((first, *kept)).rstrip("\n")


def _snippet(text: str, indentation: str) -> str:
    """Return LSP's snippet of a text, for a client that begins its further lines with blanks."""
    return _SPECIAL.sub(r"\\\g<0>", text.replace(f"\n{indentation}", "\n"))


def replaced_text(document: Document, index: int) -> str:
    """Return the text before the caret that an inline item replaces."""
    return _text_before(document, index, _RUN)


def _text_before(document: Document, index: int, pattern: re.Pattern[str]) -> str:
    start, _ = document.line_bounds(document.line_at(index))
    match = pattern.search(document.text[start:index])
    assert match is not None  # each pattern matches an empty text
    return match.group()


def _range(document: Document, index: int, replaced: str) -> types.Range:
    start, end = document.position_of(index - len(replaced)), document.position_of(index)
    return types.Range(
        types.Position(start.line, start.character), types.Position(end.line, end.character)
    )


def _accepted(suggestion: Suggestion) -> types.Command:
    return types.Command(
        "Count an accepted completion", ACCEPTED_COMMAND, arguments=[suggestion.id]
    )
