"""bench pruning: every method answers the same probes; what it counts is what was computed."""

from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from benchmarks.cpu_model import open_cpu_model
from benchmarks.pruning import (
    DENSE,
    Answer,
    Probe,
    PruningReport,
    RandomTokens,
    _Bench,
    measure_pruning,
    pruning_table,
)
from midfill.methods.rows.lazyllm import LazyLLM
from midfill.runners.forward.logits import log_softmax
from serving import next_logits

LAYERS = 3


@pytest.fixture(scope="module")
def report(tiny_folder: Path) -> PruningReport:
    return measure_pruning(str(tiny_folder), tokens=200, repeats=1, threads=1)


def answers(report: PruningReport, name: str) -> list[Answer]:
    (found,) = (one.answers for one in report.variants if one.name == name)
    return found


def test_all_rows_run_once_in_each_layer(report: PruningReport) -> None:
    assert report.tasks.count("needle") == report.tasks.count("code") == 3
    for answer in answers(report, DENSE):
        rows = answer.rows[0]
        assert 100 < rows <= 200
        assert answer.rows == [rows] * LAYERS
        assert answer.key_pairs == rows * (rows + 1) // 2 * LAYERS
        assert answer.kl == 0.0


def test_methods_drop_their_share_and_random_tokens_cost_the_same(report: PruningReport) -> None:
    for share in (0.7, 0.5, 0.3):
        lazy, chance = (
            answers(report, f"lazyllm:keep={share:g}"),
            answers(report, f"random {share:g}"),
        )
        for answer, other in zip(lazy, chance, strict=True):
            assert answer.rows[0] > answer.rows[1] > answer.rows[2]
            # Random tokens may leave out the last one, which then comes on top.
            assert all(abs(a - b) <= 2 for a, b in zip(answer.rows, other.rows, strict=True))
            assert answer.kl > 0


def test_the_table_has_a_row_for_each(report: PruningReport) -> None:
    text = pruning_table(report).markdown()
    assert all(f"| {one.name} |" in text for one in report.variants)
    assert len(report.variants) == 10


def test_every_method_is_scored_on_the_tokens_that_were_there(tiny_folder: Path) -> None:
    prompt, gold = list(range(10, 60)), [5, 3, 9, 9]
    with open_cpu_model(str(tiny_folder), 1, lambda _: None) as loaded:
        methods = {DENSE: None, "half": LazyLLM(keep="0.5")}
        bench = _Bench(loaded.checkpoint, loaded.runner, methods, 200)
        probe = Probe(task="code", tokens=prompt, gold=gold, file=0)
        dense, first = bench.answer(probe, DENSE, None)
        half, _ = bench.answer(probe, "half", first)
        naive = [
            log_softmax(next_logits(loaded.runner, [*prompt, *gold[:at]]))
            for at in range(len(gold))
        ]
    scores = [float(row[token]) for row, token in zip(naive, gold, strict=True)]
    assert dense.gold == pytest.approx(fmean(scores), abs=1e-4)
    assert first == pytest.approx(naive[0], abs=1e-3)
    assert not dense.found
    assert dense.kl == 0.0 < half.kl
    assert half.gold != dense.gold


def test_random_tokens_are_the_same_each_time() -> None:
    method = RandomTokens(LazyLLM(keep="0.5"))
    scores = np.zeros(100, np.float32)
    chosen = method.select(1, scores, 100)
    assert len(chosen) == 50
    assert chosen.tolist() == method.select(1, scores, 100).tolist()
    assert chosen.tolist() != method.select(0, scores, 100).tolist()
    assert {0, 1, 2, 3} <= set(chosen.tolist())
