"""Fixtures for the training tests: a tiny corpus, and runs on the tiny model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from training_corpus import FIM, reset_training, short_recipe, source_text

from midfill.infill.formats import FimFormat, custom_format
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.training.corpus import Corpus
from midfill_lab.training.recipe import TrainingRecipe

if TYPE_CHECKING:
    from midfill_lab.training.training_run import TrainingRun


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    reset_training()


@pytest.fixture(scope="session")
def tiny(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder)


@pytest.fixture(scope="session")
def fim_format(tiny: Checkpoint) -> FimFormat:
    return custom_format(*FIM, tiny.tokenizer.special_tokens)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of twelve Python files under the MIT licence."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "LICENSE").write_text("MIT License\n")
    for number in range(12):
        (folder / "package").mkdir(exist_ok=True)
        (folder / "package" / f"module_{number}.py").write_text(source_text(number))
    return folder


@pytest.fixture
def recipe() -> TrainingRecipe:
    return short_recipe()


@pytest.fixture
def start(tiny: Checkpoint, corpus: Path) -> "Callable[..., TrainingRun]":
    """Prepare a run on the tiny model: ``start(folder, recipe)``."""
    from midfill_lab.training.training_run import RunInputs, prepare_run

    def run(
        folder: Path, recipe: TrainingRecipe, sources: Sequence[Path] = (corpus,), **inputs: object
    ) -> "TrainingRun":
        documents = Corpus.find(sources, recipe.data.suffixes)
        given = {"documents": documents, "folder": folder, "fim_tokens": FIM} | inputs
        return prepare_run(tiny, recipe, RunInputs(**given))  # type: ignore[arg-type]

    return run
