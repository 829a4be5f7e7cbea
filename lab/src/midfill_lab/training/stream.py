"""TrainingStream: a corpus as packed rows, the same for the same recipe, resumable at any row."""

import hashlib
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from midfill.errors import MidfillError
from midfill_lab.training.corpus import Corpus, Document, ManifestEntry
from midfill_lab.training.examples import Example, ExampleMaker, PackedRow, Packer
from midfill_lab.training.filters import DocumentFilter, Refusal
from midfill_lab.training.holes import HoleKind, LayoutKind, draw_hole
from midfill_lab.training.recipe import TrainingRecipe

_HOLE_ATTEMPTS = 4  # draws of a hole before a window is given up
_SHUFFLE_BUFFER = 256  # examples among which one is drawn, so that those of a file are spread
_MAX_DROPPED = 1000  # examples in a row too long for any row before the run is given up


@dataclass(frozen=True)
class StreamPosition:
    """How much of a corpus a stream has read.

    Attributes:
        epoch: finished passes over the corpus.
        document: documents read in this pass, refused ones included; of its own part.
    """

    epoch: int = 0
    document: int = 0


@dataclass
class TrainingStream:
    """Endless packed rows: pass after pass over a corpus, each with other holes.

    It can be iterated once, by ``rows`` or by ``read_examples``.

    Args:
        corpus: the documents.
        maker: makes the examples.
        recipe: what is drawn.
        filter: which documents are accepted.
        part, parts: the stream reads every ``parts``-th document, from the ``part``-th on.

    Attributes:
        position: where the next document is read.
        manifest: sha256 of the content -> entry, of every document that was kept.
        examples, tokens: number made so far.
    """

    corpus: Corpus
    maker: ExampleMaker
    recipe: TrainingRecipe
    filter: DocumentFilter
    part: int = 0
    parts: int = 1
    position: StreamPosition = field(default_factory=StreamPosition)
    manifest: dict[str, ManifestEntry] = field(default_factory=dict)
    examples: int = 0
    tokens: int = 0
    _refused: Counter[Refusal] | None = None

    @property
    def licences(self) -> Counter[str]:
        """Number of kept documents per licence, "unknown" where there is none."""
        return Counter(entry.licence or "unknown" for entry in self.manifest.values())

    @property
    def refused(self) -> Counter[Refusal]:
        """Number of refused documents by reason, in the first pass so far."""
        return self.filter.refused if self._refused is None else self._refused

    def rows(self, *, skip: int = 0) -> Iterator[PackedRow]:
        """Return the stream's rows from its beginning.

        Args:
            skip: rows to leave out. They are made again, which takes seconds where training on
                them took hours.

        Raises:
            MidfillError: no document passes the filter, or no example fits a row.
        """
        rows = self._rows()
        for _ in islice(rows, skip):
            pass
        return rows

    def read_examples(self) -> Iterator[Example]:
        """Return the examples in the order of their documents, before shuffling and packing.

        Raises:
            MidfillError: no document passes the filter.
        """
        while True:
            before = self.examples
            for document, text in self._read_documents():
                yield from self._make_examples(document, text)
            if self.examples == before:
                raise MidfillError(self._nothing_left())
            if self._refused is None:
                self._refused = self.filter.refused
            self.position = StreamPosition(self.position.epoch + 1)
            self.filter.reset()

    def _rows(self) -> Iterator[PackedRow]:
        packer = Packer(self.recipe.row_tokens)
        for example in self._shuffled():
            row = packer.add(example)
            if row is not None:
                yield row
            elif packer.dropped >= _MAX_DROPPED and not packer.rows:
                raise MidfillError(
                    f"no example is as short as row_tokens, {self.recipe.row_tokens}; increase "
                    "it, or decrease prefix_characters and suffix_characters"
                )

    def _shuffled(self) -> Iterator[Example]:
        rng = random.Random(self.recipe.seed)
        held: list[Example] = []
        for example in self.read_examples():
            held.append(example)
            if len(held) > _SHUFFLE_BUFFER:
                at = rng.randrange(len(held))
                held[at], held[-1] = held[-1], held[at]
                yield held.pop()

    def _nothing_left(self) -> str:
        if not self.position.document:
            return "there are no documents to train on: every source is empty"
        why = ", ".join(f"{reason}: {count}" for reason, count in self.refused.most_common())
        if self.filter.kept:
            why = f"{why}, shorter than a hole: {self.filter.kept}".removeprefix(", ")
        return f"none of the {self.position.document} documents can be trained on ({why})"

    def _uses_fragments(self) -> bool:
        data = self.recipe.data
        tokens = self.tokens * self.parts
        return data.fragments and tokens >= data.fragments_from * self.recipe.tokens

    def _read_documents(self) -> Iterator[tuple[Document, str]]:
        """Read a pass over the corpus: accepted documents with their texts."""
        documents = self.corpus.read(self.recipe.seed + self.position.epoch)
        documents = islice(documents, self.recipe.data.documents)
        for document in islice(documents, self.part, None, self.parts):
            self.position = StreamPosition(self.position.epoch, self.position.document + 1)
            text = self.filter.accept(document)
            if text is not None:
                self._record(document)
                yield document, text

    def _record(self, document: Document) -> None:
        digest = hashlib.sha256(document.content).hexdigest()
        if digest not in self.manifest:
            self.manifest[digest] = ManifestEntry(
                document.name, digest, document.licence, document.package
            )

    def _make_examples(self, document: Document, text: str) -> Iterator[Example]:
        """Make the examples of a document; they depend on it, the seed and the pass alone."""
        key = f"{self.recipe.seed} {self.position.epoch} {document.name}"
        rng = random.Random(key)
        keeps_tokens = self.maker.keeps_tokens
        widest = sum(self.recipe.data.prefix_characters + self.recipe.data.suffix_characters)
        windows = min(self.recipe.data.windows, 1 + len(text) // widest)
        for number in range(windows):
            holes = (
                draw_hole(text, self.recipe.data, rng, keeps_tokens) for _ in range(_HOLE_ATTEMPTS)
            )
            hole = next((hole for hole in holes if hole is not None), None)
            if hole is None:
                continue
            fragments = random.Random(f"{key} {number}")
            example = self.maker.make(text, hole, fragments, fragments=self._uses_fragments())
            self.examples += 1
            self.tokens += len(example.ids)
            yield example


@dataclass(frozen=True)
class Survey:
    """What the data pipeline made of a corpus.

    Attributes:
        documents: number of documents read.
        kept: number of these that passed the filter.
        refused: number of the others by reason.
        licences: number of kept documents per licence.
        examples: number of examples by kind of hole and layout.
        tokens: of all examples.
        learned: tokens with a loss weight above 0.
        cuts: number of places where text was cut before it was tokenised.
        dropped: examples longer than a row.
        seconds: from files to packed rows.
        samples: some of the examples.
        complete: whether the corpus was read to its end.
    """

    documents: int
    kept: int
    refused: Counter[Refusal]
    licences: Counter[str]
    examples: Counter[tuple[HoleKind, LayoutKind]]
    tokens: int
    learned: int
    cuts: int
    dropped: int
    seconds: float
    samples: list[Example]
    complete: bool


def survey_stream(stream: TrainingStream, *, max_tokens: int, samples: int) -> Survey:
    """Run the data pipeline over a corpus, at most once.

    Args:
        stream: a fresh stream.
        max_tokens: stop after so many.
        samples: number of examples to keep, drawn from all that are made.

    Raises:
        MidfillError: no document can be trained on.
    """
    packer = Packer(stream.recipe.row_tokens)
    kinds: Counter[tuple[HoleKind, LayoutKind]] = Counter()
    tokens = learned = cuts = 0
    sampled: list[Example] = []
    rng = random.Random(stream.recipe.seed)
    documents = kept = 0
    started = time.perf_counter()
    for example in stream.read_examples():
        if stream.position.epoch:
            break
        documents, kept = stream.position.document, stream.filter.kept
        packer.add(example)
        kinds[example.hole.kind, example.hole.layout] += 1
        tokens += len(example.ids)
        learned += int((example.weights > 0).sum())
        cuts += len(example.fragment_starts)
        slot = len(sampled) if len(sampled) < samples else rng.randrange(kinds.total())
        if slot < samples:  # reservoir sampling: each example is kept with the same probability
            sampled[slot : slot + 1] = [example]
        if tokens >= max_tokens:
            break
    return Survey(
        documents=documents,
        kept=kept,
        refused=stream.refused,
        licences=stream.licences,
        examples=kinds,
        tokens=tokens,
        learned=learned,
        cuts=cuts,
        dropped=packer.dropped,
        seconds=time.perf_counter() - started,
        samples=sampled,
        complete=stream.position.epoch > 0,
    )
