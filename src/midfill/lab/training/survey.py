"""Survey of a corpus: what the data pipeline makes of it and how fast, without training."""

import random
import time
from collections import Counter
from dataclasses import dataclass

from midfill.lab.training.examples import Example
from midfill.lab.training.filters import Refusal
from midfill.lab.training.holes import HoleKind, LayoutKind
from midfill.lab.training.packing import Packer
from midfill.lab.training.stream import TrainingStream


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
