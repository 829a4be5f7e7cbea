"""A tiny model with made-up costs, for loads that are simulated in milliseconds."""

from pathlib import Path

import pytest
from made_step_costs import STEP_COSTS
from tiny_checkpoints import write_tiny

from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import ServeOptions
from midfill_lab.bench.serving.simulation import SimulatedModel
from midfill_lab.bench.serving.step_costs import StepCosts


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture(scope="session")
def costs() -> StepCosts:
    return STEP_COSTS


@pytest.fixture(scope="session")
def model(folder: Path, costs: StepCosts) -> SimulatedModel:
    return SimulatedModel(open_model(folder), costs, ServeOptions(model=str(folder)))
