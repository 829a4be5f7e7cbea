"""Suggestions as items of LSP's two completion responses."""

import re
from collections.abc import Sequence

from lsprotocol import types

from midfill.lsp.documents import Document
from midfill.lsp.suggestions import Suggestion

ACCEPTED_COMMAND = "midfill.accepted"

_RUN = re.compile(r"\S*\Z")
_WORD = re.compile(r"\w*\Z")
_MAX_LABEL = 60  # characters


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
    document: Document, index: int, suggestions: Sequence[Suggestion]
) -> list[types.CompletionItem]:
    """Return items of ``textDocument/completion``, which menus filter by the word at the caret."""
    word = _text_before(document, index, _WORD)
    range = _range(document, index, word)
    items = []
    for place, suggestion in enumerate(suggestions):
        text = word + suggestion.text
        label = text.strip().partition("\n")[0].rstrip()
        shown = label if len(label) <= _MAX_LABEL else f"{label[: _MAX_LABEL - 1]}…"
        items.append(
            types.CompletionItem(
                label=shown,
                label_details=types.CompletionItemLabelDetails(description="midfill"),
                kind=types.CompletionItemKind.Text,
                documentation=text,
                sort_text=f" {place}",  # before what other servers offer
                filter_text=text,
                insert_text_format=types.InsertTextFormat.PlainText,
                insert_text_mode=types.InsertTextMode.AsIs,
                text_edit=types.TextEdit(range, text),
                command=_accepted(suggestion),
            )
        )
    return items


def replaced_text(document: Document, index: int) -> str:
    """Return the text before the caret that an inline item replaces."""
    return _text_before(document, index, _RUN)


def _text_before(document: Document, index: int, pattern: re.Pattern[str]) -> str:
    start, _ = document.line_bounds(document.line_at(index))
    match = pattern.search(document.text[start:index])
    assert match is not None  # each pattern matches an empty text
    return match.group()


def _range(document: Document, index: int, replaced: str) -> types.Range:
    start, end = document.place_of(index - len(replaced)), document.place_of(index)
    return types.Range(
        types.Position(start.line, start.column), types.Position(end.line, end.column)
    )


def _accepted(suggestion: Suggestion) -> types.Command:
    return types.Command(
        "Count an accepted completion", ACCEPTED_COMMAND, arguments=[suggestion.id]
    )
