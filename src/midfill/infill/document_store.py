"""Documents: which earlier text a request belongs to, recognised from the text itself.

A request belongs to the document of its tenant whose remembered text it overlaps most, if the
overlap is at least half of the shorter text. The search has three steps, cheapest first:

1. the document used last, if the new text begins or ends as that one did;
2. documents that share a *key* with the request. Keys are checksums of the first characters, of the
   last characters, and of a sample of the lines around the caret. Lines are sampled by their
   checksum, so a moved caret or a sliding window samples the same lines;
3. for the few documents with most keys in common, the overlap itself, character by character.

A name given by the client only adds a key and rules out documents with another name.
"""

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from sys import getsizeof
from typing import NamedTuple
from zlib import crc32

from midfill.infill.answer_history import GivenAnswer
from midfill.infill.context_files import DocumentSnippets
from midfill.infill.layout import Segment
from midfill.infill.prefix_cut import CachedPrompt, CutHistory
from midfill.infill.view import Overlap, View, find_overlap
from midfill.infill.window import WindowHistory

_EDGE = 64  # characters at the ends of a text that make a key
_REACH = 4000  # lines within this many characters of the caret make keys
_SAMPLE = 4  # one line in this many is sampled
_MIN_LINE = 8  # characters; shorter lines make no keys
_MAX_SHARED = 32  # a key of more documents than this says nothing
_MAX_CANDIDATES = 4
_CERTAIN = 0.9  # share of the text; a larger overlap ends the search

# Bytes of the objects that hold a document, beside its texts; a test measures that they suffice.
_DOCUMENT_BYTES = 1900
_PROMPT_BYTES = 200
_FRAGMENT_BYTES = 24
_SEGMENT_BYTES = 96
_START_BYTES = 160
_ANSWER_BYTES = 80
_TEXT_BYTES = 16
_KEY_BYTES = 400


class Memory(NamedTuple):
    """The memory of one kind of things.

    Attributes:
        held_bytes: what they take now, objects included.
        max_bytes: what they may take.
    """

    held_bytes: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class Heading:
    """What prompts of a document say of it; see ``InfillRequest``."""

    bos: str = ""
    path: str = ""
    repository: str = ""


@dataclass(slots=True)
class Document:
    """What is remembered of one document. The planner updates it with every request.

    Attributes:
        id: unique among the store's documents; meaningless to clients.
        tenant: whose document it is.
        name: what the client calls it; None if it never said.
        view: its text and the part of it that goes into prompts.
        cuts: how its prompts were cut.
        fixed_head: text before the suffix in the fixed layout "efim"; None before its first use.
        context_segments: the segments its last prompt began with.
        snippets: those it shows, and those it was last sent with.
        lost: prompts that were in the cache until its snippets changed.
        heading: BOS, path and repository of its last request.
        windows: which parts of it were shown.
        answers: the last ones that were given in it, the latest one first.
    """

    id: str
    tenant: str
    name: str | None
    view: View
    cuts: CutHistory
    fixed_head: str | None = None
    context_segments: tuple[Segment, ...] = ()
    snippets: DocumentSnippets = field(default_factory=DocumentSnippets)
    lost: tuple[CachedPrompt, ...] = ()
    heading: Heading = field(default_factory=Heading)
    windows: WindowHistory = field(default_factory=WindowHistory)
    answers: tuple[GivenAnswer, ...] = ()

    @property
    def memory_bytes(self) -> int:
        """Bytes held, objects included; a text that is held twice as one object counts once."""
        texts = [self.view.text, self.view.header, self.name or "", self.fixed_head or ""]
        texts += self.cuts.texts()
        texts += self.windows.texts()
        texts += (segment.text for segment in self.context_segments)
        texts += (text for answer in self.answers for text in (answer.before, answer.text))
        files = self.snippets.files()
        texts += (
            text for prompt in self.lost for text in (prompt.head, prompt.suffix, *prompt.fragments)
        )
        texts += (text for file in files for text in (file.text, file.path))
        distinct = {id(text): getsizeof(text) for text in texts}
        prompts = (*self.cuts.prompts, *self.lost)
        fragments = sum(len(prompt.fragments) for prompt in prompts)
        return (
            _DOCUMENT_BYTES
            + sum(distinct.values())
            + _TEXT_BYTES * len(distinct)
            + _PROMPT_BYTES * len(prompts)
            + _FRAGMENT_BYTES * fragments
            + _SEGMENT_BYTES * (len(self.context_segments) + len(files))
            + _START_BYTES * len(self.windows)
            + _ANSWER_BYTES * len(self.answers)
        )


