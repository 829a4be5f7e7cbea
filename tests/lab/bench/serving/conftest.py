"""A tiny model with made-up costs, for loads that are simulated in milliseconds."""

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import ServeOptions
from midfill.system.machine import describe_machine
from midfill_lab.bench.serving.simulation import SimulatedModel
from midfill_lab.bench.serving.step_costs import StepCosts


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny"), max_position_embeddings=8192)


@pytest.fixture(scope="session")
def costs() -> StepCosts:
    return StepCosts(
        model="tiny",
        machine=describe_machine(),
        engine="made-up",
        slots=32_768,
        slot_bytes=1024,
        rows=(0.004, 0.0045, 0.005, 0.006, 0.008, 0.012, 0.02, 0.036, 0.07),
        output=1e-4,
        request=1e-5,
        key_read=1e-7,
        key_pair=1e-8,
        request_seconds=0.002,
    )


@pytest.fixture(scope="session")
def model(folder: Path, costs: StepCosts) -> SimulatedModel:
    return SimulatedModel(open_model(folder), costs, ServeOptions(model=str(folder)))
