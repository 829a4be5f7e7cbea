"""The trainer: losses fall, and an interrupted run ends like an uninterrupted one."""

import dataclasses
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState

from midfill.errors import MidfillError
from midfill_lab.training.export import write_adapter
from midfill_lab.training.recipe import TrainingRecipe
from midfill_lab.training.run_folder import StepReport, newest_checkpoint, read_loss_log
from midfill_lab.training.trainer import resolve_precision
from midfill_lab.training.training_run import TrainingRun

Start = Callable[..., TrainingRun]


class KilledError(Exception):
    """Raised in place of a kill in the middle of a run."""


def weights(run: TrainingRun) -> dict[str, torch.Tensor]:
    named = run.trainer.model.named_parameters()
    return {name: each.detach().clone() for name, each in named if each.requires_grad}


def reports(
    run: TrainingRun, stop: Callable[[int], object] = lambda step: None
) -> list[StepReport]:
    """Train and return the reports; ``stop`` is called after each step."""
    seen: list[StepReport] = []

    def on_step(report: StepReport) -> None:
        seen.append(report)
        stop(report.state.step)

    run.trainer.run(on_step)
    return seen


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(
        torch.equal(each, second[name]) for name, each in first.items()
    )


def without_times(run: TrainingRun) -> list[dict[str, object]]:
    lines = read_loss_log(run.trainer.folder / "loss.jsonl")
    return [{name: line[name] for name in line if name != "tokens_per_second"} for line in lines]


@pytest.fixture
def uninterrupted(start: Start, recipe: TrainingRecipe, tmp_path: Path) -> TrainingRun:
    run = start(tmp_path / "uninterrupted", recipe)
    reports(run)
    return run


