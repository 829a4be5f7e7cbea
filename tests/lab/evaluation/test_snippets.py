"""Chunks beside a hole: where they are from, which are shown, and what is chosen."""

import random

import pytest

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat, Sentinel
from midfill.infill.request import InfillRequest
from midfill_lab.evaluation.conditions import PromptOptions, make_prompt
from midfill_lab.evaluation.evaluate import InfillingReport, Outcome, ProblemRecord, RunOptions
from midfill_lab.evaluation.holes import draw_holes
from midfill_lab.evaluation.problems import Problem
from midfill_lab.evaluation.snippets import (
    choose_snippets,
    parse_snippets,
    snippet_conditions,
    with_snippets,
)
from midfill_lab.evaluation.source_files import SourceFile

FORMAT = FimFormat("test", Sentinel("<PRE>", 1), Sentinel("<SUF>", 2), Sentinel("<MID>", 3))


def source(name: str, lines: int = 400) -> SourceFile:
    word = name.replace("/", "_").removesuffix(".py")
    return SourceFile(name, "".join(f"{word}.{word}{n}({n * 7919})\n" for n in range(lines)))


FILES = [source(name) for name in ("one/a.py", "one/b.py", "one/c.py", "one/d.py", "two/e.py")]


def holes(count: int = 5) -> list[Problem]:
    return with_snippets(draw_holes(FILES, "line", count, seed=0), FILES, seed=0)


def test_amounts_are_parsed_the_least_first() -> None:
    assert parse_snippets("900, 0,500,900") == (0, 500, 900)
    for wrong in ("", "5", "5,5", "5,x", "5,6/old", "5,-6", "5,\u0663"):
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


def test_the_ring_is_bounded() -> None:
    assert min(len(problem.snippets) for problem in holes()) >= 8
    assert max(len(problem.snippets) for problem in holes()) == 16


def test_conditions_differ_in_their_snippets_alone() -> None:
    (problem,) = holes(1)
    options = PromptOptions(before=300, after=100)
    requests = []
    for condition in snippet_conditions((0, 900, 10**6)):
        request = make_prompt(condition, FORMAT, problem, options)
        assert isinstance(request, InfillRequest)
        requests.append(request)
    none, some, every = requests
    assert none.context_files == ()
    assert 0 < sum(len(file.text) for file in some.context_files) <= 900
    assert every.context_files == problem.snippets
    assert none.prefix == some.prefix == every.prefix
    assert none.suffix == some.suffix == every.suffix
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
    for means in ({"0": 0.5, "1000": 0.505, "4000": 0.5}, {"0": 0.5, "1000": 0.4, "4000": 0.3}):
        assert choose_snippets(report(means)).choice.recommended == "0"
    better = choose_snippets(report({"0": 0.5, "1000": 0.502, "4000": 0.6})).choice
    assert better.recommended == better.best == "4000"


def test_the_fewest_characters_that_are_worth_it_are_chosen() -> None:
    chosen = choose_snippets(report({"1000": 0.55, "0": 0.4, "4000": 0.555}))
    assert chosen.choice.recommended == "1000"
    assert [result.condition for result in chosen.choice.choice] == ["0", "1000", "4000"]
    page = chosen.tables().markdown()
    assert "| 4000 | 0 | +1" in page
    assert "| 1000 | 0 | +1" in page
    assert "Snippets: 1000, the fewest characters than which no more have a better" in page
