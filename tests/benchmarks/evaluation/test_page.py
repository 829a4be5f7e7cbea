"""Evaluation pages: a plan's runs are measured once, and its sections written into the document."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.evaluation.page import PageOptions, measure_page, read_page
from midfill.errors import MidfillError
from midfill_lab.evaluation.models import ModelChoice

ROOT = Path(__file__).parents[3]
PLAN = """
page = "page.md"

[runs.adapter]
model = "{model}"
tasks = ["line", "nothing"]
conditions = ["psm", "auto"]
limit = 3
max_tokens = 4
context_characters = [200, 100]

[runs.base]
model = "{model}"
adapter = "none"
tasks = ["line", "nothing"]
conditions = ["prefix-only"]
limit = 3
max_tokens = 4
context_characters = [200, 100]

[runs.cuts]
model = "{model}"
tasks = ["line"]
distances = [0, "whole"]
limit = 6
max_tokens = 4
context_characters = [200, 100]

[runs.windows]
model = "{model}"
tasks = ["line"]
windows = ["60/20", "120/40"]
shortest = 500
limit = 6
max_tokens = 4

[runs.empty]
model = "{model}"
tasks = ["missing-rest", "nothing-end"]
empty = true
limit = 6
max_tokens = 2
context_characters = [200, 100]

[sections.main]
run = "adapter"

[sections.base]
compare = ["base", "adapter"]
pairs = ["prefix-only=auto"]

[sections.cuts]
cuts = "cuts"

[sections.windows]
windows = "windows"

[sections.empty]
empty = "empty"

[sections.empty-given]
empty = "empty"
threshold = 0.3
"""


@pytest.fixture
def held_out(tmp_path: Path) -> Path:
    folder = tmp_path / "held"
    (folder / "python").mkdir(parents=True)
    for source in sorted((ROOT / "tests" / "lab" / "evaluation").glob("test_*.py"))[:6]:
        (folder / "python" / source.name).write_bytes(source.read_bytes())
    return folder


@pytest.fixture
def plan(tmp_path: Path, tiny_folder: Path) -> Path:
    path = tmp_path / "plan.toml"
    path.write_text(PLAN.format(model=tiny_folder))
    (tmp_path / "page.md").write_text("# Page\n\n<!-- base -->\n<!-- /base -->\n\nThe end.\n")
    return path


def measure(
    plan: Path, held_out: Path | None, sections: Sequence[str], limit: int | None = None
) -> tuple[list[str], list[str]]:
    """Measure sections; return the stages that were reported and the sections written."""
    stages: list[str] = []
    written: list[str] = []
    results = plan.parent / "results"
    options = PageOptions(
        humaneval=None,
        held_out=held_out,
        results=results,
        limit=limit,
        choice=ModelChoice(threads=1),
    )
    measure_page(
        read_page(plan),
        plan.parent / "page.md",
        options,
        sections,
        lambda stage, *_: stages.append(stage),
        written.append,
    )
    return stages, written


def test_sections_are_written_into_the_document(plan: Path, held_out: Path) -> None:
    stages, written = measure(plan, held_out, ["main", "base", "cuts", "windows"])
    assert written == ["main", "base", "cuts", "windows"]
    assert {"adapter: line", "base: nothing", "cuts: line"} <= set(stages)
    text = (plan.parent / "page.md").read_text()
    assert text.index("<!-- base -->") < text.index("line, 3 holes in both:")
    assert "| prefix-only / auto | exact |" in text
    assert text.index("The end.") < text.index("<!-- main -->") < text.index("nothing, 3 holes:")
    assert "whole" in text[text.index("<!-- cuts -->") :]
    assert "| 120/40 |" in text[text.index("<!-- windows -->") :]
    assert not measure(plan, held_out, ["cuts", "windows"])[0]


def test_empty_answers_have_sections(plan: Path, held_out: Path) -> None:
    stages, written = measure(plan, held_out, ["empty", "empty-given"])
    assert written == ["empty", "empty-given"]
    assert "empty: missing-rest" in stages
    text = (plan.parent / "page.md").read_text()
    assert "(chosen)" in text[text.index("<!-- empty -->") :]
    assert "0.3 (given)" in text[text.index("<!-- empty-given -->") :]
    assert not measure(plan, held_out, ["empty"])[0]


def test_what_is_measured_is_not_measured_again(plan: Path, held_out: Path) -> None:
    measure(plan, held_out, ["main"])
    before = (plan.parent / "page.md").read_text()
    stages, written = measure(plan, held_out, ["main"])
    assert not stages
    assert written == ["main"]
    assert (plan.parent / "page.md").read_text() == before
    stages, _ = measure(plan, held_out, ["base"])
    assert {stage.partition(":")[0] for stage in stages if ": " in stage} == {"base"}


def test_results_of_another_run_are_refused(plan: Path, held_out: Path) -> None:
    measure(plan, held_out, ["main"])
    with pytest.raises(MidfillError, match=r"run adapter \(.*json\): .* its options differ"):
        measure(plan, held_out, ["main"], limit=2)
    plan.write_text(plan.read_text().replace('["psm", "auto"]', '["psm"]'))
    with pytest.raises(MidfillError, match="its conditions differ"):
        measure(plan, held_out, ["main"])


def test_missing_files_are_reported(plan: Path) -> None:
    with pytest.raises(MidfillError, match="'python -m benchmarks held-out FOLDER' fetches them"):
        measure(plan, None, ["main"])


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ('page = "page.md"', "page = 3", "Expected `str`, got `int`"),
        ("[runs.base]", "[runs.base", "plan.toml: "),
        ('tasks = ["line"]', 'tasks = ["lines"]', "Invalid enum value 'lines'"),
        ("limit = 6", "limits = 6", "unknown field `limits`"),
        ('["psm", "auto"]', '["psm", "cut"]', "run adapter: --conditions names cut"),
        ('distances = [0, "whole"]', "distances = [0]", "run cuts has no distances to choose from"),
        ('run = "adapter"', 'run = "other"', "section main names run other; there are adapter"),
        ('windows = ["60/20", "120/40"]', 'windows = ["60"]', "run windows: --windows takes"),
        ('windows = ["60/20", "120/40"]', "distances = [0, 1]", "run windows has no windows"),
        ("shortest = 500", 'conditions = ["psm"]', "run windows: it has several of conditions"),
        ('run = "adapter"', "", "section main must have one of run, compare, cuts,"),
        ('empty = "empty"', 'empty = "base"', "section empty: run base is not of empty answers"),
        ("empty = true", "distances = [0, 1]", "section empty: run empty is not of empty answers"),
        ('cuts = "cuts"', 'cuts = "base"', "section cuts: run base has no distances"),
        ("prefix-only=auto", "prefix-only", "section base: its pairs must be like"),
    ],
)
def test_a_wrong_plan_is_reported(plan: Path, old: str, new: str, problem: str) -> None:
    text = plan.read_text()
    assert old in text
    plan.write_text(text.replace(old, new, 1))
    with pytest.raises(MidfillError) as error:
        read_page(plan)
    assert problem in str(error.value)
    assert "\n" not in str(error.value)


def test_the_plan_of_the_documentation_fits_its_page() -> None:
    plan = read_page(ROOT / "docs" / "evaluation.toml")
    text = (ROOT / "docs" / plan.page).read_text("utf-8")
    for name in plan.sections:
        assert f"<!-- {name} -->" in text
    assert set(plan.runs) == {run for section in plan.sections.values() for run in section.runs}
