"""Context: other files or snippets in the prompt, ordered so that a change costs little.

Context comes before everything else, so the prefix cache serves it to all requests that begin with
the same snippets in the same order. A snippet that changes invalidates everything after it in any
case. From there on the order is free, and what has changed least often goes first. A snippet that
is being edited therefore moves to the end with its first change and costs only itself afterwards.
Among others, the newest go first: clients that send a ring of snippets (llama.vim) drop the oldest,
which then has the fewest after it.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from midfill.infill.formats import FimFormat
from midfill.infill.layout import Segment, TextSegment

_MAX_PATHS = 1024
_HASH_COMMENTS = (".py", ".rb", ".sh", ".pl", ".r", ".toml", ".yaml", ".yml", ".cmake", ".mk")


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file, or a part of one, that the model should see beside the document.

    Attributes:
        text: its text.
        path: its path; "" if that is unknown.
    """

    text: str
    path: str = ""


_Key = tuple[int, int]  # hash of the path, hash of the text

_NO_PATH = hash("")


class ContextOrder:
    """Keeps the order of one tenant's context from request to request; holds hashes only."""

    def __init__(self) -> None:
        self._order: list[_Key] = []  # of the last request that had context
        self._texts: OrderedDict[int, int] = OrderedDict()  # hash of a path -> of its last text
        self._changes: Counter[int] = Counter()  # hash of a path -> how often its text changed
        self._since: dict[_Key, int] = {}  # number of the request from which on it was sent
        self._requests = 0

    def order_and_record(self, files: Sequence[ContextFile]) -> list[ContextFile]:
        """Return the files (each once) in the order to send them, and record the order.

        As long as the last request's files come again unchanged, they keep their places. After the
        first one that is missing or changed, files that changed less often come first, and of
        these the ones that came last.
        """
        waiting = {_key(file): file for file in files}
        snippets = Counter(path for path, _ in waiting)
        for path, text in waiting:
            if snippets[path] == 1:  # several are parts of a file, and none is a change
                self._record_text(path, text)
        places = {key: place for place, key in enumerate(self._order)}
        standing = list(takewhile(waiting.__contains__, self._order))
        kept = set(standing)
        rest = sorted(
            [key for key in waiting if key not in kept],
            key=lambda key: (
                self._changes[key[0]],
                -self._since.get(key, self._requests),
                places.get(key, len(places)),
            ),
        )
        ordered = standing + rest
        if ordered:
            self._order = ordered
            self._since = {key: self._since.get(key, self._requests) for key in ordered}
            self._requests += 1
        return [waiting[key] for key in ordered]

    def _record_text(self, path: int, text: int) -> None:
        """Record a path's text, and count whether it changed."""
        if path == _NO_PATH:
            return
        if self._texts.get(path, text) != text:
            self._changes[path] += 1
        self._texts[path] = text
        self._texts.move_to_end(path)
        if len(self._texts) > _MAX_PATHS:
            oldest, _ = self._texts.popitem(last=False)
            del self._changes[oldest]


def _key(file: ContextFile) -> _Key:
    return hash(file.path), hash(file.text)


def context_segments(
    format: FimFormat, files: Sequence[ContextFile], *, path: str = "", repository: str = ""
) -> tuple[Segment, ...]:
    """Return context in the family's own repository format; empty where there is none.

    Families without a file separator get each path in a comment line before its file.

    Args:
        format: the model's FIM format.
        files: in the order to send them.
        path: the document's own path.
        repository: the repository's name.
    """
    if not files and not path:
        return ()
    separator = format.file_separator
    segments: list[Segment] = []
    if separator is None:
        text = "".join(shown_text(format, file) for file in files)
        text += _path_comment(path)
        return (TextSegment(text, "context"),) if text else ()
    if format.repository is not None and repository:
        segments += [format.repository, TextSegment(f"{repository}\n", "context")]
    for file in files:
        segments += [separator, TextSegment(shown_text(format, file), "context")]
    segments.append(separator)
    if path:
        segments.append(TextSegment(f"{path}\n", "context"))
    return tuple(segments)


def shown_text(format: FimFormat, file: ContextFile) -> str:
    """Return a file as the model sees it, without the separator token before it."""
    head = _path_comment(file.path) if format.file_separator is None else f"{file.path}\n"
    return head + _with_newline(file.text)


def _with_newline(text: str) -> str:
    return text if text.endswith("\n") or not text else f"{text}\n"


def _path_comment(path: str) -> str:
    if not path:
        return ""
    mark = "#" if path.lower().endswith(_HASH_COMMENTS) else "//"
    return f"{mark} {path}\n"
