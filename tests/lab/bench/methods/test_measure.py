"""A whole run on a tiny model: what is measured, continued, and shown."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from benchmarks.plots import plot_methods
from benchmarks.report import markdown
from midfill.errors import MidfillError
from midfill_lab.bench.methods.measure import measure_methods
from midfill_lab.bench.methods.report import methods_tables, prediction, recall
from midfill_lab.bench.methods.results import (
    FULL,
    NEEDLES,
    MethodsOptions,
    MethodsReport,
    Variant,
    choose_parts,
    choose_variants,
    read_methods_report,
)
from midfill_lab.reporting import write_json

OPTIONS = MethodsOptions(
    context=600,
    depths=(0.2, 0.8),
    needles=1,
    shared=1,
    questions=2,
    code=1,
    code_context=300,
    code_tokens=20,
    holes=2,
    speed_context=800,
    short_context=200,
    decoded=8,
    repeats=2,
)
SNAPKV = Variant("snapkv:budget=0.25", "snapkv", 0.25)
RECENT = Variant("streamingllm:budget=0.5", "streamingllm", 0.5)


def measure(
    model: str, variants: Sequence[Variant], earlier: MethodsReport | None = None
) -> tuple[MethodsReport, list[str]]:
    steps: list[str] = []
    report = measure_methods(
        [model],
        variants,
        OPTIONS,
        threads=1,
        progress=steps.append,
        earlier=earlier,
    )
    return report, steps


@pytest.fixture(scope="module")
def report(tiny_model: str) -> MethodsReport:
    return measure(tiny_model, [SNAPKV])[0]


def test_full_kv_is_measured_beside_every_method(report: MethodsReport) -> None:
    (result,) = report.models
    assert report.finished
    assert all(set(one.scores) == {FULL, SNAPKV.specification} for one in result.probes)
    assert all(set(one.answers) == {FULL, SNAPKV.specification} for one in result.holes)
    assert {one.task for one in result.probes} == {
        "needle", "multi-key", "turns", "requests", "code",
    }  # fmt: skip
    full, own = (prediction(result, name) for name in (FULL, SNAPKV.specification))
    assert full is not None
    assert own is not None
    assert full.divergence.value == 0.0 < own.divergence.value
    assert full.agreement.value == 1.0 > own.agreement.value
    needles = recall(result, FULL, ["needle"])
    assert needles is not None
    assert needles.found.count == 2


def test_a_run_is_continued_with_what_it_lacks(
    report: MethodsReport, tiny_model: str, tmp_path: Path
) -> None:
    write_json(tmp_path / "run.json", report)
    earlier = read_methods_report(tmp_path / "run.json")
    assert earlier == report
    again, steps = measure(tiny_model, [SNAPKV], earlier)
    assert again.models == report.models
    assert len(steps) == 1, "nothing but the model is loaded"
    both, _ = measure(tiny_model, [SNAPKV, RECENT], earlier)
    for old, new in zip(report.models[0].probes, both.models[0].probes, strict=True):
        assert new.scores == old.scores | {RECENT.specification: new.scores[RECENT.specification]}
    other = msgspec.structs.replace(earlier, options=MethodsOptions())
    with pytest.raises(MidfillError, match="can't be continued: it measured something else"):
        measure(tiny_model, [SNAPKV], other)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(MidfillError, match="holds no results of bench methods"):
        read_methods_report(tmp_path / "run.json")


def test_a_run_that_was_interrupted_ends_with_the_table_of_one_that_was_not(
    tiny_model: str,
) -> None:
    options = choose_parts(OPTIONS, ["needles", "code"])
    variants = choose_variants("cake", [0.25], nulls=True)
    saved: list[MethodsReport] = []

    def run(earlier: MethodsReport | None, stop_after: int | None = None) -> MethodsReport:
        def save(report: MethodsReport) -> None:
            saved.append(report)
            if len(saved) == stop_after:
                raise KeyboardInterrupt

        return measure_methods(
            [tiny_model], variants, options, threads=1, save=save, earlier=earlier
        )

    whole = run(None)
    saved.clear()
    with pytest.raises(KeyboardInterrupt):
        run(None, stop_after=2)
    continued = run(msgspec.json.decode(msgspec.json.encode(saved[-1]), type=MethodsReport))
    assert continued.models == whole.models
    assert [table.rows for table in methods_tables(continued)] == [
        table.rows for table in methods_tables(whole)
    ]
    titles = [str(table.title).partition(":")[0] for table in methods_tables(whole)]
    assert titles == ["What methods cost", "Where it is lost", "Methods beside their nulls"]


def test_parts_are_measured_one_after_the_other_into_one_report(tiny_model: str) -> None:
    report = None
    for part in ("lines", "needles"):
        options = choose_parts(OPTIONS, [part])
        report = measure_methods([tiny_model], [SNAPKV], options, threads=1, earlier=report)
    assert report is not None
    assert report.options == choose_parts(OPTIONS, ["lines", "needles"])
    assert len(report.models[0].holes) == OPTIONS.holes
    assert {probe.task for probe in report.models[0].probes} == set(NEEDLES)


def test_nulls_answer_the_needles_alone_and_save_nothing(tiny_model: str) -> None:
    variants = choose_variants("snapkv", [0.25], nulls=True)
    nulls = {one.specification for one in variants if one.null}
    assert nulls
    options = msgspec.structs.replace(OPTIONS, repeats=1)
    (result,) = measure_methods([tiny_model], variants, options, threads=1).models
    for probe in result.probes:
        assert nulls & set(probe.scores) == (nulls if probe.task in NEEDLES else set())
    assert not nulls & (set(result.costs) | set(result.holes[0].answers))


def test_nulls_of_methods_that_choose_in_each_row_predict_code_too(tiny_model: str) -> None:
    variants = choose_variants("lserve:budget=192,static=0", [0.25], nulls=True)
    options = msgspec.structs.replace(
        choose_parts(OPTIONS, ("code",)), code_context=400, code_tokens=20
    )
    report = measure_methods([tiny_model], variants, options, threads=1)
    (probe,) = report.models[0].probes
    assert set(probe.scores) == {FULL, *(one.specification for one in variants)}
    _, table = methods_tables(report)
    by_null = {row["budget spent"]: row for row in table.rows}
    assert set(by_null["pages at random"]) == {
        "method", "budget", "budget spent", "code KL", "KL less, nats",
    }  # fmt: skip
    assert by_null["by the method"]["KL less, nats"] == "-" != by_null["recent pages"]["code KL"]


def test_tables_and_plots_show_every_variant(report: MethodsReport, tmp_path: Path) -> None:
    text = markdown(methods_tables(report))
    assert text.count("| snapkv | 25% |") == 3
    assert text.count("| full KV | all |") == 3
    assert "25.0%" in text
    refused = msgspec.structs.replace(report.models[0], refused={SNAPKV.specification: "why not"})
    text = markdown(methods_tables(msgspec.structs.replace(report, models=[refused])))
    assert "| snapkv |" not in text
    assert "snapkv:budget=0.25: why not" in text
    plot_methods(report, tmp_path / "methods.png")
    assert (tmp_path / "methods.png").read_bytes().startswith(b"\x89PNG")
