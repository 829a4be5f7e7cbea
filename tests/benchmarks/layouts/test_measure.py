"""The figures of ``python -m benchmarks layouts``, its targets and its tables."""

import re
from pathlib import Path

import msgspec
import pytest
from editing import needs_git, session

from benchmarks.layouts.git import History, HistoryError
from benchmarks.layouts.measure import (
    LAYOUTS,
    SHOWN,
    WINDOWS,
    LayoutsOptions,
    LayoutsReport,
    layouts_table,
    measure_layouts,
    windowed,
)


def markdown_of(report: LayoutsReport) -> str:
    return layouts_table(report).markdown()


def test_windows_are_the_text_around_the_caret() -> None:
    rounds = session("mix")
    for one, sent in zip(rounds, windowed(rounds, characters=300), strict=True):
        assert one.prefix.endswith(sent.prefix)
        assert one.suffix.startswith(sent.suffix)
        assert len(sent.prefix) == min(300, len(one.prefix))
    for one, sent in zip(rounds, windowed(rounds, lines=5), strict=True):
        assert one.prefix.endswith(sent.prefix)
        assert sent.prefix.count("\n") == min(5, one.prefix.count("\n"))
        assert sent.suffix.count("\n") == min(5, one.suffix.count("\n"))


@pytest.fixture(scope="module")
def report() -> LayoutsReport:
    return measure_layouts(LayoutsOptions(mixes=2, rounds=250, kind_rounds=60, planned=100))


class TestReport:
    def test_the_json_holds_what_the_documentation_says(self, report: LayoutsReport) -> None:
        stored = msgspec.json.decode(msgspec.json.encode(report))
        assert set(stored["tokens_computed"]) == set(LAYOUTS)
        assert {"psm", "planner"} <= set(stored["windowed"])
        assert msgspec.json.decode(msgspec.json.encode(report), type=LayoutsReport) == report

    def test_the_planner_comes_close_to_the_bound_on_the_mix(self, report: LayoutsReport) -> None:
        computed = report.tokens_computed
        assert computed["optimum"] <= computed["planner"] <= 1.15 * computed["optimum"]
        assert computed["planner"] <= computed["efim"]
        assert computed["planner"] <= 0.10 * computed["psm"]

    def test_windows_cost_little_more_than_whole_documents(self, report: LayoutsReport) -> None:
        mix = report.sessions[0]
        assert report.windowed["planner"] <= 0.10 * report.windowed["psm"]
        for window in WINDOWS:
            assert mix.windowed[window]["planner"] <= 1.5 * mix.tokens_computed["planner"]

    def test_the_planners_own_windows_cost_less_than_whole_documents(
        self, report: LayoutsReport
    ) -> None:
        mix = report.sessions[0]
        assert set(mix.shown) == set(SHOWN)
        assert mix.shown["2000/600"] < 0.7 * mix.tokens_computed["planner"]
        assert len(mix.moves["whole"]) == len(mix.moves["2000/600"]) > 5
        assert max(mix.moves["2000/600"]) <= (1.25 * 2000 + 600) / 2.5
        text = markdown_of(report)
        assert "shown 2000/600: / whole" in text
        assert "A caret that moves, median and most tokens: " in text

    def test_typing_and_accepting_cost_a_handful_of_tokens(self, report: LayoutsReport) -> None:
        for result in report.sessions:
            assert result.most_over_typed <= 8
            assert result.most_for_accepting <= 8

    def test_planning_takes_less_than_a_millisecond(self, report: LayoutsReport) -> None:
        assert report.planning.characters == 100_000
        assert report.planning.median < 1.0

    def test_tables_have_a_row_for_every_session(self, report: LayoutsReport) -> None:
        markdown = markdown_of(report)
        for result in report.sessions:
            assert f"| {result.name}" in markdown
        assert len(layouts_table(report).rows) == len(report.sessions)

    @needs_git
    def test_repositories_are_replayed_too(self, repository: Path) -> None:
        options = LayoutsOptions(
            mixes=1, rounds=60, kind_rounds=0, planned=10, repositories=[str(repository)]
        )
        result = measure_layouts(options).sessions[-1]
        assert result.name == f"git: {repository.name}"
        assert result.requests == 60
        assert re.fullmatch("[0-9a-f]{40}", result.commit)

    @needs_git
    def test_histories_are_pinned_and_their_range_is_shown(self, repository: Path) -> None:
        def replay(*commits: str) -> LayoutsReport:
            named = [f"{repository}@{commit}" for commit in commits]
            options = LayoutsOptions(
                mixes=1, rounds=30, kind_rounds=0, planned=10, repositories=named
            )
            return measure_layouts(options)

        both = replay("HEAD", "HEAD~1")
        newest, before = both.sessions[-2:]
        assert newest.commit != before.commit
        # A commit's figures can be made again, whatever was committed later.
        again = replay(before.commit).sessions[-1]
        assert again == before
        shares = [
            one.tokens_computed["planner"] / one.tokens_computed["psm"] for one in (newest, before)
        ]
        assert (both.over_histories["psm"].low, both.over_histories["psm"].high) == (
            min(shares),
            max(shares),
        )
        text = markdown_of(both)
        assert f"| git: {repository.name}@{before.commit[:7]} |" in text
        assert f"{min(shares):.3f} to {max(shares):.3f} of psm" in text

    @needs_git
    def test_a_commit_that_is_none_is_named(self, repository: Path) -> None:
        with pytest.raises(HistoryError, match="git can't read"):
            History.find(f"{repository}@nothing")

    def test_a_models_own_tokenizer_can_be_the_unit(self) -> None:
        options = LayoutsOptions(mixes=1, rounds=40, kind_rounds=0, planned=10)
        report = measure_layouts(
            options, tokenize=lambda text: [ord(c) for c in text], unit="characters"
        )
        assert "characters" in markdown_of(report)
        pieces = measure_layouts(options)
        assert report.tokens_computed["psm"] > 2 * pieces.tokens_computed["psm"]
