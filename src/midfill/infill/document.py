"""Documents: which text was sent before, recognised from the text itself.

A request belongs to the document of its tenant whose remembered text it overlaps most, if that is
at least half of the shorter text. The search takes three steps, each cheaper than the next:

1. the document used last, if the new text begins or ends as it did then;
2. documents that share a *key* with the request: the first or last characters, or one of the lines
   around the caret, sampled by their checksum so that a moved caret or a slid window samples the
   same lines;
3. for the few with most keys in common, the overlap itself, character by character.

A name given by the client only adds a key and rules out documents that have another name.
"""

import itertools
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from zlib import crc32

from midfill.infill.cut import CutHistory, size
from midfill.infill.layout import Segment
from midfill.infill.window import Overlap, View, overlap

_EDGE = 64  # characters at the ends of a text that make a key
_REACH = 4000  # lines this near to the caret make keys
_SAMPLE = 4  # one line in so many does
_SHORTEST_LINE = 8
_COMMON = 32  # a key of more documents than this tells nothing
_CANDIDATES = 4
_CERTAIN = 0.9  # overlap at which nobody looks further


@dataclass(slots=True)
class Document:
    """What is remembered of one document.

    Attributes:
        id: unique among the store's documents; means nothing to clients.
        tenant, name: whose it is, and what the client calls it, if it ever said.
        view: its text.
        cuts: how its prompts were cut.
        fixed_head: what stands before the suffix in the fixed layout "efim"; None before it was
            used.
        context: what its last prompt began with.
    """

    id: str
    tenant: str
    name: str | None
    view: View
    cuts: CutHistory = field(default_factory=CutHistory)
    fixed_head: str | None = None
    context: tuple[Segment, ...] = ()

    @property
    def size(self) -> int:
        """Characters held."""
        context = sum(len(segment.text) for segment in self.context)
        return len(self.view.text) + size(self.cuts.prompts) + context


class DocumentStore:
    """Recent documents of all tenants; the least recently used go first.

    Args:
        capacity: characters held, over all tenants.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._numbers = itertools.count(1)
        self._recent: OrderedDict[str, Document] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._shelves: dict[str, _Shelf] = {}
        self.held = 0

    def __len__(self) -> int:
        return len(self._recent)

    def get(self, document_id: str) -> Document | None:
        """A document by its id, if it is still held."""
        return self._recent.get(document_id)

    def find(
        self, tenant: str, name: str | None, prefix: str, suffix: str
    ) -> tuple[Document, Overlap] | None:
        """The tenant's document that this text is a later state of, and how it lies over it."""
        shelf = self._shelves.get(tenant)
        if shelf is None:
            return None
        length = len(prefix) + len(suffix)
        best: tuple[Document, Overlap] | None = None
        for document in shelf.candidates(name, prefix, suffix):
            at = overlap(document.view, prefix, suffix)
            if best is None or at.shared > best[1].shared:
                best = document, at
                if at.shared >= _CERTAIN * length:
                    break
        if best is None or 2 * best[1].shared < min(length, len(best[0].view.text)):
            return None
        return best

    def create(self, tenant: str, name: str | None, view: View) -> Document:
        """A new document; ``keep`` stores it."""
        return Document(f"document-{next(self._numbers)}", tenant, name, view)

    def keep(self, document: Document) -> None:
        """Store a document's newest state; it becomes the most recent one."""
        self._recent[document.id] = document
        self._recent.move_to_end(document.id)
        self._shelves.setdefault(document.tenant, _Shelf()).put(document)
        self.held += document.size - self._sizes.get(document.id, 0)
        self._sizes[document.id] = document.size
        while self.held > self._capacity and len(self._recent) > 1:
            self._drop(next(iter(self._recent)))

    def _drop(self, document_id: str) -> None:
        document = self._recent.pop(document_id)
        self.held -= self._sizes.pop(document_id)
        shelf = self._shelves[document.tenant]
        shelf.remove(document)
        if shelf.empty:
            del self._shelves[document.tenant]


class _Shelf:
    """One tenant's documents by key."""

    def __init__(self) -> None:
        self._by_key: dict[int, dict[str, Document]] = {}
        self._keys: dict[str, tuple[int, set[int]]] = {}  # id -> caret's place when made, keys
        self._last: Document | None = None

    @property
    def empty(self) -> bool:
        return not self._keys

    def candidates(self, name: str | None, prefix: str, suffix: str) -> Iterable[Document]:
        """Documents worth comparing, best guess first."""
        last = self._last
        tried = set()
        if last is not None and _may_be(last, name) and _same_edge(last.view, prefix, suffix):
            yield last
            tried.add(last.id)
        votes: Counter[str] = Counter()
        found: dict[str, Document] = {}
        for key in _keys(name, prefix, suffix):
            documents = self._by_key.get(key, {})
            if len(documents) <= _COMMON:
                votes.update(documents.keys())
                found.update(documents)
        for document_id, _ in votes.most_common(_CANDIDATES):
            if document_id not in tried and _may_be(found[document_id], name):
                yield found[document_id]

    def put(self, document: Document) -> None:
        """File a document; its keys are made anew when its caret has gone far from them."""
        self._last = document
        view = document.view
        place = view.sent_right - view.caret
        old_place, old = self._keys.get(document.id, (None, set()))
        if old_place is not None and abs(place - old_place) < _REACH // 4:
            return
        prefix = view.text[view.sent_left : view.caret]
        suffix = view.text[view.caret : view.sent_right]
        new = _keys(document.name, prefix, suffix)
        self._forget(document, old - new)
        for key in new - old:
            self._by_key.setdefault(key, {})[document.id] = document
        self._keys[document.id] = place, new

    def remove(self, document: Document) -> None:
        """Forget a document."""
        _, keys = self._keys.pop(document.id)
        self._forget(document, keys)
        if self._last is document:
            self._last = None

    def _forget(self, document: Document, keys: Iterable[int]) -> None:
        for key in keys:
            documents = self._by_key[key]
            del documents[document.id]
            if not documents:
                del self._by_key[key]


def _may_be(document: Document, name: str | None) -> bool:
    return name is None or document.name is None or document.name == name


def _same_edge(view: View, prefix: str, suffix: str) -> bool:
    """Whether the new text begins or ends as the last one did."""
    begin = prefix[:_EDGE] or suffix[:_EDGE]
    end = suffix[-_EDGE:] or prefix[-_EDGE:]
    old_begin = view.text[view.sent_left : view.sent_left + len(begin)]
    old_end = view.text[max(view.sent_left, view.sent_right - len(end)) : view.sent_right]
    return begin.startswith(old_begin) or end.endswith(old_end)


def _keys(name: str | None, prefix: str, suffix: str) -> set[int]:
    """Checksums that other states of the same text have too."""
    begin = (prefix[:_EDGE] + suffix[:_EDGE])[:_EDGE]
    end = (prefix[-_EDGE:] + suffix[-_EDGE:])[-_EDGE:]
    keys = {crc32(begin.encode()), crc32(end.encode())}
    if name is not None:
        keys.add(crc32(name.encode(errors="replace"), 1))
    # The lines cut by the caret or by the reach are left out.
    for near in (prefix[-_REACH:], suffix[:_REACH]):
        for line in near.split("\n")[1:-1]:
            line = line.strip()
            if len(line) >= _SHORTEST_LINE:
                key = crc32(line.encode())
                if key % _SAMPLE == 0:
                    keys.add(key)
    return keys
