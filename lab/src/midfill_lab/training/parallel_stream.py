"""ParallelStream: packed rows that several processes make, each from a part of the documents.

One processor core makes some 100,000 tokens per second, a GPU trains on more than that. Rows are
taken from the processes in turn, so the same recipe gives the same rows in the same order, however
fast each process is.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from midfill_lab.training.corpus import Corpus, ManifestEntry
from midfill_lab.training.examples import ExampleMaker, PackedRow
from midfill_lab.training.filters import Refusal
from midfill_lab.training.stream import StreamPosition, TrainingStream

_PREFETCHED_ROWS = 64  # made ahead by each process


@dataclass(frozen=True, slots=True)
class _Delivery:
    """A row, and what its stream has read since the row before.

    Attributes:
        row: the row.
        part: number of the stream.
        entries: of the manifest, the new ones.
        position, examples, refused: of the stream, see ``TrainingStream``.
    """

    row: PackedRow
    part: int
    entries: dict[str, ManifestEntry]
    position: StreamPosition
    examples: int
    refused: Counter[Refusal]


@dataclass
class ParallelStream:
    """Endless packed rows of several streams over one corpus.

    Args:
        stream: a fresh stream over the corpus; it is not read.
        workers: number of processes.

    Attributes:
        manifest: see ``TrainingStream``.
    """

    stream: TrainingStream
    workers: int
    manifest: dict[str, ManifestEntry] = field(default_factory=dict)
    _latest: dict[int, _Delivery] = field(default_factory=dict)

    @property
    def corpus(self) -> Corpus:
        """The documents."""
        return self.stream.corpus

    @property
    def maker(self) -> ExampleMaker:
        """Makes the examples."""
        return self.stream.maker

    @property
    def position(self) -> StreamPosition:
        """Where the slowest stream reads."""
        return min(
            (each.position for each in self._latest.values()),
            key=lambda each: (each.epoch, each.document),
            default=StreamPosition(),
        )

    @property
    def examples(self) -> int:
        """Number of examples made so far."""
        return sum(each.examples for each in self._latest.values())

    @property
    def refused(self) -> Counter[Refusal]:
        """Number of refused documents by reason, in the first pass so far."""
        return sum((each.refused for each in self._latest.values()), Counter())

    def rows(self, *, skip: int = 0) -> Iterator[PackedRow]:
        """Return the rows, see ``TrainingStream.rows``.

        Raises:
            MidfillError: no document passes the filter, or no example fits a row.
        """
        # Forked: the documents' filter may hold the word sequences of a whole benchmark.
        loader: Any = DataLoader(
            _Parts(self.stream, self.workers, skip),
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=_PREFETCHED_ROWS,
            multiprocessing_context="fork",
        )
        for delivery in loader:
            self.manifest.update(delivery.entries)
            self._latest[delivery.part] = delivery
            yield delivery.row


class _Parts(IterableDataset[_Delivery]):
    """The deliveries of one process; ``skip`` rows of all processes together are left out."""

    def __init__(self, stream: TrainingStream, parts: int, skip: int) -> None:
        self._stream = stream
        self._parts = parts
        self._skip = skip

    def __iter__(self) -> Iterator[_Delivery]:
        info = get_worker_info()
        part = (self._skip + (0 if info is None else info.id)) % self._parts  # whose turn it is
        stream = replace(self._stream, part=part, parts=self._parts)
        known = 0
        for row in stream.rows(skip=(self._skip - part + self._parts - 1) // self._parts):
            entries = dict(list(stream.manifest.items())[known:])
            known = len(stream.manifest)
            yield _Delivery(row, part, entries, stream.position, stream.examples, stream.refused)
