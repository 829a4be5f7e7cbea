"""Fixtures for the tests of training plans."""

from pathlib import Path

import pytest
from training_corpus import reset_training, short_recipe

from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_checkpoint
from midfill_lab.training.recipe import TrainingRecipe


@pytest.fixture(autouse=True)
def _fresh_state() -> None:
    reset_training()


@pytest.fixture
def tiny(tiny_folder: Path) -> Checkpoint:
    return open_checkpoint(tiny_folder)


@pytest.fixture
def recipe() -> TrainingRecipe:
    return short_recipe()
