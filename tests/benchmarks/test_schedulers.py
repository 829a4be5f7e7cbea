"""bench schedulers: what it counts is what the ways to prefill differ in."""

from pathlib import Path

import pytest

from benchmarks.counting_runner import Work
from benchmarks.schedulers import SchedulerReport, measure_schedulers, scheduler_table

PROMPT = 300
LAYERS = 3


@pytest.fixture(scope="module")
def report(tiny_folder: Path) -> SchedulerReport:
    return measure_schedulers(str(tiny_folder), prompt=PROMPT, repeats=1, threads=1)


def work(report: SchedulerReport, name: str, streams: int) -> Work:
    (found,) = (one for one in report.outcomes if (one.case.name, one.streams) == (name, streams))
    return found.work


def test_every_way_computes_each_row_once_in_each_layer(report: SchedulerReport) -> None:
    for name in ("by chunks", "by layers", "in one step"):
        assert work(report, name, 0).row_layers == PROMPT * LAYERS
        assert work(report, name, 0).key_pairs == PROMPT * (PROMPT + 1) // 2 * LAYERS


def test_by_layers_a_prompt_reads_weights_and_keys_once(report: SchedulerReport) -> None:
    chunks, layers, whole = (
        work(report, name, 0) for name in ("by chunks", "by layers", "in one step")
    )
    assert layers == whole
    assert layers.keys_read == PROMPT * LAYERS
    # Chunks of 128, 128 and 44 tokens.
    assert chunks.keys_read == (128 + 256 + 300) * LAYERS
    assert chunks.weight_bytes == 3 * layers.weight_bytes


def test_decodes_ride_along_in_every_step(report: SchedulerReport) -> None:
    by_layers = next(
        one for one in report.outcomes if (one.case.name, one.streams) == ("by layers", 8)
    )
    assert by_layers.steps == LAYERS
    assert by_layers.work.row_layers == (PROMPT + by_layers.steps * 8) * LAYERS


def test_the_table_has_a_row_for_each(report: SchedulerReport) -> None:
    text = scheduler_table(report).markdown()
    assert text.count("| by layers |") == 2
