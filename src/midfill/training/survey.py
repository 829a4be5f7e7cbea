"""Survey of a corpus: what the data pipeline makes of it, and how fast, without any training."""

import random
import time
from collections import Counter
from dataclasses import dataclass

from midfill.training.examples import Example
from midfill.training.filters import Refusal
from midfill.training.holes import HoleKind, LayoutKind
from midfill.training.packing import Packer
from midfill.training.stream import TrainingStream


@dataclass(frozen=True)
class Survey:
    """What came out of a corpus.

    Attributes:
        documents: read; kept are those that were not refused.
        kept, refused: of these.
        licences: documents kept under each.
        examples: by kind of hole and layout.
        tokens: of all examples.
        learned: how many of them count in the loss.
        fragments: how many pieces of text were tokenised apart only because they were cut.
        too_long: examples longer than a row.
        seconds: taken, from files to packed rows.
        samples: some of the examples.
        whole: the corpus was read to its end.
    """

    documents: int
    kept: int
    refused: Counter[Refusal]
    licences: Counter[str]
    examples: Counter[tuple[HoleKind, LayoutKind]]
    tokens: int
    learned: int
    fragments: int
    too_long: int
    seconds: float
    samples: list[Example]
    whole: bool


def survey_stream(stream: TrainingStream, *, tokens: int, samples: int) -> Survey:
    """Run the data pipeline over a corpus, once at most.

    Args:
        stream: a fresh one.
        tokens: stop after so many.
        samples: examples to keep, drawn from all that are made.

    Raises:
        MidfillError: no document can be trained on.
    """
    packer = Packer(stream.recipe.row_tokens)
    kinds: Counter[tuple[HoleKind, LayoutKind]] = Counter()
    learned = fragments = counted = 0
    kept: list[Example] = []
    draw = random.Random(stream.recipe.seed)
    documents = filtered = 0
    started = time.perf_counter()
    for example in stream.read_examples():
        if stream.place.epoch:
            break
        documents, filtered = stream.place.document, stream.filter.kept
        packer.add(example)
        kinds[example.hole.kind, example.hole.layout] += 1
        counted += len(example.ids)
        learned += int((example.weights > 0).sum())
        fragments += len(example.borders)
        place = len(kept) if len(kept) < samples else draw.randrange(kinds.total())
        if place < samples:  # a reservoir: each example is kept with the same chance
            kept[place : place + 1] = [example]
        if counted >= tokens:
            break
    return Survey(
        documents=documents,
        kept=filtered,
        refused=stream.refused,
        licences=stream.licences,
        examples=kinds,
        tokens=counted,
        learned=learned,
        fragments=fragments,
        too_long=packer.refused,
        seconds=time.perf_counter() - started,
        samples=kept,
        whole=stream.place.epoch > 0,
    )
