"""A run's folder is not used for another run."""

import dataclasses
from pathlib import Path

import pytest

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill.lab.training.recipe import TrainingRecipe
from midfill.lab.training.run_file import check_folder, claim_folder, describe_run
from midfill.models.checkpoints.checkpoint import Checkpoint


def test_the_same_run_may_continue(
    tmp_path: Path, tiny: Checkpoint, fim_format: FimFormat, recipe: TrainingRecipe
) -> None:
    run = describe_run(tiny, fim_format, recipe)
    check_folder(tmp_path / "new", run)
    claim_folder(tmp_path / "new", run)
    check_folder(tmp_path / "new", run)
    elsewhere = dataclasses.replace(recipe, precision="bf16", gradient_checkpointing=True)
    check_folder(tmp_path / "new", describe_run(tiny, fim_format, elsewhere))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 9}, "seed 0 there, 9 now"),
        ({"rank": 9}, "rank 4 there, 9 now"),
        ({"tokens": 100}, "tokens 4800 there, 100 now"),
        ({"fragments": False}, r"data.fragments True there, False now"),
    ],
)
def test_another_run_is_refused_with_what_differs(
    tmp_path: Path,
    tiny: Checkpoint,
    fim_format: FimFormat,
    recipe: TrainingRecipe,
    change: dict[str, object],
    message: str,
) -> None:
    claim_folder(tmp_path, describe_run(tiny, fim_format, recipe))
    data = {name: change.pop(name) for name in ("fragments",) if name in change}
    other = dataclasses.replace(
        recipe,
        data=dataclasses.replace(recipe.data, **data),
        **change,  # type: ignore[arg-type]
    )
    with pytest.raises(MidfillError, match=rf"holds another run \({message}\)"):
        check_folder(tmp_path, describe_run(tiny, fim_format, other))


def test_another_base_is_refused(
    tmp_path: Path, tiny: Checkpoint, fim_format: FimFormat, recipe: TrainingRecipe
) -> None:
    run = describe_run(tiny, fim_format, recipe)
    claim_folder(tmp_path, {**run, "base": "0" * 64})
    with pytest.raises(MidfillError, match="holds another run"):
        check_folder(tmp_path, run)


def test_a_folder_with_old_names_of_settings_may_be_continued(
    tmp_path: Path, tiny: Checkpoint, fim_format: FimFormat, recipe: TrainingRecipe
) -> None:
    run = describe_run(tiny, fim_format, recipe)
    before = run | {"tokens_a_step": run["tokens_per_step"]}
    del before["tokens_per_step"]
    claim_folder(tmp_path, before)
    check_folder(tmp_path, run)


def test_a_broken_record_is_named(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(MidfillError, match=r"run.json: can't be read"):
        check_folder(tmp_path, {})
