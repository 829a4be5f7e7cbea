"""Training checkpoints: complete, limited to the newest two, refused by other runs."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from midfill.errors import MidfillError
from midfill.infill.formats import FimFormat
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill_lab.training.recipe import TrainingRecipe
from midfill_lab.training.run_folder import (
    LossLog,
    StepReport,
    TrainingState,
    check_folder,
    claim_folder,
    describe_run,
    load_checkpoint,
    newest_checkpoint,
    open_loss_log,
    plot_loss,
    read_loss_log,
    save_checkpoint,
)


def trained(seed: int, width: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with a frozen part, and its optimizer after one step."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, width))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[1].parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_weights_optimizer_and_state_are_restored(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    state = TrainingState(step=7, rows=21, tokens=99, characters=300, seconds=1.5)
    saved = save_checkpoint(tmp_path, state, model, optimizer)
    assert saved == tmp_path / "step-000007"
    other, other_optimizer = trained(1)
    frozen = other[0].weight.clone()  # type: ignore[index]
    assert load_checkpoint(saved, other, other_optimizer) == state
    assert torch.equal(other[1].weight, model[1].weight)  # type: ignore[index]
    assert torch.equal(other[0].weight, frozen)  # type: ignore[index]
    for each, same in zip(
        optimizer.state_dict()["state"].values(),
        other_optimizer.state_dict()["state"].values(),
        strict=True,
    ):
        assert each.keys() == same.keys()
        assert all(torch.equal(each[name], same[name]) for name in each)


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    assert newest_checkpoint(tmp_path) is None
    for step in (5, 90, 100, 1000):
        save_checkpoint(tmp_path, TrainingState(step=step), model, optimizer)
        assert newest_checkpoint(tmp_path) == tmp_path / f"step-{step:06d}"
    assert sorted(os.listdir(tmp_path)) == ["step-000100", "step-001000"]


def test_what_a_kill_left_is_not_a_checkpoint_and_is_removed(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    save_checkpoint(tmp_path, TrainingState(step=1), model, optimizer)
    left = tmp_path / ".step-000002.writing"
    left.mkdir()
    (left / "tensors.pt").write_bytes(b"half")
    assert newest_checkpoint(tmp_path) == tmp_path / "step-000001"
    save_checkpoint(tmp_path, TrainingState(step=3), model, optimizer)
    assert sorted(os.listdir(tmp_path)) == ["step-000001", "step-000003"]


KILLED = """
    import sys
    from pathlib import Path
    import torch
    from midfill_lab.training.run_folder import TrainingState, save_checkpoint

    model = torch.nn.Linear(1500, 1500)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1500)).sum().backward()
    optimizer.step()
    step = 0
    while True:
        step += 1
        with torch.no_grad():
            model.weight.fill_(step)
        save_checkpoint(Path(sys.argv[1]), TrainingState(step=step), model, optimizer)
        print(step, flush=True)
"""


def test_a_kill_during_a_write_leaves_the_previous_checkpoint(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    while not list(tmp_path.glob(".step-*")):
        pass  # the kill must come while one is written
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    newest = newest_checkpoint(tmp_path)
    assert newest is not None
    model = torch.nn.Linear(1500, 1500)
    state = load_checkpoint(newest, model, torch.optim.AdamW(model.parameters()))
    assert (model.weight == state.step).all()


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, TrainingState(step=1), *trained(0))
    with pytest.raises(MidfillError, match="is from a run that trains other weights"):
        load_checkpoint(saved, *trained(0, width=5))
    model, optimizer = trained(0)
    model.requires_grad_(True)
    with pytest.raises(MidfillError, match="is from a run that trains other weights"):
        load_checkpoint(saved, model, optimizer)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tensors.pt", b""),
        ("tensors.pt", b"no tensors"),
        ("tensors.pt", None),
        ("state.json", b"{"),
        ("state.json", None),
        ("state.json", json.dumps({"steps": 3}).encode()),
    ],
)
def test_a_broken_checkpoint_is_named_in_one_line(
    tmp_path: Path, file: str, content: bytes | None
) -> None:
    saved = save_checkpoint(tmp_path, TrainingState(step=1), *trained(0))
    if content is None:
        (saved / file).unlink()
    else:
        (saved / file).write_bytes(content)
    with pytest.raises(MidfillError) as caught:
        load_checkpoint(saved, *trained(0))
    assert str(caught.value).startswith(f"{saved}: ")


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    saved = save_checkpoint(tmp_path, TrainingState(step=1), *trained(0))
    whole = (saved / "tensors.pt").read_bytes()
    (saved / "tensors.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(MidfillError):
        load_checkpoint(saved, *trained(0))


def report(step: int, loss: float = 2.0) -> StepReport:
    return StepReport(TrainingState(step=step, tokens=step * 100), loss, 1e-3, 100, 0.5)


def write(path: Path, first: int, last: int, loss: float = 2.0) -> None:
    with open_loss_log(path, first - 1) as log:
        for step in range(first, last + 1):
            log.write(report(step, loss))


def test_each_step_is_a_line(tmp_path: Path) -> None:
    path = tmp_path / "run" / "loss.jsonl"
    write(path, 1, 2)
    assert read_loss_log(path) == [
        {
            "step": step,
            "tokens": step * 100,
            "loss": 2.0,
            "learning_rate": 1e-3,
            "tokens_per_second": 200.0,
        }
        for step in (1, 2)
    ]


def test_lines_of_lost_steps_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    write(path, 1, 9, loss=2.0)
    write(path, 6, 8, loss=1.0)
    assert [(line["step"], line["loss"]) for line in read_loss_log(path)] == [
        *((step, 2.0) for step in range(1, 6)),
        *((step, 1.0) for step in range(6, 9)),
    ]


def test_a_line_that_a_kill_cut_off_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "loss.jsonl"
    write(path, 1, 3)
    path.write_text(path.read_text()[:-20])
    assert [line["step"] for line in read_loss_log(path)] == [1, 2]
    write(path, 3, 3)
    assert [line["step"] for line in read_loss_log(path)] == [1, 2, 3]


def test_a_full_disk_is_reported_in_one_line() -> None:
    with (
        pytest.raises(MidfillError, match="/dev/full: can't be written: No space left"),
        Path("/dev/full").open("wb", buffering=0) as full,
    ):
        LossLog(full).write(report(1))


@pytest.mark.parametrize("steps", [1, 7, 100])
def test_the_loss_is_plotted(tmp_path: Path, steps: int) -> None:
    write(tmp_path / "loss.jsonl", 1, steps)
    plot_loss(tmp_path / "loss.jsonl", tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


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
