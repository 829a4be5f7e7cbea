"""``midfill bench batch``: both orders answer the same batch, and it must not fit into memory."""

import json
from pathlib import Path

import pytest
from tiny_checkpoints import write_tiny

from midfill.config import ModelOptions
from midfill.errors import OptionError
from midfill.serving.options import ServeOptions
from midfill_lab.bench.batch import (
    ORDERS,
    BatchLoad,
    BatchReport,
    BatchRun,
    batch_rows,
    batch_table,
    measure_batch,
)

LOAD = BatchLoad(
    prefixes=6, rows=5, prefix_characters=150, rest_characters=30, output_tokens=3, repeats=2
)


def options(folder: Path, kv_memory: int) -> ServeOptions:
    return ServeOptions(
        model=str(folder), options=ModelOptions(threads=1, kv_memory=kv_memory), candidates=1
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def report(folder: Path) -> BatchReport:
    return measure_batch(options(folder, 400_000), LOAD)


def test_both_orders_answer_all_rows_as_often_as_asked(report: BatchReport) -> None:
    assert set(report.runs) == set(ORDERS)
    assert all(len(runs) == LOAD.repeats for runs in report.runs.values())
    assert {run.output_tokens for runs in report.runs.values() for run in runs} == {30 * 3}
    assert len({run.prompt_tokens for runs in report.runs.values() for run in runs}) <= 4


def test_batchllm_computes_less_of_a_batch_that_is_larger_than_the_pool(
    report: BatchReport,
) -> None:
    assert report.distinct_tokens > report.slots
    least = min(run.cached_tokens for run in report.runs["batchllm"])
    assert least > max(run.cached_tokens for run in report.runs["fcfs"])


def test_a_batch_that_fits_is_refused(folder: Path) -> None:
    with pytest.raises(OptionError, match="fits into the KV pool of"):
        measure_batch(options(folder, 64 << 20), LOAD)


def test_rows_are_shuffled_the_same_way_and_new_in_each_run() -> None:
    first, second = ([json.loads(row)["prompt"] for row in batch_rows(LOAD)] for _ in range(2))
    assert [prompt.split()[2:] for prompt in first] == [prompt.split()[2:] for prompt in second]
    assert not set(first) & set(second)
    tasks = [prompt.split()[2] for prompt in first]
    assert sorted(tasks) == sorted("012345" * 5)
    assert tasks != sorted(tasks)


def test_the_table_tells_the_ratio_of_neighbouring_runs(report: BatchReport) -> None:
    def run(seconds: float) -> BatchRun:
        return BatchRun(seconds=seconds, prompt_tokens=90, cached_tokens=45, output_tokens=10)

    runs = {"batchllm": [run(1), run(2), run(5)], "fcfs": [run(2), run(6), run(5)]}
    made = BatchReport(
        model="m", machine=report.machine, load=LOAD, backend="b", slots=10,
        distinct_tokens=100, runs=runs,  # type: ignore[arg-type]
    )  # fmt: skip
    assert made.ratios == [2, 3, 1]
    text = batch_table(made).markdown()
    assert "| batchllm | 50 | 20 | 100 | 2.0 | 50% |" in text
    assert "2.00 times as fast (1.00 to 3.00)" in text
