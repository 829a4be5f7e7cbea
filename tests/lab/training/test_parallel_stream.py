"""Rows that several processes make: the same for the same recipe, each document in one of them."""

import dataclasses
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill_lab.training.corpus import Corpus
from midfill_lab.training.examples import ExampleMaker, PackedRow
from midfill_lab.training.filters import DocumentFilter
from midfill_lab.training.parallel_stream import ParallelStream
from midfill_lab.training.recipe import TrainingRecipe
from midfill_lab.training.stream import TrainingStream

Opener = Callable[[Path], TrainingStream]


@pytest.fixture
def open_stream(tiny: Checkpoint, fim_format: FimFormat, recipe: TrainingRecipe) -> Opener:
    def opener(source: Path) -> TrainingStream:
        maker = ExampleMaker(tiny.tokenizer, fim_format, 0, recipe.data)
        return TrainingStream(Corpus.find([source], (".py",)), maker, recipe, DocumentFilter())

    return opener


def ids_of(rows: list[PackedRow]) -> list[list[int]]:
    return [row.ids.tolist() for row in rows]


def test_rows_are_taken_from_the_parts_in_turn(open_stream: Opener, corpus: Path) -> None:
    parts = [
        list(islice(dataclasses.replace(open_stream(corpus), part=part, parts=2).rows(), 3))
        for part in range(2)
    ]
    stream = ParallelStream(open_stream(corpus), workers=2)
    expected = [row for rows in zip(*parts, strict=True) for row in rows]
    assert ids_of(list(islice(stream.rows(), 6))) == ids_of(expected)


@pytest.mark.parametrize("skip", [1, 4])
def test_rows_can_be_left_out(open_stream: Opener, corpus: Path, skip: int) -> None:
    whole = list(islice(ParallelStream(open_stream(corpus), workers=2).rows(), skip + 3))
    stream = ParallelStream(open_stream(corpus), workers=2)
    rows = list(islice(stream.rows(skip=skip), 3))
    assert ids_of(rows) == ids_of(whole[skip:])


def test_every_document_is_in_the_manifest(open_stream: Opener, corpus: Path) -> None:
    whole = open_stream(corpus)
    examples = whole.read_examples()
    while whole.position.epoch == 0:
        next(examples)
    stream = ParallelStream(open_stream(corpus), workers=3)
    rows = stream.rows()
    while stream.position.epoch == 0:
        next(rows)
    assert stream.manifest == whole.manifest
    assert stream.examples >= len(whole.manifest)
    assert stream.refused == whole.refused


def test_an_error_of_a_worker_is_raised(open_stream: Opener, tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("too short")
    stream = ParallelStream(open_stream(tmp_path), workers=2)
    with pytest.raises(MidfillError, match=r"too short: 1|no documents"):
        next(stream.rows())
