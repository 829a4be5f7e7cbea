"""What steps cost: measured on a tiny model, and usable in a simulation."""

from pathlib import Path

import pytest

from midfill.config import ModelOptions
from midfill.models.checkpoints.opening import open_model
from midfill_lab.bench.serving import cost_measurement
from midfill_lab.bench.serving.cost_measurement import measure_costs
from midfill_lab.bench.serving.step_costs import StepWork


def test_steps_of_all_sizes_are_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_measurement, "_REPEATS", 1)
    said: list[str] = []
    options = ModelOptions(threads=1, kv_memory=8 << 20)
    costs = measure_costs(open_model(folder), "tiny", options, said.append)
    assert costs.model == "tiny"
    assert costs.slots * costs.slot_bytes <= 8 << 20
    assert list(costs.rows) == sorted(costs.rows)
    assert costs.rows[0] > 0.0
    small, large = StepWork(1, 1, 1, 10, 10), StepWork(128, 1, 1, 128, 8256)
    assert 0.0 < costs.seconds(small) <= costs.seconds(large)
    assert said[0] == "loading tiny"
