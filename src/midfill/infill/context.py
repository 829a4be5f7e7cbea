"""Context: other files or snippets in the prompt, ordered so that a change costs little.

Context stands before everything else, so the prefix cache holds it for all requests that begin
with the same snippets in the same order. A snippet that changes invalidates all that follow it,
whatever is done; from there on the order is free, and what has changed least goes first. So a
snippet under edit moves to the end with its first change and costs only itself afterwards.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from midfill.infill.formats import FimFormat
from midfill.infill.layout import Segment, TextSegment

_REMEMBERED_NAMES = 1024
_HASH_COMMENTS = (".py", ".rb", ".sh", ".pl", ".r", ".toml", ".yaml", ".yml", ".cmake", ".mk")


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file, or a part of one, that the model should see beside the document.

    Attributes:
        text: its text.
        path: where it comes from; "" if that is unknown.
    """

    text: str
    path: str = ""


_Key = tuple[str, int]  # path, hash of the text


class ContextOrder:
    """Keeps the order of one tenant's context from request to request; holds no texts."""

    def __init__(self) -> None:
        self._order: list[_Key] = []  # of the last request that had context
        self._texts: OrderedDict[str, int] = OrderedDict()  # path -> hash of the text last seen
        self._changes: Counter[str] = Counter()

    def arrange(self, files: Sequence[ContextFile]) -> list[ContextFile]:
        """The same files (each once), in the order to send them.

        As long as the last request's files come again unchanged, they keep their places; behind
        the first one that is missing or changed, files that changed less often come first.
        """
        waiting = {_key(file): file for file in files}
        for path, text in waiting:
            self._note(path, text)
        places = {key: place for place, key in enumerate(self._order)}
        standing = list(takewhile(waiting.__contains__, self._order))
        kept = set(standing)
        rest = sorted(
            [key for key in waiting if key not in kept],
            key=lambda key: (self._changes[key[0]], places.get(key, len(places))),
        )
        arranged = standing + rest
        self._order = arranged or self._order
        return [waiting[key] for key in arranged]

    def _note(self, path: str, text: int) -> None:
        """Count how often the text behind a path changed."""
        if not path:
            return
        if self._texts.get(path, text) != text:
            self._changes[path] += 1
        self._texts[path] = text
        self._texts.move_to_end(path)
        if len(self._texts) > _REMEMBERED_NAMES:
            oldest, _ = self._texts.popitem(last=False)
            del self._changes[oldest]


def _key(file: ContextFile) -> _Key:
    return file.path, hash(file.text)


def context_segments(
    format: FimFormat, files: Sequence[ContextFile], *, path: str = "", repository: str = ""
) -> tuple[Segment, ...]:
    """Context in the family's own repository format; empty when there is no context at all.

    Families without a file separator get each path in a comment line before its file.

    Args:
        files: in order.
        path: the document's own path.
        repository: the repository's name.
    """
    if not files and not path:
        return ()
    separator = format.file_separator
    segments: list[Segment] = []
    if separator is None:
        text = "".join(f"{_comment(file.path)}{_ended(file.text)}" for file in files)
        text += _comment(path)
        return (TextSegment(text, "context"),) if text else ()
    if format.repository is not None and repository:
        segments += [format.repository, TextSegment(f"{repository}\n", "context")]
    for file in files:
        segments += [separator, TextSegment(f"{file.path}\n{_ended(file.text)}", "context")]
    segments.append(separator)
    if path:
        segments.append(TextSegment(f"{path}\n", "context"))
    return tuple(segments)


def _ended(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


def _comment(path: str) -> str:
    if not path:
        return ""
    mark = "#" if path.lower().endswith(_HASH_COMMENTS) else "//"
    return f"{mark} {path}\n"
