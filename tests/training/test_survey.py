"""A survey tells what the pipeline makes of a corpus, and shows some of it."""

import random
from pathlib import Path

from midfill.checkpoints.checkpoint import Checkpoint
from midfill.infill.formats import FimFormat
from midfill.training.corpus import Corpus
from midfill.training.example_text import BORDER, example_text
from midfill.training.examples import ExampleMaker
from midfill.training.holes import Hole
from midfill.training.recipe import DataRecipe, TrainingRecipe
from midfill.training.run import RunInputs, open_stream
from midfill.training.survey import Survey, survey_stream


def survey(tiny: Checkpoint, format: FimFormat, corpus: Path, tokens: int) -> Survey:
    recipe = TrainingRecipe(data=DataRecipe(long_share=0.0))
    inputs = RunInputs(documents=Corpus.find([corpus], (".py",)), folder=corpus)
    stream = open_stream(tiny, format, recipe, inputs)
    return survey_stream(stream, tokens=tokens, samples=3)


def test_one_pass_at_most(tiny: Checkpoint, fim_format: FimFormat, corpus: Path) -> None:
    found = survey(tiny, fim_format, corpus, 10**9)
    assert found.whole
    assert (found.documents, found.kept) == (12, 12)
    assert not found.refused
    assert found.licences == {"MIT": 12}
    assert 12 <= found.examples.total() <= 24
    assert 0 < found.learned < found.tokens
    assert found.fragments > 0
    assert found.seconds > 0


def test_it_stops_when_there_are_enough_tokens(
    tiny: Checkpoint, fim_format: FimFormat, corpus: Path
) -> None:
    found = survey(tiny, fim_format, corpus, 3000)
    assert not found.whole
    assert 3000 <= found.tokens < 8000
    assert found.documents < 12
    assert len(found.samples) == 3


def test_an_example_is_shown_with_sentinels_borders_and_its_answer(
    tiny: Checkpoint, fim_format: FimFormat
) -> None:
    text = "total = été + 1  # <fim_middle>\n"
    maker = ExampleMaker(
        tiny.tokenizer, fim_format, 0, DataRecipe(fragment_share=0.0, typed_share=0.0)
    )
    hole = Hole("line", 0, 9, 15, len(text), 4, "efim")
    shown = example_text(maker.make(text, hole, random.Random(0), fragments=True), tiny.tokenizer)
    assert shown.plain == (
        f"<fim_prefix>tota<fim_suffix>{text[15:]}<fim_middle>l = é{BORDER}té + 1<|endoftext|>"
    )
    styled = {shown.plain[span.start : span.end]: span.style for span in shown.spans}
    assert styled["<fim_suffix>"] == "bold cyan"
    assert styled["té + 1"] == "green"
    assert styled[BORDER] == "bold red"