class DocumentStore:
    """Recent documents of all tenants; the least recently used are dropped first.

    Args:
        max_bytes: memory for documents over all tenants. One document is always kept, however
            large it is.

    Attributes:
        max_bytes: see above.
        held_bytes: memory that the documents take now, objects and search keys included.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._recent: OrderedDict[str, Document] = OrderedDict()
        self._sizes: dict[str, int] = {}
        self._indexes: dict[str, _TenantIndex] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._recent)

    def get(self, document_id: str) -> Document | None:
        """Return a document by its id, None if it is no longer held."""
        return self._recent.get(document_id)

    def last(self, tenant: str) -> Document | None:
        """Return the tenant's document that was used last; None if it is no longer held."""
        index = self._indexes.get(tenant)
        return None if index is None else index.last

    def find(
        self, tenant: str, name: str | None, prefix: str, suffix: str
    ) -> tuple[Document, Overlap] | None:
        """Return the tenant's document that this text is a later state of, and their overlap."""
        index = self._indexes.get(tenant)
        if index is None:
            return None
        length = len(prefix) + len(suffix)
        best: tuple[Document, Overlap] | None = None
        for document in index.candidates(name, prefix, suffix):
            at = find_overlap(document.view, prefix, suffix)
            if best is None or at.shared > best[1].shared:
                best = document, at
                if at.shared >= _CERTAIN * length:
                    break
        if best is None or 2 * best[1].shared < min(length, len(best[0].view.text)):
            return None
        return best

    def create(self, tenant: str, name: str | None, view: View, cuts: CutHistory) -> Document:
        """Create a document; ``record`` stores it."""
        # Random, so that an id tells no tenant how many documents the others have.
        return Document(f"document-{secrets.token_hex(8)}", tenant, name, view, cuts)

    def record(self, document: Document) -> None:
        """Store a document's newest state and make it the most recently used one."""
        self._recent[document.id] = document
        self._recent.move_to_end(document.id)
        self._indexes.setdefault(document.tenant, _TenantIndex()).record(document)
        self.measure(document)

    def measure(self, document: Document) -> None:
        """Take note that a document that is held has grown or shrunk; its place stays."""
        index = self._indexes[document.tenant]
        size = document.memory_bytes + _KEY_BYTES * index.key_count(document)
        self.held_bytes += size - self._sizes.get(document.id, 0)
        self._sizes[document.id] = size
        while self.held_bytes > self.max_bytes and len(self._recent) > 1:
            self._drop(next(iter(self._recent)))

    def _drop(self, document_id: str) -> None:
        document = self._recent.pop(document_id)
        self.held_bytes -= self._sizes.pop(document_id)
        index = self._indexes[document.tenant]
        index.remove(document)
        if index.empty:
            del self._indexes[document.tenant]


class _TenantIndex:
    """One tenant's documents by key.

    Attributes:
        last: the one used last.
    """

    def __init__(self) -> None:
        self._by_key: dict[int, dict[str, Document]] = {}
        # Document id -> where its caret was when the keys were made (counted from the end of the
        # text), and the keys.
        self._keys: dict[str, tuple[int, set[int]]] = {}
        self.last: Document | None = None

    @property
    def empty(self) -> bool:
        """Whether no document is left."""
        return not self._keys

    def key_count(self, document: Document) -> int:
        """Return how many keys a document is filed under."""
        return len(self._keys[document.id][1])

    def candidates(self, name: str | None, prefix: str, suffix: str) -> Iterable[Document]:
        """Yield documents worth comparing, best guess first."""
        last = self.last
        tried = set()
        if last is not None and _names_agree(last, name) and _same_edge(last.view, prefix, suffix):
            yield last
            tried.add(last.id)
        votes: Counter[str] = Counter()
        found: dict[str, Document] = {}
        for key in _make_keys(name, prefix, suffix):
            documents = self._by_key.get(key, {})
            if len(documents) <= _MAX_SHARED:
                votes.update(documents.keys())
                found.update(documents)
        for document_id, _ in votes.most_common(_MAX_CANDIDATES):
            if document_id not in tried and _names_agree(found[document_id], name):
                yield found[document_id]

    def record(self, document: Document) -> None:
        """File a document; its keys are made anew once its caret has moved far from them."""
        self.last = document
        view = document.view
        place = view.sent_right - view.caret
        old_place, old = self._keys.get(document.id, (None, set()))
        if old_place is not None and abs(place - old_place) < _REACH // 4:
            return
        prefix = view.header + view.text[view.sent_left : view.caret]
        suffix = view.text[view.caret : view.sent_right]
        new = _make_keys(document.name, prefix, suffix)
        self._remove_keys(document, old - new)
        for key in new - old:
            self._by_key.setdefault(key, {})[document.id] = document
        self._keys[document.id] = place, new

    def remove(self, document: Document) -> None:
        """Remove a document and its keys."""
        _, keys = self._keys.pop(document.id)
        self._remove_keys(document, keys)
        if self.last is document:
            self.last = None

    def _remove_keys(self, document: Document, keys: Iterable[int]) -> None:
        for key in keys:
            documents = self._by_key[key]
            del documents[document.id]
            if not documents:
                del self._by_key[key]


def _names_agree(document: Document, name: str | None) -> bool:
    return name is None or document.name is None or document.name == name


def _same_edge(view: View, prefix: str, suffix: str) -> bool:
    """Return whether the new text begins or ends as the last one did."""
    begin = prefix[:_EDGE] or suffix[:_EDGE]
    end = suffix[-_EDGE:] or prefix[-_EDGE:]
    old_begin = view.header + view.text[view.sent_left : view.sent_left + len(begin)]
    old_begin = old_begin[: len(begin)]
    old_end = view.text[max(view.sent_left, view.sent_right - len(end)) : view.sent_right]
    return begin.startswith(old_begin) or end.endswith(old_end)


def _make_keys(name: str | None, prefix: str, suffix: str) -> set[int]:
    """Return checksums that other states of the same text share."""
    begin = (prefix[:_EDGE] + suffix[:_EDGE])[:_EDGE]
    end = (prefix[-_EDGE:] + suffix[-_EDGE:])[-_EDGE:]
    keys = {crc32(begin.encode()), crc32(end.encode())}
    if name is not None:
        keys.add(crc32(name.encode(errors="replace"), 1))
    # Lines cut by the caret or by the reach are left out.
    for near in (prefix[-_REACH:], suffix[:_REACH]):
        for line in near.split("\n")[1:-1]:
            line = line.strip()
            if len(line) >= _MIN_LINE:
                key = crc32(line.encode())
                if key % _SAMPLE == 0:
                    keys.add(key)
    return keys
