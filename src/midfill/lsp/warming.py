"""Warming: when to have a prompt computed before the editor asks for completions there.

Where the user goes on typing, nearly all of the next prompt is in the server's cache. Where they
start to type elsewhere, none of the text around the caret is. The first change there tells the
place; editors ask a moment later: after 0.2 s (Neovim), 0.25 s (Helix), or 2 s (lsp-mode).
"""

from dataclasses import dataclass

from midfill.lsp.documents import Change, Document

_MAX_TYPED = 200  # characters; longer insertions are formatting, or text from elsewhere


@dataclass(frozen=True)
class CaretPlace:
    """Where a caret is: in a line of a document."""

    uri: str
    line: int

    def near(self, other: "CaretPlace | None") -> bool:
        """Whether the text around both is the same, but for what is typed."""
        return other is not None and self.uri == other.uri and abs(self.line - other.line) <= 1


def caret_after(before: Document, changes: list[Change]) -> int | None:
    """Return the index that the caret probably has after changes; None if they tell nothing.

    Args:
        before: the document before them.
        changes: from one message.
    """
    if len(changes) != 1:
        return None
    change = changes[0]
    if change.start is None or change.end is None or len(change.text) > _MAX_TYPED:
        return None
    return min(before.index_at(change.start), before.index_at(change.end)) + len(change.text)
