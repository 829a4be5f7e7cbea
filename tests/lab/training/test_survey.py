"""A survey counts what the data pipeline makes of a corpus."""

from pathlib import Path

from midfill.infill.formats import FimFormat
from midfill.lab.training.corpus import Corpus
from midfill.lab.training.recipe import DataRecipe, TrainingRecipe
from midfill.lab.training.run import RunInputs, open_stream
from midfill.lab.training.survey import Survey, survey_stream
from midfill.models.checkpoints.checkpoint import Checkpoint


def survey(tiny: Checkpoint, format: FimFormat, corpus: Path, tokens: int) -> Survey:
    recipe = TrainingRecipe(data=DataRecipe(long_share=0.0))
    inputs = RunInputs(documents=Corpus.find([corpus], (".py",)), folder=corpus)
    stream = open_stream(tiny, format, recipe, inputs)
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
