"""Context: other files or snippets in the prompt, ordered so that a change costs little.

Context comes before everything else, so the prefix cache serves it to all requests that begin with
the same snippets in the same order. A snippet that changes invalidates everything after it in any
case. From there on the order is free, and what has changed least often goes first. A snippet that
is being edited therefore moves to the end with its first change and costs only itself afterwards.
Among others, the newest go first: clients that send a ring of snippets (llama.vim) drop the oldest,
which then has the fewest after it. Orders are kept for several such clients at a time, which are
told apart by what they send.
"""

from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile

from midfill.infill.formats import FimFormat
from midfill.infill.layout import Segment, TextSegment

_MAX_PATHS = 1024
_MAX_ORDERS = 8
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


@dataclass(slots=True)
class _Order:
    """The files of one client's last request.

    Attributes:
        since: the files in their order, each with the number of the request that first held it.
        requests: how many requests the client has sent.
    """

    since: dict[_Key, int] = field(default_factory=dict)
    requests: int = 0


class ContextOrder:
    """Keeps the order of one tenant's context from request to request; holds hashes only."""

    def __init__(self) -> None:
        self._orders: list[_Order] = []  # the one used last comes first
        self._texts: OrderedDict[int, int] = OrderedDict()  # hash of a path -> of its last text
        self._changes: Counter[int] = Counter()  # hash of a path -> how often its text changed

    @property
    def entries(self) -> int:
        """Number of files and paths that are remembered."""
        return len(self._texts) + sum(len(order.since) for order in self._orders)

    def order_and_record(self, files: Sequence[ContextFile]) -> list[ContextFile]:
        """Return the files (each once) in the order to send them, and record the order.

        As long as the last request's files come again unchanged, they keep their places. After the
        first one that is missing or changed, files that changed less often come first, and of
        these the ones that came last.
        """
        waiting = {_key(file): file for file in files}
        if not waiting:
            return []
        snippets = Counter(path for path, _ in waiting)
        for path, text in waiting:
            if snippets[path] == 1:  # several are parts of a file, and none is a change
                self._record_text(path, text)
        last = self._order_of(waiting)
        standing = list(takewhile(waiting.__contains__, last.since))
        seen, now = {*standing}, last.requests
        known = [key for key in last.since if key in waiting]
        rest = [key for key in dict.fromkeys([*known, *waiting]) if key not in seen]
        rest.sort(key=lambda key: (self._changes[key[0]], -last.since.get(key, now)))
        last.since = {key: last.since.get(key, now) for key in (*standing, *rest)}
        last.requests += 1
        return [waiting[key] for key in last.since]

    def _order_of(self, keys: Collection[_Key]) -> _Order:
        """Return the order that shares most files with these; a new one if none shares enough.

        That is the order's first file, whose place in the cache is at stake, or half of the files.
        """

        def shared(order: _Order) -> int:
            return len(order.since.keys() & keys)

        similar = [
            order
            for order in self._orders
            if next(iter(order.since)) in keys
            or 2 * shared(order) >= min(len(order.since), len(keys))
        ]
        best = max(similar, key=shared, default=_Order())
        others = [order for order in self._orders if order is not best]
        self._orders = [best, *others][:_MAX_ORDERS]
        return best

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
        texts = [shown_text(format, file) for file in files]
        text = "".join(texts) + _path_comment(path)
        places = tuple(accumulate(map(len, texts), initial=0)) if files else ()
        return (TextSegment(text, "context", places),) if text else ()
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
