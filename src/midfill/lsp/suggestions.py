"""Suggestions: texts to insert at a caret, and the last of each document while it still fits."""

from dataclasses import dataclass


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
