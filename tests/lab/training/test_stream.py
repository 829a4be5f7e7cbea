"""The training stream: the same rows for the same recipe, from any row on."""

import dataclasses
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill_lab.training import training_run
from midfill_lab.training.corpus import Corpus
from midfill_lab.training.examples import ExampleMaker, PackedRow
from midfill_lab.training.filters import DocumentFilter
from midfill_lab.training.recipe import DataRecipe, TrainingRecipe
from midfill_lab.training.stream import Survey, TrainingStream, survey_stream
from midfill_lab.training.training_run import RunInputs


@pytest.fixture
def open_stream(tiny: Checkpoint, fim_format: FimFormat) -> "StreamOpener":
    return StreamOpener(tiny, fim_format)


@dataclasses.dataclass
class StreamOpener:
    tiny: Checkpoint
    format: FimFormat

    def __call__(self, source: Path, recipe: TrainingRecipe) -> TrainingStream:
        return TrainingStream(
            Corpus.find([source], recipe.data.suffixes),
            ExampleMaker(self.tiny.tokenizer, self.format, 0, recipe.data),
            recipe,
            DocumentFilter(),
        )


def bytes_of(rows: Iterator[PackedRow], count: int) -> list[bytes]:
    return [
        row.ids.tobytes() + row.weights.tobytes() + row.cu_seqlens.tobytes()
        for row in islice(rows, count)
    ]


def with_data(recipe: TrainingRecipe, **changes: object) -> TrainingRecipe:
    data = dataclasses.replace(recipe.data, **changes)  # type: ignore[arg-type]
    return dataclasses.replace(recipe, data=data)


def test_the_same_recipe_gives_the_same_rows(
    open_stream: StreamOpener, corpus: Path, recipe: TrainingRecipe
) -> None:
    first, second = (bytes_of(open_stream(corpus, recipe).rows(), 20) for _ in range(2))
    assert first == second
    other = dataclasses.replace(recipe, seed=1)
    assert bytes_of(open_stream(corpus, other).rows(), 20) != first


def test_skipping_rows_continues_with_the_same_rows(
    open_stream: StreamOpener, corpus: Path, recipe: TrainingRecipe
) -> None:
    whole, skipping = open_stream(corpus, recipe), open_stream(corpus, recipe)
    rows = bytes_of(whole.rows(), 15)
    assert bytes_of(skipping.rows(skip=9), 6) == rows[9:]
    assert skipping.manifest == whole.manifest
    assert skipping.examples == whole.examples


def test_every_pass_has_other_holes_in_the_same_documents(
    open_stream: StreamOpener, corpus: Path, recipe: TrainingRecipe
) -> None:
    stream = open_stream(corpus, recipe)
    passes: list[list[bytes]] = [[], [], []]
    for example in stream.read_examples():
        if stream.position.epoch == len(passes):
            break
        passes[stream.position.epoch].append(example.ids.tobytes())
    assert all(passes)
    assert not set(passes[0]) & set(passes[1])
    assert len(stream.manifest) == 12
    assert stream.licences == {"MIT": 12}


def test_refusals_are_counted_over_one_pass(
    open_stream: StreamOpener, tmp_path: Path, corpus: Path, recipe: TrainingRecipe
) -> None:
    text = (corpus / "package" / "module_1.py").read_text()
    (tmp_path / "LICENSE").write_text("MIT License")
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.py").write_text(text)
    (tmp_path / "c.py").write_text("short")
    (tmp_path / "d.py").write_bytes(b"\x00\x01")
    stream = open_stream(tmp_path, recipe)
    bytes_of(stream.rows(), 3)
    assert stream.position.epoch > 2
    assert stream.refused == {"duplicate": 1, "too short": 1, "binary": 1}
    assert len(stream.manifest) == 1


def test_streams_with_and_without_fragments_differ_in_nothing_else(
    open_stream: StreamOpener, corpus: Path, recipe: TrainingRecipe
) -> None:
    twins = [
        open_stream(corpus, with_data(recipe, fragments=fragments)) for fragments in (True, False)
    ]
    examples = [list(islice(each.read_examples(), 100)) for each in twins]
    assert [each.hole for each in examples[0]] == [each.hole for each in examples[1]]
    assert any(each.fragment_starts for each in examples[0])
    assert not any(each.fragment_starts for each in examples[1])


