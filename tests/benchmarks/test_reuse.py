"""A whole run on a tiny model: jumps and files, counted, and the table of it."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from tiny_checkpoints import write_tiny
from typer.testing import CliRunner

from benchmarks import reuse as bench
from benchmarks.__main__ import make_app
from benchmarks.reuse import measure_reuse
from benchmarks.reuse_contexts import CHANGES
from benchmarks.reuse_nulls import reuse_nulls
from benchmarks.reuse_report import (
    FULL,
    ReuseOptions,
    ReuseReport,
    Trial,
    reuse_table,
    shown_table,
)
from midfill.errors import MidfillError
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.reuse.cachecraft import CacheCraft
from midfill.methods.reuse.kvshare import KVShare
from midfill.methods.reuse.method import LayerKV
from midfill_lab.evaluation.problems import Problem

NOTHING, SOME = (f"cacheblend:ratio={ratio},check_layer=0" for ratio in ("0", "0.3"))
APART = "ape:temperature=0.8"
NULLS = [f"{SOME} random tokens", f"{SOME} first tokens"]
SCORES = [f"{SOME} {title}" for title in ("nearest", "attention", "deviation x attention")]
OPTIONS = ReuseOptions(
    methods=[NOTHING, SOME, APART],
    nulls=True,
    scores=True,
    windows=["700/300"],
    jumps=3,
    contexts=2,
    shown=2,
    files=(2, 3),
    file_tokens=(150, 300),
)


def holes(texts: Sequence[str], count: int) -> list[Problem]:
    found = []
    for number, text in enumerate(texts[:count]):
        start = text.index("\n", len(text) // 2) + 1
        end = text.index("\n", start)
        parts = {"prefix": text[:start], "hole": text[start:end], "suffix": text[end:]}
        found.append(Problem(id=f"hole {number}", task="line", group="", **parts))
    return found


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReuseReport:
    folder: Path = tmp_path_factory.mktemp("tiny") / "long"
    write_tiny("llama", folder, max_position_embeddings=8192)
    saved: list[ReuseReport] = []
    report = measure_reuse(
        str(folder),
        OPTIONS,
        draw=holes,
        threads=1,
        save=lambda one: saved.append(one),
    )
    assert len(saved) == 17
    return report


def of_kind(report: ReuseReport, kind: str) -> list[Trial]:
    return [trial for trial in report.trials if trial.kind == kind]


def test_every_prompt_is_asked_with_every_method(report: ReuseReport) -> None:
    assert len(of_kind(report, "jump 700/300")) == 3
    assert len(of_kind(report, "files")) == 2
    assert len(of_kind(report, "typing, PSM")) == len(of_kind(report, "typing, planner")) == 2
    for trial in report.trials:
        files = [APART] if trial.kind.startswith("files") else []
        assert list(trial.asked) == [NOTHING, SOME, *NULLS, *SCORES, *files, FULL]
    assert all(trial.tokens > trial.cached for trial in report.trials)


def test_what_was_shown_before_is_computed_again_only_behind_a_change(report: ReuseReport) -> None:
    shown = {kind: of_kind(report, kind) for kind in CHANGES}
    assert [len(trials) for trials in shown.values()] == [2] * len(CHANGES)
    for kind, trials in shown.items():
        for trial in trials:
            assert trial.file_tokens > 200
            assert 0 <= trial.new_file_tokens <= trial.file_tokens
            if kind != "files edited":
                assert trial.new_file_tokens < trial.file_tokens / 20, "the planner keeps the order"
            else:
                assert trial.new_file_tokens > 0
            exact = trial.shown(FULL)
            assert (exact.again, exact.same) == (trial.new_file_tokens, True)
    table = shown_table(report)
    assert next(row["prompts"] for row in table.rows) == "files again (2)"
    assert {row["method"] for row in table.rows} == {FULL, APART, NOTHING, SOME, *NULLS, *SCORES}


def test_files_that_are_computed_apart_are_measured_where_there_are_some(
    report: ReuseReport,
) -> None:
    for trial in of_kind(report, "files"):
        assert trial.asked[APART].row_layers < trial.asked[NOTHING].row_layers
        assert trial.asked[APART].divergence > 0


def test_files_that_moved_are_copied_and_cost_their_share(report: ReuseReport) -> None:
    for trial in of_kind(report, "files"):
        nothing, some, full = (trial.asked[name] for name in (NOTHING, SOME, FULL))
        assert full.reused_tokens == 0 < some.reused_tokens < nothing.reused_tokens
        assert nothing.row_layers < some.row_layers < full.row_layers
        assert nothing.key_pairs < some.key_pairs < full.key_pairs
        assert full.row_layers == 3 * (trial.tokens - trial.cached)
        # All rows in the first of three layers, and those that were not copied in the others.
        computed = trial.tokens - trial.cached - nothing.reused_tokens
        assert nothing.row_layers == full.row_layers - 2 * nothing.reused_tokens
        assert computed > 0


def test_nulls_compute_as_many_tokens_again_and_get_other_answers(report: ReuseReport) -> None:
    for trial in of_kind(report, "files"):
        some, *others = (trial.asked[name] for name in (SOME, *NULLS, *SCORES))
        assert all(other.row_layers == some.row_layers for other in others)
        assert all(other.reused_tokens == some.reused_tokens for other in others)
        chance, first, near, attention, both = others
        assert len({near.divergence, attention.divergence, some.divergence}) == 3
        # A deviation of nothing, times whatever attention there is, is nothing.
        assert both.divergence == some.divergence
        assert chance.divergence != some.divergence
        # Values of layer 0, which is compared here, know no context: nothing differs, and of equal
        # tokens the first count.
        assert first.divergence == some.divergence
    rows = reuse_table(report).rows
    shown = {
        row["method"]: row["KL minus the method's"] for row in rows if "files" in row["prompts"]
    }
    assert shown[SOME] == shown[FULL] == ""
    for name in (*NULLS, *SCORES):
        differences = [
            trial.asked[name].divergence - trial.asked[SOME].divergence
            for trial in of_kind(report, "files")
        ]
        assert shown[name].startswith(f"{fmean(differences):+.3f} [")


def test_nulls_choose_at_random_or_the_first_the_same_way_each_time() -> None:
    values = np.random.default_rng(0).normal(size=(2, 40, 3, 8)).astype(np.float32)
    computed = LayerKV(values[0], values[1])
    copied = LayerKV(values[0][::-1], values[1][::-1])
    found = reuse_nulls([NOTHING, SOME, APART]).items()
    nulls = {name: null for name, (_, null) in found if isinstance(null, CacheBlend)}
    assert list(nulls) == NULLS == [name for name, _ in found]
    chance, first = (null.select(copied, computed) for null in nulls.values())
    assert first.tolist() == list(range(12))
    assert len(set(chance.tolist())) == 12
    assert chance.tolist() == sorted(chance.tolist()) != first.tolist()
    assert nulls[NULLS[0]].select(copied, computed).tolist() == chance.tolist()
    assert nulls[NULLS[0]].select(copied, copied).tolist() != chance.tolist()
    assert nulls[NULLS[0]] != nulls[NULLS[1]], "their KV isn't shared"


def test_nulls_of_cache_craft_repair_as_many_tokens_of_each_file() -> None:
    scores = np.random.default_rng(0).random(40).astype(np.float32)
    nulls = [
        null for _, null in reuse_nulls(["cachecraft:alpha=0.5", "cachecraft:alpha=0"]).values()
    ]
    found = [null.repaired(scores, 0.3) for null in nulls if isinstance(null, CacheCraft)]
    chance, first = (each.tolist() for each in found)
    assert first == list(range(12))
    assert len(set(chance)) == 12
    assert chance == sorted(chance) != first
    assert chance != CacheCraft().repaired(scores, 0.3).tolist()


@pytest.mark.parametrize("eps", [0.0, 1.0])
def test_nulls_of_kvshare_repair_as_many_tokens_whatever_eps_leaves(eps: float) -> None:
    deviation, size, attention = np.random.default_rng(0).random((3, 40)) + 0.01
    method = KVShare(eps=eps, ratio=0.3)
    chosen = method.repaired(deviation, size, attention).tolist()
    assert len(chosen) == 12 if eps == 0.0 else 0 < len(chosen) <= 12
    nulls = [null for _, null in reuse_nulls([f"kvshare:eps={eps},ratio=0.3"]).values()]
    found = [
        null.repaired(deviation, size, attention).tolist()
        for null in nulls
        if isinstance(null, KVShare)
    ]
    chance, first = found
    assert first == list(range(len(chosen)))
    assert len(set(chance)) == len(chosen)
    assert chance == sorted(chance) not in (first, chosen)
    assert not reuse_nulls(["kvshare:ratio=0"])


def test_what_is_typed_moves_the_suffix_in_psm_order_only(report: ReuseReport) -> None:
    psm, planner = (of_kind(report, f"typing, {name}") for name in ("PSM", "planner"))
    for one, other in zip(psm, planner, strict=True):
        assert one.name == other.name
        assert one.asked[NOTHING].reused_tokens > 0 == other.asked[NOTHING].reused_tokens
        assert one.asked[FULL].row_layers > 4 * other.asked[FULL].row_layers
        assert other.asked[FULL].row_layers == other.asked[NOTHING].row_layers > 3


def test_where_nothing_was_copied_there_is_nothing_to_choose_and_nothing_to_ask(
    report: ReuseReport,
) -> None:
    for trial in of_kind(report, "typing, planner"):
        assert all(trial.asked[name] == trial.asked[SOME] for name in (*NULLS, *SCORES))


def test_divergence_is_from_the_exact_answer(report: ReuseReport) -> None:
    for trial in report.trials:
        assert trial.asked[FULL].divergence == 0
        for name in (NOTHING, SOME):
            assert (trial.asked[name].divergence > 0) == (trial.asked[name].reused_tokens > 0)


def test_the_table_has_a_row_for_each_kind_and_method(report: ReuseReport) -> None:
    table = reuse_table(report)
    assert [(row["prompts"], row["method"]) for row in table.rows] == [
        (kind, method)
        for kind in ("jump 700/300 (3)", "files (2)", "typing, PSM (2)", "typing, planner (2)")
        for method in (
            FULL,
            NOTHING,
            SOME,
            *NULLS,
            *SCORES,
            *([APART] if kind == "files (2)" else []),
        )
    ]
    first = table.rows[0]
    assert (first["rows x layers"], first["key pairs"], first["KL mean"], first["same"]) == (
        "1.00", "1.00", "0.000", "100% [29%, 100%]",
    )  # fmt: skip
    assert "numpy" in table.markdown()


@pytest.mark.parametrize("window", ["2000", "a/b", "/", "-1/2"])
def test_a_bad_window_is_one_clear_line(window: str) -> None:
    options = ReuseOptions(methods=[NOTHING], windows=[window])
    with pytest.raises(MidfillError, match="a window is characters before/after"):
        measure_reuse("no model", options)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[ReuseOptions]:
    """Runs that are requested; none begins."""
    calls: list[ReuseOptions] = []

    def run(model: str, options: ReuseOptions, **_: object) -> None:
        calls.append(options)
        raise MidfillError("not run")

    monkeypatch.setattr(bench, "measure_reuse", run)
    return calls


def refused(*arguments: str) -> str:
    return str(CliRunner().invoke(make_app("reuse"), ["reuse", *arguments]).exception)


def test_methods_and_windows_are_lists(calls: list[ReuseOptions]) -> None:
    assert refused("--windows", "1/2, 3/4", "--methods", "cacheblend:ratio=0.1 cacheblend") == (
        "not run"
    )
    assert calls[0].windows == ["1/2", "3/4"]
    assert calls[0].methods == ["cacheblend:ratio=0.1", "cacheblend"]


def test_without_jumps_there_are_only_files(calls: list[ReuseOptions]) -> None:
    refused("--jumps", "0", "--contexts", "3")
    assert (calls[0].jumps, calls[0].windows, calls[0].contexts) == (0, [], 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--methods", "cake"],
            "cake takes no KV from elsewhere, as cacheblend, cachecraft, kvshare, kvcomm and ape",
        ),
        (["--methods", "cacheblend:ratio=2"], "cacheblend: ratio must be from 0 to 1, not 2"),
        (["--jumps", "0", "--contexts", "0"], "there is nothing to measure"),
        (["--shown", "1", "--ways", "again,last"], "--ways takes again, reordered, beside, edited"),
        (["--shown", "1", "--files", "3"], "--files takes two numbers, the least and the most"),
    ],
)
def test_bad_options_are_one_clear_line(
    calls: list[ReuseOptions], arguments: list[str], message: str
) -> None:
    assert refused(*arguments).startswith(message)
    assert not calls
