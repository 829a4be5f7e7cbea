"""Prefill and decode rates come from answers that were really given."""

from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from midfill.errors import OptionError
from midfill_lab.bench.speed import SpeedOptions, SpeedReport, measure_speed, speed_table


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> SpeedReport:
    folder = write_tiny("llama", tmp_path_factory.mktemp("tiny"))
    options = SpeedOptions(prefill=(64, 256), contexts=(16,), decoded=32, repeats=2)
    return measure_speed(str(folder), options, threads=1)


def test_every_length_is_measured(report: SpeedReport) -> None:
    assert set(report.prefill) == {64, 256}
    assert set(report.decode) == {16}
    for rate in (*report.prefill.values(), *report.decode.values()):
        assert 0 < rate.slowest <= rate.tokens_per_second <= rate.fastest


def test_the_backend_and_its_device_are_chosen(tmp_path: Path) -> None:
    options = SpeedOptions(prefill=(16,), contexts=(16,), decoded=4, repeats=1)
    folder = str(write_tiny("llama", tmp_path))
    report = measure_speed(folder, options, backend="torch", device="cpu")
    assert report.engine.backend == "PyTorch on cpu"
    with pytest.raises(OptionError, match="--device 'cuda:99'"):
        measure_speed(folder, options, backend="torch", device="cuda:99")


def test_memory_and_machine_are_stated(report: SpeedReport, tmp_path: Path) -> None:
    text = speed_table(report).markdown()
    assert "| decode at 16 tokens |" in text
    assert f"{report.engine.slots} tokens" in text
    assert report.machine.processor in text
