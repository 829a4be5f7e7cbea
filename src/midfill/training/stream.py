"""TrainingStream: a corpus to packed rows, the same rows for the same recipe, from any point on."""

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from midfill.errors import MidfillError
from midfill.training.corpus import Corpus
from midfill.training.documents import Document
from midfill.training.examples import Example, ExampleMaker
from midfill.training.filters import DocumentFilter, Refusal
from midfill.training.holes import draw_hole
from midfill.training.packing import PackedRow, Packer
from midfill.training.recipe import TrainingRecipe

_TRIES = 4  # draws of a hole before a window is given up
_SHUFFLED = 256  # examples among which one is drawn, so that a file's examples part
_ALL_TOO_LONG = 1000  # examples in a row that fit no row: none ever will


@dataclass(frozen=True)
class Place:
    """How far a stream has come.

    Attributes:
        epoch: passes over the corpus that are finished.
        document: documents taken from the corpus in this pass, refused ones included.
    """

    epoch: int = 0
    document: int = 0


@dataclass
class TrainingStream:
    """Endless packed rows: pass after pass over a corpus, each with other holes.

    It is read once, through ``rows`` or ``read_examples``.

    Args:
        corpus: where documents come from.
        maker: makes the examples.
        recipe: what is drawn.
        filter: which documents are taken.

    Attributes:
        place: where the next document is read.
        manifest: sha256 of the content -> name of every document that was kept.
        licences: documents in it under each licence, "unknown" for none.
        examples, tokens: made so far.
    """

    corpus: Corpus
    maker: ExampleMaker
    recipe: TrainingRecipe
    filter: DocumentFilter
    place: Place = field(default_factory=Place)
    manifest: dict[str, str] = field(default_factory=dict)
    licences: Counter[str] = field(default_factory=Counter)
    examples: int = 0
    tokens: int = 0
    _refused: Counter[Refusal] | None = None

    @property
    def refused(self) -> Counter[Refusal]:
        """Documents refused by reason: of the first pass, as far as it has come."""
        return self.filter.refused if self._refused is None else self._refused

    def rows(self, *, skip: int = 0) -> Iterator[PackedRow]:
        """The stream's rows from its beginning.

        Args:
            skip: rows to leave out; they are made again, which costs seconds where training on
                them cost hours.

        Raises:
            MidfillError: no document is left after filtering, or no example fits a row.
        """
        rows = self._rows()
        for _ in islice(rows, skip):
            pass
        return rows

    def read_examples(self) -> Iterator[Example]:
        """The examples in order of their documents, before they are shuffled and packed.

        Raises:
            MidfillError: no document is left after filtering.
        """
        while True:
            before = self.examples
            for document, text in self._documents():
                yield from self._examples_of(document, text)
            if self.examples == before:
                raise MidfillError(self._nothing_left())
            if self._refused is None:
                self._refused = self.filter.refused
            self.place = Place(self.place.epoch + 1)
            self.filter.start_over()

    def _rows(self) -> Iterator[PackedRow]:
        packer = Packer(self.recipe.row_tokens)
        for example in self._shuffled():
            row = packer.add(example)
            if row is not None:
                yield row
            elif packer.refused >= _ALL_TOO_LONG and not packer.rows:
                raise MidfillError(
                    f"no example is as short as row_tokens, {self.recipe.row_tokens}; make that "
                    "more, or prefix_characters and suffix_characters less"
                )

    def _shuffled(self) -> Iterator[Example]:
        draw = random.Random(self.recipe.seed)
        held: list[Example] = []
        for example in self.read_examples():
            held.append(example)
            if len(held) > _SHUFFLED:
                at = draw.randrange(len(held))
                held[at], held[-1] = held[-1], held[at]
                yield held.pop()

    def _nothing_left(self) -> str:
        if not self.place.document:
            return "there are no documents to train on: every source is empty"
        why = ", ".join(f"{reason}: {count}" for reason, count in self.refused.most_common())
        if self.filter.kept:
            why = f"{why}, shorter than a hole: {self.filter.kept}".removeprefix(", ")
        return f"none of the {self.place.document} documents can be trained on ({why})"

    @property
    def _fragmenting(self) -> bool:
        data = self.recipe.data
        return data.fragments and self.tokens >= data.fragments_from * self.recipe.tokens

    def _documents(self) -> Iterator[tuple[Document, str]]:
        limit = self.recipe.data.documents
        for document in self.corpus.read(self.recipe.seed + self.place.epoch):
            if limit is not None and self.place.document >= limit:
                return
            self.place = Place(self.place.epoch, self.place.document + 1)
            text = self.filter.text_of(document)
            if text is not None:
                self._take_down(document)
                yield document, text

    def _take_down(self, document: Document) -> None:
        digest = hashlib.sha256(document.content).hexdigest()
        if digest not in self.manifest:
            self.manifest[digest] = document.name
            self.licences[document.licence or "unknown"] += 1

    def _examples_of(self, document: Document, text: str) -> Iterator[Example]:
        key = f"{self.recipe.seed} {self.place.epoch} {document.name}"
        draw = random.Random(key)
        widest = sum(self.recipe.data.prefix_characters + self.recipe.data.suffix_characters)
        windows = min(self.recipe.data.windows, 1 + len(text) // widest)
        for number in range(windows):
            holes = (draw_hole(text, self.recipe.data, draw) for _ in range(_TRIES))
            hole = next((hole for hole in holes if hole is not None), None)
            if hole is None:
                continue
            fragments = random.Random(f"{key} {number}")
            example = self.maker.make(text, hole, fragments, fragments=self._fragmenting)
            self.examples += 1
            self.tokens += len(example.ids)
            yield example