def test_fragments_start_where_the_recipe_says(
    open_stream: StreamOpener, corpus: Path, recipe: TrainingRecipe
) -> None:
    late = dataclasses.replace(
        with_data(recipe, fragments_from=0.5, fragment_share=1.0), tokens=20_000
    )
    stream = open_stream(corpus, late)
    tokens_before = 0
    late_ones = []
    for example in islice(stream.read_examples(), 400):
        if tokens_before < 10_000:
            assert not example.fragment_starts
        elif len(example.ids) > 20:
            late_ones.append(bool(example.fragment_starts))
        tokens_before += len(example.ids)
    # A single cut at the very start of a text is none.
    assert sum(late_ones) > 0.95 * len(late_ones) > 0


def test_the_number_of_documents_is_limited(
    open_stream: StreamOpener, corpus: Path, recipe: TrainingRecipe
) -> None:
    stream = open_stream(corpus, with_data(recipe, documents=3))
    first_pass = 0
    for _ in stream.read_examples():
        if stream.position.epoch:
            break
        first_pass = max(first_pass, stream.position.document)
    assert first_pass == 3


def test_rows_hold_examples_of_several_documents(
    open_stream: StreamOpener, corpus: Path, recipe: TrainingRecipe
) -> None:
    rows = list(islice(open_stream(corpus, recipe).rows(), 10))
    assert all(len(row.ids) <= recipe.row_tokens for row in rows)
    assert np.mean([len(row.cu_seqlens) for row in rows]) > 2


class TestNothingToTrainOn:
    def test_all_documents_refused(
        self, open_stream: StreamOpener, tmp_path: Path, recipe: TrainingRecipe
    ) -> None:
        (tmp_path / "a.py").write_text("short")
        (tmp_path / "b.py").write_text("x = 1\n" * 100)
        (tmp_path / "c.py").write_bytes(b"\0" * 300)
        (tmp_path / "d.py").write_bytes("é".encode("latin-1") * 300)
        message = r"none of the 4 documents can be trained on \((?=.*too short: 1)"
        message += r"(?=.*licence: 1)(?=.*binary: 1)(?=.*encoding: 1)"
        with pytest.raises(MidfillError, match=message):
            next(open_stream(tmp_path, recipe).rows())

    def test_documents_without_room_for_a_hole(
        self, open_stream: StreamOpener, tmp_path: Path, recipe: TrainingRecipe
    ) -> None:
        record = {"text": " \n" * 200, "license": "MIT"}
        (tmp_path / "a.jsonl").write_text(json.dumps(record))
        with pytest.raises(MidfillError, match=r"none of the 1 documents.*shorter than a hole: 1"):
            next(open_stream(tmp_path / "a.jsonl", recipe).rows())

    def test_an_empty_file_of_records(
        self, open_stream: StreamOpener, tmp_path: Path, recipe: TrainingRecipe
    ) -> None:
        (tmp_path / "a.jsonl").write_text("\n")
        with pytest.raises(MidfillError, match="no documents to train on: every source is empty"):
            next(open_stream(tmp_path / "a.jsonl", recipe).rows())

    def test_rows_shorter_than_every_example(
        self, open_stream: StreamOpener, corpus: Path, recipe: TrainingRecipe
    ) -> None:
        with pytest.raises(MidfillError, match="no example is as short as row_tokens, 5"):
            next(open_stream(corpus, dataclasses.replace(recipe, row_tokens=5)).rows())


def survey(tiny: Checkpoint, format: FimFormat, corpus: Path, tokens: int) -> Survey:
    recipe = TrainingRecipe(data=DataRecipe(long_share=0.0))
    inputs = RunInputs(documents=Corpus.find([corpus], (".py",)), folder=corpus)
    stream = training_run.open_stream(tiny, format, recipe, inputs)
    return survey_stream(stream, max_tokens=tokens, samples=3)


def test_a_corpus_is_read_at_most_once(
    tiny: Checkpoint, fim_format: FimFormat, corpus: Path
) -> None:
    found = survey(tiny, fim_format, corpus, 10**9)
    assert found.complete
    assert (found.documents, found.kept) == (12, 12)
    assert not found.refused
    assert found.licences == {"MIT": 12}
    assert 12 <= found.examples.total() <= 24
    assert 0 < found.learned < found.tokens
    assert found.cuts > 0
    assert found.seconds > 0


def test_a_survey_stops_at_the_maximum_of_tokens(
    tiny: Checkpoint, fim_format: FimFormat, corpus: Path
) -> None:
    found = survey(tiny, fim_format, corpus, 3000)
    assert not found.complete
    assert 3000 <= found.tokens < 8000
    assert found.documents < 12
    assert len(found.samples) == 3
