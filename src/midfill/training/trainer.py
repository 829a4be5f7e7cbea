"""Trainer: goes on training from the newest checkpoint until the recipe's tokens are used up."""

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch

from midfill.errors import MidfillError
from midfill.training.checkpoints import (
    Progress,
    load_checkpoint,
    newest_checkpoint,
    save_checkpoint,
)
from midfill.training.grid import BaseGrid
from midfill.training.loss_log import StepReport, open_loss_log
from midfill.training.objective import InfillingLoss
from midfill.training.packing import PackedRow
from midfill.training.recipe import Precision, TrainingRecipe
from midfill.training.run_file import claim_folder
from midfill.training.stream import TrainingStream

LOSS_LOG = "loss.jsonl"
CHECKPOINTS = "checkpoints"
_FULL = 0.9  # of a step's tokens; whole rows seldom add up to all of them


@dataclass
class Trainer:
    """Trains one model; owns its optimizer and its folder.

    Args:
        model: what ``lora.trainable`` made: parameters that require a gradient are trained.
        recipe: the run.
        stream: where rows come from.
        folder: gets checkpoints and the loss of every step.
        description: see ``run_file.describe_run``.
        checkpoint_seconds: between two checkpoints.
        grid: what the base is stored on, where that is quantised.
        start_from: a checkpoint of another run whose weights and optimizer this one starts with,
            where it has no checkpoint of its own.
    """

    model: Any
    recipe: TrainingRecipe
    stream: TrainingStream
    folder: Path
    description: Mapping[str, Any]
    checkpoint_seconds: float = 300.0
    grid: BaseGrid | None = None
    start_from: Path | None = None

    def run(self, on_step: Callable[[StepReport], None]) -> Progress:
        """Train to the end of the recipe, or until SIGTERM or SIGINT, which end a step first.

        Nothing is written before the first documents have proven to be usable.

        Raises:
            MidfillError: no usable documents, a loss that is not finite, or a checkpoint that
                can't be read or written.
        """
        from accelerate import Accelerator

        precision = precision_of(self.recipe.precision)
        accelerator = Accelerator(
            mixed_precision="bf16" if precision == "bf16" else "no",
            cpu=not torch.cuda.is_available(),
        )
        optimizer = torch.optim.AdamW(
            [each for each in self.model.parameters() if each.requires_grad],
            lr=self.recipe.learning_rate,
            betas=(0.9, 0.98),
            weight_decay=self.recipe.weight_decay,
        )
        folder = self.folder / CHECKPOINTS
        own = newest_checkpoint(folder)
        progress = Progress()
        if own is not None:
            progress = load_checkpoint(own, self.model, optimizer)
        elif self.start_from is not None:
            # Weights and optimizer go on; steps, rows and learning rate are this run's own.
            load_checkpoint(self.start_from, self.model, optimizer)
        objective, optimizer = accelerator.prepare(
            InfillingLoss(self.model, self.stream.maker.end_token_id), optimizer
        )
        batches = self._batches(progress)
        claim_folder(self.folder, self.description)
        saved_at, saved, reached = time.monotonic(), progress, progress
        with (
            _asked_to_stop() as stop,
            open_loss_log(self.folder / LOSS_LOG, progress.step) as log,
            _row_workers(accelerator.device) as workers,
        ):
            while progress.step < self.recipe.steps and not stop.is_set():
                batch = next(batches)
                self._settle(progress.step, resumed=progress == reached)
                report = self._step(accelerator, objective, optimizer, batch, workers, progress)
                progress = report.progress
                log.write(report)
                on_step(report)
                if time.monotonic() - saved_at > self.checkpoint_seconds:
                    save_checkpoint(folder, progress, self.model, optimizer.optimizer)
                    saved_at, saved = time.monotonic(), progress
            if progress != saved:
                save_checkpoint(folder, progress, self.model, optimizer.optimizer)
        return progress

    def _settle(self, step: int, *, resumed: bool) -> None:
        """Carry the grid's rounding over into the frozen weights, every few steps."""
        if self.grid is None or step < self.recipe.grid_from * self.recipe.steps:
            return
        if resumed or step % self.recipe.grid_steps == 0:
            self.grid.settle()

    def _batches(self, progress: Progress) -> Iterator[list[PackedRow]]:
        """The rows of each step to come; the first step's are made now."""
        rows = self.stream.rows(skip=progress.rows)

        def batches() -> Iterator[list[PackedRow]]:
            while True:
                batch: list[PackedRow] = []
                while sum(len(row.ids) for row in batch) < self.recipe.tokens_a_step * _FULL:
                    batch.append(next(rows))
                yield batch

        endless = batches()
        first = islice(endless, 1 if progress.step < self.recipe.steps else 0)
        return chain(list(first), endless)

    def _step(
        self,
        accelerator: Any,
        objective: Any,
        optimizer: Any,
        batch: list[PackedRow],
        workers: ThreadPoolExecutor,
        progress: Progress,
    ) -> StepReport:
        """Gradients of a step's rows, then one change of the weights."""
        started = time.perf_counter()
        total = float(sum(row.weights.sum() for row in batch))

        def learn(row: PackedRow) -> float:
            part = objective(row) / total
            accelerator.backward(part)
            return float(part.detach())

        loss = sum(workers.map(learn, batch))
        if not math.isfinite(loss):
            raise MidfillError(
                f"the loss of step {progress.step + 1} is {loss}; start again with a lower "
                "learning_rate, the last checkpoint stays as it is"
            )
        rate = self.recipe.rate_at(progress.step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        accelerator.clip_grad_norm_(objective.parameters(), self.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - started
        tokens = sum(len(row.ids) for row in batch)
        after = replace(
            progress,
            step=progress.step + 1,
            rows=progress.rows + len(batch),
            tokens=progress.tokens + tokens,
            characters=progress.characters + sum(row.characters for row in batch),
            seconds=progress.seconds + seconds,
        )
        return StepReport(after, loss, rate, tokens, seconds)


def precision_of(wanted: Precision) -> Precision:
    """What "auto" means on this machine: bfloat16 where it is multiplied natively."""
    if wanted != "auto":
        return wanted
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"


@contextmanager
def _row_workers(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Threads that take the rows of a step in turn.

    On a CPU every core gets rows of its own: cores that share each matrix product wait for one
    another hundreds of times a step, and all of them for the one that has something else to do.
    Gradients are summed in the order in which rows are done, so runs agree to rounding only.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    torch.set_autocast_cache_enabled(False)  # it is shared, and cleared by whoever is done first
    try:
        with ThreadPoolExecutor(threads, initializer=_use_one_core) as workers:
            yield workers
    finally:
        torch.set_autocast_cache_enabled(True)


def _use_one_core() -> None:
    torch.set_num_threads(1)


@contextmanager
def _asked_to_stop() -> Iterator[threading.Event]:
    """An event that SIGTERM and SIGINT set instead of ending the process."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {
        number: signal.signal(number, lambda *_: stop.set())
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
