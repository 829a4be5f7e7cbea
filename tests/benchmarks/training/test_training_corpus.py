"""The corpus of a recipe: its lists are read, its packages fetched, its documents written."""

import json
from pathlib import Path

import pytest
from fetched_packages import put_package
from training_corpus import source_text
from typer.testing import CliRunner

from benchmarks.__main__ import make_app
from benchmarks.package_sources import Package
from benchmarks.training.source_files import OTHER, SUFFIXES
from benchmarks.training.training_corpus import read_package_lists
from midfill.errors import MidfillError
from midfill_lab.bench.documents import LIBRARIES
from midfill_lab.training.recipe import TrainingRecipe

RECIPE = Path(__file__).parents[3] / "recipes" / "smollm2-135m-fim"
LANGUAGES = [language for language in SUFFIXES if language != OTHER]
ALL_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """Return a folder of lists: a package for each language, one held out, one protected."""
    folder = tmp_path / "recipe"
    (folder / "held_out").mkdir(parents=True)
    for language in LANGUAGES:
        (folder / f"{language}.txt").write_text(f"{language}-package==1\n")
    (folder / "held_out" / "python.txt").write_text("held==1\n")
    (folder / "protected.txt").write_text("eval==1\n")
    return folder


def test_the_command_writes_documents_and_statistics(recipe: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for number, language in enumerate(LANGUAGES):
        package = Package(f"{language}-package", "1", suffixes=ALL_SUFFIXES)
        texts = {f"{n}{SUFFIXES[language][0]}": source_text(10 * number + n) for n in range(3)}
        put_package(out / "packages", package, texts)
    held_out = Package("held", "1", suffixes=ALL_SUFFIXES)
    put_package(out / "held-out", held_out, {"0.py": source_text(0)})
    protected = Package("eval", "1", suffixes=(".gz", ".jsonl"))
    problem = json.dumps({"prompt": source_text(1)}) + "\n"
    put_package(out / "protected", protected, {"problems.jsonl": problem})
    arguments = ["training-corpus", str(recipe), "--output", str(out)]
    result = CliRunner().invoke(make_app("training-corpus", "held-out"), arguments)
    assert result.exit_code == 0, result.output
    assert "16 documents" in result.output
    records = [json.loads(line) for line in (out / "corpus.jsonl").read_text().splitlines()]
    assert len(records) == 16
    assert {each["package"] for each in records} == {f"{each}-package==1" for each in LANGUAGES}
    (python,) = (each for each in records if each["path"].endswith(".py"))
    assert (python["content"], python["license"]) == (source_text(2), "MIT")
    statistics = (out / "statistics.txt").read_text()
    assert "refused, contaminated: 1 files" in statistics
    assert "refused, duplicate: 1 files" in statistics


@pytest.mark.parametrize("missing", ["go.txt", "protected.txt", "held_out/python.txt"])
def test_no_list_may_be_missing(recipe: Path, missing: str) -> None:
    (recipe / missing).unlink()
    with pytest.raises(MidfillError, match=missing.partition("/")[0]):
        read_package_lists(recipe)


def test_the_default_models_recipe_is_understood() -> None:
    lists = read_package_lists(RECIPE)
    trained = {package for some in lists.trained.values() for package in some}
    assert len(trained) == 3834
    assert all(each.sha256 for each in (*trained, *lists.held_out, *lists.protected))
    assert TrainingRecipe.from_toml(RECIPE / "recipe.toml").steps == 1670


def test_files_to_measure_with_are_of_no_package_that_was_trained_on() -> None:
    lists = read_package_lists(RECIPE)
    assert not {package.name for package in lists.trained["python"]} & set(LIBRARIES)
