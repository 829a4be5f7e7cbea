"""Chunks beside a hole: where they are from, which are shown, and what is chosen."""

import random

import pytest

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.request import InfillRequest
from midfill.lab.evaluation.conditions import PromptOptions, make_prompt
from midfill.lab.evaluation.holes import draw_holes
from midfill.lab.evaluation.problems import Problem
from midfill.lab.evaluation.run import InfillingReport, Outcome, ProblemRecord, RunOptions
from midfill.lab.evaluation.snippet_choice import choose_snippets, snippet_conditions
from midfill.lab.evaluation.snippet_report import snippet_markdown
from midfill.lab.evaluation.snippets import (
    ShownSnippets,
    parse_snippets,
    shown_snippets,
    with_snippets,
)
from midfill.lab.evaluation.source_files import SourceFile

FORMAT = FimFormat("test", Sentinel("<PRE>", 1), Sentinel("<SUF>", 2), Sentinel("<MID>", 3))


def source(name: str, lines: int = 400) -> SourceFile:
    word = name.replace("/", "_").removesuffix(".py")
    return SourceFile(name, "".join(f"{word}.{word}{n}({n * 7919})\n" for n in range(lines)))


FILES = [source(name) for name in ("one/a.py", "one/b.py", "one/c.py", "one/d.py", "two/e.py")]


def holes(count: int = 5) -> list[Problem]:
    return with_snippets(draw_holes(FILES, "line", count, seed=0), FILES, seed=0)


def test_amounts_are_parsed_the_plain_ones_first() -> None:
    assert [one.name for one in parse_snippets("900/old, 900,0,900/behind,900")] == [
        "0", "900", "900/old", "900/behind",
    ]  # fmt: skip
    for wrong in ("", "5", "5,5/old", "5,x", "5,6/new", "5,6/old/alike", "5,-6", "5,\u0663"):
        with pytest.raises(MidfillError, match="--snippets"):
            parse_snippets(wrong)


def test_chunks_are_of_the_same_file_away_from_the_caret_and_of_its_neighbours() -> None:
    for problem in holes():
        names = {chunk.path for chunk in problem.snippets}
        own = problem.group.rpartition("/")[2]
        assert own in names
        assert len(names) <= 4
        if problem.group.startswith("one/"):
            assert names == {"a.py", "b.py", "c.py", "d.py"}
        near = problem.prefix.split("\n")[-30:] + problem.suffix.split("\n")[1:30]
        lines = {line for chunk in problem.snippets for line in chunk.text.split("\n")}
        assert lines.isdisjoint(line for line in near[:-1] if line)
        assert problem.prefix + problem.hole not in "".join(c.text for c in problem.snippets)


def test_the_same_seed_draws_the_same_chunks() -> None:
    assert holes() == holes()
    assert holes()[0].digest != draw_holes(FILES, "line", 1, seed=0)[0].digest


def test_choices_are_of_the_ring_before_it_or_by_likeness() -> None:
    (problem,) = holes(1)
    every = 10**6
    new = shown_snippets(problem, ShownSnippets(every))
    old = shown_snippets(problem, ShownSnippets(every, "old"))
    assert (*old, *new) == problem.snippets
    own = problem.group.rpartition("/")[2]
    for choice in ("alike", "answer"):  # the first word of a line names its file
        ranked = shown_snippets(problem, ShownSnippets(every, choice))
        assert set(ranked) == set(problem.snippets)
        assert ranked[-1].path == own or choice == "answer"
    assert sum(len(one.text) for one in shown_snippets(problem, ShownSnippets(700))) <= 700


def test_conditions_differ_in_their_snippets_alone() -> None:
    (problem,) = holes(1)
    options = PromptOptions(before=300, after=100)
    requests = []
    for condition in snippet_conditions(parse_snippets("0,500,500/behind")):
        request = make_prompt(condition, FORMAT, problem, options)
        assert isinstance(request, InfillRequest)
        requests.append(request)
    none, some, behind = requests
    assert none.context == behind.context == ()
    assert sum(len(file.text) for file in some.context) <= 500
    assert none.prefix == some.prefix == behind.prefix
    assert none.suffix == some.suffix
    assert behind.suffix.startswith(none.suffix)
    assert all(file.text in behind.suffix for file in some.context)
    assert len({request.tenant for request in requests}) == 3


def report(means: dict[str, float], count: int = 400) -> InfillingReport:
    rng = random.Random(0)
    base = [rng.gauss(0, 0.2) for _ in range(count)]
    return InfillingReport(
        model="toy",
        options=RunOptions(tasks=("line",)),
        isolation="",
        problems=[ProblemRecord(f"line/{n}", "line", f"file {n % 50}", "0") for n in range(count)],
        outcomes={
            name: [
                Outcome("", True, {"similarity": mean + own + rng.gauss(0, 0.1)}) for own in base
            ]
            for name, mean in means.items()
        },
    )


def test_snippets_that_are_not_better_beyond_doubt_are_not_chosen() -> None:
    assert choose_snippets(report({"0": 0.5, "1000": 0.505, "4000": 0.5})).recommended == "0"
    assert choose_snippets(report({"0": 0.5, "1000": 0.4, "4000": 0.3})).recommended == "0"
    better = choose_snippets(report({"0": 0.5, "1000": 0.502, "4000": 0.6}))
    assert better.recommended == better.best == "4000"


def test_the_fewest_characters_that_are_worth_it_are_chosen_among_plain_ones() -> None:
    measured = report({"0": 0.4, "1000": 0.55, "4000": 0.555, "1000/answer": 0.9})
    choice = choose_snippets(measured)
    assert choice.recommended == "1000"
    assert [one.condition for one in choice.choice] == ["0", "1000", "4000"]
    page = snippet_markdown(measured, choice)
    assert "| 1000/answer | 1000 | +3" in page
    assert "| 1000 | 0 | +1" in page
    assert "Snippets: 1000, the fewest characters than which no more have a better" in page
