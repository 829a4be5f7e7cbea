"""Tables of methods: intervals and gains of made-up scores, against naive references."""

import random
from statistics import fmean

import msgspec
import pytest

from midfill.system.machine import describe_machine
from midfill_lab.bench.methods.report import gain, methods_tables, nearness, recall
from midfill_lab.bench.methods.results import (
    FULL,
    MethodsOptions,
    MethodsReport,
    ModelResult,
    ProbeResult,
    Score,
    Task,
    Variant,
)

METHOD = Variant("cake:budget=0.25", "cake", 0.25)
NULL = Variant("cake:budget=0.25 at random", "cake", 0.25, "at random", METHOD.specification)


def score(logprob: float, found: bool) -> Score:
    return Score(tokens=3, greedy=found, logprob=logprob, divergence=0.0, agreement=1.0)


def result(full: list[Score], own: list[Score], null: list[Score]) -> ModelResult:
    """Needles and needles among others in turn, two in each file."""
    tasks: tuple[Task, ...] = ("needle", "multi-key")
    probes = [
        ProbeResult(
            f"{number}",
            tasks[number % 2],
            "0.5",
            f"file {number // 2}",
            {FULL: [a], METHOD.specification: [b], NULL.specification: [c]},
        )
        for number, (a, b, c) in enumerate(zip(full, own, null, strict=True))
    ]
    return ModelResult(model="m", fingerprint="", backend="b", text="texts", probes=probes)


def tables(found: ModelResult) -> list[list[dict[str, str]]]:
    report = MethodsReport(
        machine=describe_machine(),
        load=0.0,
        options=MethodsOptions(),
        variants=[METHOD, NULL],
        models=[found],
    )
    return [[dict(row) for row in table.rows] for table in methods_tables(report)]


def naive_interval(values: list[float]) -> tuple[float, float]:
    """Return the interval of a mean over files, two values each, by drawing files one by one."""
    rng = random.Random(0)
    files = [values[at : at + 2] for at in range(0, len(values), 2)]
    means = sorted(
        fmean(value for file in rng.choices(files, k=len(files)) for value in file)
        for _ in range(4000)
    )
    return means[100], means[-101]


def test_a_gain_is_the_mean_difference_on_the_same_prompts_with_its_interval() -> None:
    rng = random.Random(1)
    own = [score(rng.gauss(-1, 1), rng.random() < 0.7) for _ in range(80)]
    null = [score(one.logprob - rng.gauss(0.2, 0.1), rng.random() < 0.4) for one in own]
    found = gain(result(own, own, null), NULL)
    assert found is not None
    differences = [a.logprob - b.logprob for a, b in zip(own, null, strict=True)]
    low, high = naive_interval(differences)
    assert found.logprob.value == pytest.approx(fmean(differences))
    assert found.logprob.low == pytest.approx(low, abs=0.005)
    assert found.logprob.high == pytest.approx(high, abs=0.005)
    points = [float(a.greedy) - b.greedy for a, b in zip(own, null, strict=True)]
    low, high = naive_interval(points)
    assert found.found.value == pytest.approx(fmean(points))
    assert found.found.low == pytest.approx(low, abs=0.02)
    assert found.found.high == pytest.approx(high, abs=0.02)
    # Unpaired, the spread of prompts would hide it.
    assert found.verdict == "better"


def test_a_method_is_better_or_worse_only_where_the_interval_says_so() -> None:
    rng = random.Random(2)
    own = [score(rng.gauss(-1, 1), True) for _ in range(40)]
    noisy = [score(rng.gauss(-1, 1), True) for _ in own]
    better = [score(one.logprob + 0.5, True) for one in own]
    verdicts = [
        found.verdict
        for null in (own, noisy, better)
        if (found := gain(result(own, own, null), NULL)) is not None
    ]
    assert verdicts == ["no gain shown", "no gain shown", "worse"]


def test_a_model_that_finds_nothing_is_told_apart_from_a_method_that_loses() -> None:
    lost, kept = [score(-5.0, False)] * 8, [score(-0.1, True)] * 8
    *_, rows = tables(result(lost, lost, lost))
    assert [row["method is"] for row in rows] == ["-", "-", "full KV finds none"]
    *_, rows = tables(result(kept, lost, kept))
    assert rows[2]["method is"] == "worse"
    captions = [
        methods_tables(
            MethodsReport(
                machine=describe_machine(),
                load=0.0,
                options=MethodsOptions(),
                variants=[METHOD],
                models=[result(full, lost, lost)],
            )
        )[0].caption
        for full in (lost, kept)
    ]
    assert "finds no needles and no needles among others with full KV" in str(captions[0])
    assert "with full KV" not in str(captions[1])


def test_a_method_is_nearer_to_full_kv_by_the_mean_difference_on_the_same_files() -> None:
    near, far = (
        [Score(tokens=3, greedy=False, logprob=-1.0, divergence=kl + n / 10, agreement=1.0)]
        for kl, n in ((0.1, 0), (0.4, 1))
    )
    probes = [
        ProbeResult(f"{n}", "code", "", f"{n}", {METHOD.specification: near, NULL.specification: d})
        for n, d in enumerate((far, far, near))
    ]
    found = nearness(ModelResult(model="m", fingerprint="", backend="b", probes=probes), NULL)
    assert found is not None
    assert found.value == pytest.approx(2 * 0.4 / 3)
    assert found.low < found.value < found.high
    assert nearness(ModelResult(model="m", fingerprint="", backend="b"), NULL) is None


def test_every_cell_has_its_interval_and_nulls_have_a_table_of_their_own() -> None:
    rng = random.Random(3)
    own = [score(rng.gauss(-1, 1), rng.random() < 0.5) for _ in range(80)]
    found = result(own, own, own)
    quality, details, nulls = tables(found)
    for row in (*quality, *details):
        assert row["method"] in ("full KV", "cake")
        assert all("±" in cell for head, cell in row.items() if head not in ("method", "budget"))
    assert set(quality[0]) == {"method", "budget", "needle", "among others"}
    assert [row["budget spent"] for row in nulls] == ["-", "by the method", "at random"]
    asked = recall(found, FULL, ["needle"])
    assert asked is not None
    low, high = (round(100 * end) for end in (asked.found.low, asked.found.high))
    assert 0 < low < 50 < high < 100
    assert f"[{low}, {high}]" in quality[0]["needle"]


def test_nulls_of_a_method_that_the_model_refuses_are_left_out() -> None:
    found = result(*[[score(-1.0, True)] * 4] * 3)
    refused = msgspec.structs.replace(found, refused={METHOD.specification: "why not"})
    quality, *_, nulls = tables(refused)
    assert [row["method"] for row in (*quality, *nulls)] == ["full KV", "full KV"]
