"""``midfill eval``, run as users run it."""

import shutil
import subprocess
import sys
from collections.abc import Callable
from json import loads
from pathlib import Path
from typing import Any, cast

import pytest
from tiny_checkpoints import write_tiny

from midfill.cli import main

HERE = Path(__file__).parent
HEAVY = ("torch", "numba", "numpy", "tokenizers", "matplotlib", "httpx", "rich.progress")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def midfill(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """A function that runs ``midfill eval`` here; returns status, output and errors."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["midfill", "eval", *map(str, arguments)])
        status: object = 0
        try:
            main()
        except SystemExit as end:
            status = end.code or 0
        assert isinstance(status, int)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys, midfill.cli.app; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_a_run_prints_and_writes_its_results(
    midfill: Command, tiny_folder: Path, humaneval: Path, tmp_path: Path
) -> None:
    results = [tmp_path / "a.json", tmp_path / "b.json"]
    for seed, json in enumerate(results):
        status, shown, _ = midfill(
            *("infilling", "--model", tiny_folder, "--adapter", "none", "--threads", 1),
            *("--humaneval", humaneval, "--files", HERE, "--tasks", "single-line,subtoken"),
            *("--conditions", "psm,efim+healing", "--limit", 4, "--max-tokens", 4),
            *("--context-characters", "200,100", "--seed", seed, "--json", json),
            *("--plot", tmp_path / "plot.png", "--docs", tmp_path / "page.md"),
        )
        assert status == 0
        assert "single-line, 4 holes" in shown
        assert "subtoken, minus psm" in shown
    assert (tmp_path / "plot.png").stat().st_size > 1000
    assert "| efim+healing |" in (tmp_path / "page.md").read_text()
    status, shown, _ = midfill("compare", *results, "--pair", "psm=efim+healing")
    assert status == 0
    assert "psm / efim+healing" in shown
    page = tmp_path / "other.md"
    status, again, _ = midfill("show", results[0], "--docs", page, "--section", "one")
    assert status == 0
    assert "single-line, 4 holes" in again
    status, _, _ = midfill("compare", *results, "--docs", page, "--section", "both")
    assert status == 0
    text = page.read_text()
    assert text.index("<!-- one -->") < text.index("subtoken, 4 holes:") < text.index("<!-- both")
    assert "second - first" in text


def test_a_models_cut_is_measured_shown_and_written(
    midfill: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    results, page, plot = (tmp_path / name for name in ("a.json", "page.md", "plot.png"))
    page.write_text("<!-- cuts -->\n<!-- /cuts -->\n")
    status, shown, _ = midfill(
        *("cuts", "--model", folder, "--adapter", "none", "--threads", 1, "--files", HERE),
        *("--tasks", "line", "--limit", 6, "--max-tokens", 3, "--distances", "0,60,whole"),
        *("--context-characters", "150,60", "--json", results, "--plot", plot, "--docs", page),
        *("--write", folder),
    )
    assert status == 0
    assert "holes that nothing was chosen on" in shown
    assert "Least increment" in " ".join(shown.split())
    assert "| 60 |" in page.read_text()
    assert plot.stat().st_size > 1000
    written = json_object(folder / "midfill.json")["cut"]
    assert written["least_increment"] in (0, 60, 100_000)
    assert written["measured"]["holes"] == {"line": 6}
    assert set(json_object(results)["outcomes"]) == {"0", "60", "whole"}
    status, _, said = midfill(
        *("cuts", "--model", tiny_folder, "--files", HERE, "--write", folder), "--adapter", "none"
    )
    assert status == 2
    assert "what is measured is" in said


def test_windows_are_measured_and_the_chosen_one_is_written_beside_the_model(
    midfill: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    results, page, plot = (tmp_path / name for name in ("a.json", "page.md", "plot.png"))
    page.write_text("<!-- windows -->\n<!-- /windows -->\n")
    arguments = (
        *("windows", "--model", folder, "--adapter", "none", "--threads", 1, "--files", HERE),
        *("--tasks", "line", "--limit", 6, "--max-tokens", 3, "--windows", "60/20,120/40"),
        *("--shortest", 3000, "--json", results),
    )
    assert midfill(*arguments)[0] == 0
    assert midfill("show", results)[0] == 0
    arguments = (*arguments, "--resume", "--plot", plot, "--docs", page, "--write", folder)
    status, shown, _ = midfill(*arguments)
    assert status == 0
    assert "caret moved" in shown
    assert "| 60/20 |" in page.read_text()
    assert plot.stat().st_size > 1000
    written = json_object(folder / "midfill.json")["window"]
    assert (written["before"], written["after"]) in ((60, 20), (120, 40))
    costs = [one["cost"] for one in json_object(results)["outcomes"]["120/40"]]
    assert all(cost["moved"] > 0 and cost["typed"] <= 8 for cost in costs)


def test_far_text_is_measured_and_the_run_can_be_continued(
    midfill: Command, tmp_path: Path
) -> None:
    folder, results, page = (tmp_path / name for name in ("model", "a.json", "page.md"))
    write_tiny("llama", folder, max_position_embeddings=4096)
    arguments = (
        *("far", "--model", folder, "--adapter", "none", "--threads", 1, "--files", HERE),
        *("--windows", "200/100,800/100", "--methods", "", "--limit", 2, "--per-file", 1),
        *("--shortest", 2000, "--max-tokens", 3, "--timed", 1, "--json", results),
    )
    assert midfill(*arguments)[0] == 0
    status, shown, _ = midfill(*arguments, "--resume", "--docs", page)
    assert status == 0
    assert "A name that the file sets far above" in shown
    assert "| 800/100 |" in page.read_text()
    assert len(json_object(results)["carets"]) >= 2


def test_jumps_are_measured_and_what_is_reused_is_written_beside_the_model(
    midfill: Command, tmp_path: Path
) -> None:
    folder, results, page = (tmp_path / name for name in ("model", "a.json", "page.md"))
    write_tiny("llama", folder, max_position_embeddings=4096)
    (folder / "midfill.json").write_text('{"window": {"before": 800, "after": 300}}')
    arguments = (
        *("reuse", "--model", folder, "--adapter", "none", "--threads", 1, "--files", HERE),
        *("--methods", "cacheblend:ratio=0 cacheblend:ratio=0.2,order=caret", "--limit", 6),
        *("--per-file", 3, "--max-tokens", 3, "--json", results),
    )
    assert midfill(*arguments)[0] == 0
    status, shown, _ = midfill(*arguments, "--resume", "--docs", page, "--write", folder)
    assert status == 0
    assert "carets tell too little, it takes 1,000" in shown
    assert "| cacheblend:ratio=0.2,order=caret |" in page.read_text()
    written = json_object(folder / "midfill.json")
    assert written["reuse"]["method"] == "off"
    assert written["reuse"]["measured"]["jumps"] == len(json_object(results)["jumps"]) == 6
    assert written["window"]["before"] == 800


def test_snippets_are_measured_and_the_number_chosen_is_written_beside_the_model(
    midfill: Command, tiny_folder: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    results, page, plot = (tmp_path / name for name in ("a.json", "page.md", "plot.png"))
    amounts = "0,200,400"
    arguments = (
        *("snippets", "--model", folder, "--adapter", "none", "--threads", 1, "--files", HERE),
        *("--tasks", "line", "--limit", 6, "--max-tokens", 3, "--snippets", amounts),
        *("--context-characters", "120,40", "--json", results),
    )
    assert midfill(*arguments)[0] == 0
    assert midfill("show", results)[0] == 0
    arguments = (*arguments, "--resume", "--plot", plot, "--docs", page, "--write", folder)
    status, shown, _ = midfill(*arguments)
    assert status == 0
    assert "Snippets: " in shown
    assert "| 400 | 0 |" in page.read_text()
    assert plot.stat().st_size > 1000
    written = json_object(folder / "midfill.json")["snippets"]
    assert written["characters"] in (0, 200, 400)
    assert written["measured"]["characters_around_the_caret"] == [120, 40]
    assert set(json_object(results)["outcomes"]) == set(amounts.split(","))


def test_empty_answers_are_measured_and_the_threshold_is_written_beside_the_model(
    midfill: Command, tiny_folder: Path, humaneval: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    results, page, plot = (tmp_path / name for name in ("a.json", "page.md", "plot.png"))
    arguments = (
        *("empty", "--model", folder, "--adapter", "none", "--threads", 1, "--files", HERE),
        *("--humaneval", humaneval, "--limit", 6, "--max-tokens", 3, "--json", results),
        *("--context-characters", "150,60"),
    )
    status, shown, _ = midfill(*arguments, "--threshold", 0.5)
    assert status == 0
    assert "Something is missing, 23 carets" in shown
    assert "0.5 (given)" in shown
    assert midfill("show", results)[0] == 0
    status, shown, _ = midfill(
        *(*arguments, "--resume", "--plot", plot, "--docs", page, "--write", folder)
    )
    assert status == 0
    assert "Nothing is missing" in shown
    assert "carets that nothing was chosen on" in shown
    assert "(chosen)" in page.read_text()
    assert plot.stat().st_size > 1000
    written = json_object(folder / "midfill.json")["empty"]
    assert 0.01 <= written["threshold"] <= 1
    assert written["measured"]["holes"]["nothing-blank"] == 6
    outcomes = json_object(results)["outcomes"]
    assert all(one["answer"] == "" for one in outcomes["always"])
    assert all(0 < one["empty_probability"] < 1 for one in outcomes["always"])
    assert all("empty_probability" not in one for one in outcomes["off"])


def json_object(path: Path) -> dict[str, Any]:
    return cast(dict[str, Any], loads(path.read_text()))


def test_reference_solutions_pass_in_the_sandbox(midfill: Command, humaneval: Path) -> None:
    status, shown, _ = midfill("check", "--humaneval", humaneval)
    assert status == 0
    assert shown.startswith("5 of 5 programs passed")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["infilling"], "nothing to ask: name held-out source files with --files, or"),
        (["infilling", "--files", "nowhere"], "--files nowhere: no such file or folder"),
        (["infilling", "--humaneval", "nowhere"], "no HumanEval-SingleLineInfilling.jsonl.gz in"),
        (["infilling", "--files", HERE, "--tasks", "words"], "--tasks names words"),
        (["infilling", "--files", HERE, "--tasks", "single-line"], "needs --humaneval"),
        (["infilling", "--files", HERE, "--conditions", "pms"], "--conditions names pms"),
        (["infilling", "--files", HERE, "--resume"], "name it with --json"),
        (["infilling", "--files", HERE, "--json", "no/a.json"], "there is no folder no"),
        (["infilling", "--files", HERE, "--plot", "a.bmp"], "must end in .png, .svg or .pdf"),
        (["infilling", "--files", HERE, "--url", "http://127.0.0.1:1/v1"], "no OpenAI-style"),
        (["infilling", "--files", HERE, "--url", "x", "--typed"], "--url can't be combined"),
        (["compare", "a.json", "b.json"], "a.json can't be read"),
        (["show", "a.json"], "a.json can't be read"),
        (["show", "a.json", "--docs", "no/a.md"], "there is no folder no"),
        (["cuts"], "nothing to ask: name held-out source files with --files, or"),
        (["cuts", "--files", HERE, "--distances", "400"], "nothing to choose from"),
        (["cuts", "--files", HERE, "--distances", "0,far"], "--distances takes characters and"),
        (["cuts", "--files", HERE, "--score", "beauty"], "--score beauty: there is no such"),
        (["cuts", "--files", HERE, "--write", HERE], "neither an adapter's nor"),
        (["windows"], "nothing to ask: name held-out source files with --files"),
        (["windows", "--files", HERE, "--windows", "400/100"], "nothing to choose from"),
        (["windows", "--files", HERE, "--windows", "400,100"], "--windows takes characters"),
        (["windows", "--files", HERE, "--tasks", "multi-line"], "documents are too short"),
        (["windows", "--files", HERE, "--shortest", "9999999"], "no file has 9999999"),
        (["windows", "--files", HERE, "--write", HERE], "neither an adapter's nor"),
        (["snippets"], "nothing to ask: name held-out source files with --files"),
        (["snippets", "--files", HERE, "--snippets", "0,0"], "fewer than two numbers"),
        (["snippets", "--files", HERE, "--snippets", "0,2/old"], "--snippets takes numbers"),
        (["snippets", "--files", HERE, "--tasks", "multi-line"], "documents stand alone"),
        (["snippets", "--files", HERE, "--write", HERE], "set midfill.snippets.characters"),
        (["empty"], "nothing to ask: name held-out Python files with --files"),
        (["empty", "--files", HERE, "--write", HERE], "set midfill.empty_threshold"),
        (["empty", "--files", HERE, "--write", HERE, "--threshold", "0.1"], "leave out --thresh"),
        (["far"], "nothing to ask: name held-out source files with --files"),
        (["far", "--files", HERE, "--methods", "nonsense"], "there is no method 'nonsense'"),
        (["far", "--files", HERE, "--windows", "9"], "--windows takes characters before and after"),
        (["far", "--files", HERE, "--processes", "2"], "leave it out"),
        (
            ["far", "--files", HERE, "--kinds", "near"],
            "--kinds names near; there are far, imported",
        ),
        (["reuse"], "nothing to ask: name held-out source files with --files"),
        (["reuse", "--files", HERE, "--methods", "cake"], "cake takes no KV from elsewhere"),
        (["reuse", "--files", HERE, "--longest", "9"], "no file has 12,000 to 9 characters"),
        (["reuse", "--files", HERE, "--resume"], "name it with --json"),
        (["reuse", "--files", HERE, "--processes", "2"], "leave it out"),
        (["reuse", "--files", HERE, "--write", HERE], "set midfill.reuse.method"),
        (["check"], "name the data with --humaneval FOLDER"),
    ],
)
def test_bad_input_is_reported_in_one_line(
    midfill: Command, arguments: list[object], problem: str
) -> None:
    status, _, said = midfill(*arguments)
    # 2 for the value of an option, 1 for what it names.
    assert status == (2 if said.startswith("midfill: --") else 1)
    assert said.count("\n") == 1
    assert problem in said


def test_a_model_that_is_none_is_reported_in_one_line(midfill: Command) -> None:
    status, _, said = midfill("infilling", "--files", HERE, "--model", "./none.gguf")
    assert status == 1
    assert said.count("\n") == 1
    assert "none.gguf" in said


@pytest.mark.parametrize(
    "arguments",
    [
        ["infilling", "--files", HERE, "--context-characters", "many"],
        ["infilling", "--files", HERE, "--fim-tokens", "a,b"],
        ["infilling", "--files", HERE, "--limit", "-1"],
        ["compare", "a.json"],
        ["compare", "a.json", "b.json", "--pair", "psm"],
    ],
)
def test_wrong_usage_exits_with_2(midfill: Command, arguments: list[object]) -> None:
    status, _, said = midfill(*arguments)
    assert status == 2
    assert said.startswith("midfill: ")
    assert said.count("\n") == 1


def test_psm_needs_fim_tokens(midfill: Command, tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "plain")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("fim_", "mif_"))
    options = ["--model", folder, "--threads", 1, "--files", HERE, "--conditions", "psm"]
    status, _, said = midfill("infilling", *options)
    assert status == 1
    assert said == (
        "midfill: condition psm needs the model's FIM tokens: name them with"
        " --fim-tokens PRE,SUF,MID\n"
    )
