"""What methods hold and how fast they are, run by run."""

import pytest

from midfill_lab.bench.methods.measure import measure_methods
from midfill_lab.bench.methods.report import held_share
from midfill_lab.bench.methods.results import (
    FULL,
    MethodsOptions,
    MethodsReport,
    Variant,
    choose_parts,
)

OPTIONS = choose_parts(
    MethodsOptions(speed_context=800, short_context=200, decoded=8, repeats=2), ["costs"]
)
SNAPKV = Variant("snapkv:budget=0.25", "snapkv", 0.25)


@pytest.fixture(scope="module")
def interrupted(tiny_model: str) -> MethodsReport:
    """A report that was interrupted after three of four runs."""
    saved: list[MethodsReport] = []

    def stop_at_third_run(report: MethodsReport) -> None:
        saved.append(report)
        if len(saved) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure_methods([tiny_model], [SNAPKV], OPTIONS, threads=1, save=stop_at_third_run)
    return saved[-1]


@pytest.fixture(scope="module")
def report(tiny_model: str, interrupted: MethodsReport) -> MethodsReport:
    return measure_methods([tiny_model], [SNAPKV], OPTIONS, threads=1, earlier=interrupted)


def test_runs_before_an_interruption_are_kept(
    interrupted: MethodsReport, report: MethodsReport
) -> None:
    before, after = interrupted.models[0].costs, report.models[0].costs
    assert [len(before[name].runs) for name in (FULL, SNAPKV.specification)] == [2, 1]
    for name, cost in after.items():
        assert len(cost.runs) == OPTIONS.repeats
        assert cost.runs[: len(before[name].runs)] == before[name].runs


def test_what_is_held_is_counted(report: MethodsReport) -> None:
    (result,) = report.models
    full, own = result.costs[FULL], result.costs[SNAPKV.specification]
    assert full.context == own.context == 800
    assert full.after_prefill == 800
    assert own.after_prefill == 200
    for cost in (own, full):
        assert len(cost.runs) == OPTIONS.repeats
        for run in cost.runs:
            assert run.peak == full.runs[0].peak >= 200, "the prompt is computed exactly first"
            assert min(run.times_full, run.times_short, run.ttft_seconds) > 0
    assert held_share(result, SNAPKV.specification) == 0.25
    assert own.bytes > full.bytes / 4, "the lists of cells count"