def test_losses_fall_and_every_step_is_reported(
    start: Start, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(recipe, tokens=24 * 400, learning_rate=3e-2)
    run = start(tmp_path, recipe)
    seen = reports(run)
    assert [each.state.step for each in seen] == list(range(1, 25))
    losses = [each.loss for each in seen]
    assert sum(losses[-5:]) / 5 < 0.75 * losses[0]
    assert [each.learning_rate for each in seen] == [
        recipe.learning_rate_at(step) for step in range(24)
    ]
    assert all(360 <= each.tokens <= 600 for each in seen)
    assert seen[-1].state.tokens == sum(each.tokens for each in seen)


def test_bfloat16_losses_are_close_to_float32(
    start: Start, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(recipe, tokens=4 * 400)
    precise = reports(start(tmp_path / "fp32", recipe))
    AcceleratorState._reset_state(reset_partial_state=True)
    run = start(tmp_path / "bf16", dataclasses.replace(recipe, precision="bf16"))
    frozen = {each.dtype for each in run.trainer.model.parameters() if not each.requires_grad}
    assert frozen == {torch.bfloat16}
    for ours, theirs in zip(reports(run), precise, strict=True):
        assert ours.loss == pytest.approx(theirs.loss, rel=0.03)
    assert all(each.dtype == torch.float32 for each in weights(run).values())


def test_full_training_changes_every_weight(
    start: Start, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    run = start(tmp_path, dataclasses.replace(recipe, method="full", learning_rate=1e-3))
    before = weights(run)
    seen = reports(run)
    assert seen[-1].loss < seen[0].loss
    assert not any(torch.equal(each, before[name]) for name, each in weights(run).items())


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_stopped_by_a_signal_continues_as_if_uninterrupted(
    start: Start,
    recipe: TrainingRecipe,
    uninterrupted: TrainingRun,
    tmp_path: Path,
    signal_number: signal.Signals,
) -> None:
    folder = tmp_path / "stopped"
    before = signal.getsignal(signal_number)
    seen = reports(
        start(folder, recipe), lambda step: step == 5 and os.kill(os.getpid(), signal_number)
    )
    assert [each.state.step for each in seen] == [1, 2, 3, 4, 5]
    assert signal.getsignal(signal_number) == before
    run = start(folder, recipe)
    seen = reports(run)
    assert [each.state.step for each in seen] == list(range(6, 13))
    assert same(weights(run), weights(uninterrupted))
    assert without_times(run) == without_times(uninterrupted)
    assert run.trainer.stream.manifest == uninterrupted.trainer.stream.manifest


def test_a_kill_costs_the_steps_since_the_last_checkpoint(
    start: Start, recipe: TrainingRecipe, uninterrupted: TrainingRun, tmp_path: Path
) -> None:
    folder = tmp_path / "killed"

    def kill(step: int) -> None:
        if step == 9:
            raise KilledError
        run.trainer.checkpoint_seconds = 0.0 if step < 4 else 1e9

    run = start(folder, recipe)
    with pytest.raises(KilledError):
        reports(run, kill)
    newest = newest_checkpoint(folder / "checkpoints")
    assert newest is not None
    assert newest.name == "step-000003"
    assert len(read_loss_log(folder / "loss.jsonl")) == 9
    run = start(folder, recipe)
    assert [each.state.step for each in reports(run)] == list(range(4, 13))
    assert same(weights(run), weights(uninterrupted))
    assert without_times(run) == without_times(uninterrupted)


def test_a_finished_run_is_only_loaded(
    start: Start, recipe: TrainingRecipe, uninterrupted: TrainingRun
) -> None:
    folder = uninterrupted.trainer.folder
    times = {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")}
    run = start(folder, recipe)
    assert reports(run) == []
    assert same(weights(run), weights(uninterrupted))
    assert run.trainer.stream.manifest == uninterrupted.trainer.stream.manifest
    assert {path: path.stat().st_mtime_ns for path in (folder / "checkpoints").rglob("*")} == times


def test_a_run_may_start_from_another_runs_weights(
    start: Start, recipe: TrainingRecipe, uninterrupted: TrainingRun, tmp_path: Path
) -> None:
    from_scratch = read_loss_log(uninterrupted.trainer.folder / "loss.jsonl")
    other = dataclasses.replace(recipe, learning_rate=1e-9)
    checkpoint = newest_checkpoint(uninterrupted.trainer.folder / "checkpoints")
    seen = reports(start(tmp_path / "next", other, start_from=checkpoint))
    assert [each.state.step for each in seen] == list(range(1, 13))
    assert seen[0].state.tokens == from_scratch[0]["tokens"]
    assert seen[0].loss < from_scratch[0]["loss"]


def test_a_run_may_start_from_an_adapters_weights(
    start: Start, recipe: TrainingRecipe, uninterrupted: TrainingRun, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", uninterrupted.trainer.model, {}, "")
    other = dataclasses.replace(recipe, learning_rate=1e-9)
    first = read_loss_log(uninterrupted.trainer.folder / "loss.jsonl")[0]
    seen = reports(start(tmp_path / "next", other, start_from=tmp_path / "adapter"))
    assert seen[0].state.tokens == first["tokens"]
    assert seen[0].loss < first["loss"]


def test_an_adapter_of_another_rank_is_refused(
    start: Start, recipe: TrainingRecipe, uninterrupted: TrainingRun, tmp_path: Path
) -> None:
    write_adapter(tmp_path / "adapter", uninterrupted.trainer.model, {}, "")
    other = dataclasses.replace(recipe, rank=recipe.rank + 1)
    run = start(tmp_path / "next", other, start_from=tmp_path / "adapter")
    with pytest.raises(MidfillError, match="updates other weights than the recipe's; use its rank"):
        reports(run)


def test_any_number_of_threads_agrees_to_rounding(
    start: Start, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    torch.set_num_threads(2)
    recipe = dataclasses.replace(recipe, tokens=4 * 400)
    runs = [start(tmp_path / name, recipe) for name in ("two", "one")]
    reports(runs[0])
    torch.set_num_threads(1)
    reports(runs[1])
    for name, each in weights(runs[0]).items():
        torch.testing.assert_close(each, weights(runs[1])[name], atol=1e-3, rtol=1e-2)


def test_a_run_outside_the_main_thread_leaves_signals_alone(
    start: Start, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    run = start(tmp_path, recipe)
    worker = threading.Thread(target=reports, args=(run,))
    before = signal.getsignal(signal.SIGINT)
    worker.start()
    assert signal.getsignal(signal.SIGINT) == before
    worker.join()
    assert newest_checkpoint(tmp_path / "checkpoints") is not None


def test_unusable_documents_leave_no_folder(
    start: Start, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    (tmp_path / "short.py").write_text("x = 1\n")
    run = start(tmp_path / "out", recipe, sources=(tmp_path / "short.py",))
    with pytest.raises(MidfillError, match=r"none of the 1 documents can be trained on"):
        run.trainer.run(print)
    assert not (tmp_path / "out").exists()


def test_a_loss_that_is_not_finite_ends_the_run_without_a_checkpoint(
    start: Start, recipe: TrainingRecipe, tmp_path: Path
) -> None:
    run = start(tmp_path, recipe)

    def spoil(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                next(iter(run.trainer.model.parameters())).fill_(float("nan"))

    run.trainer.checkpoint_seconds = 0.0
    with pytest.raises(MidfillError, match=r"the loss of step 4 is nan; start again with a lower"):
        reports(run, spoil)
    newest = newest_checkpoint(tmp_path / "checkpoints")
    assert newest is not None
    assert newest.name == "step-000003"


def test_another_recipes_folder_is_refused_before_anything_is_loaded(
    start: Start, recipe: TrainingRecipe, uninterrupted: TrainingRun
) -> None:
    with pytest.raises(MidfillError, match=r"holds another run \(rank 4 there, 5 now\)"):
        start(uninterrupted.trainer.folder, dataclasses.replace(recipe, rank=5))


def test_auto_precision_is_resolved() -> None:
    assert resolve_precision("fp32") == "fp32"
    assert resolve_precision("bf16") == "bf16"
    assert resolve_precision("auto") in ("fp32", "bf16")
