"""Trainer: trains from the newest checkpoint until the recipe's tokens are used up."""

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
from midfill_lab.training.examples import PackedRow
from midfill_lab.training.lora import MergedLora, QuantizationAwareLora
from midfill_lab.training.loss import BaseTeacher, InfillingLoss
from midfill_lab.training.micro_batches import MicroBatches, compile_layers
from midfill_lab.training.parallel_stream import ParallelStream
from midfill_lab.training.recipe import STEP_FILL, Precision, TrainingRecipe
from midfill_lab.training.run_folder import (
    ADAPTER_WEIGHTS,
    StepReport,
    TrainingState,
    claim_folder,
    load_adapter,
    load_checkpoint,
    newest_checkpoint,
    open_loss_log,
    save_checkpoint,
)
from midfill_lab.training.stream import TrainingStream

LOSS_LOG = "loss.jsonl"
CHECKPOINTS = "checkpoints"


@dataclass
class Trainer:
    """Trains one model; owns its optimizer and its folder.

    Args:
        model: made by ``lora.make_trainable``; parameters that require a gradient are trained.
        recipe: the run's settings.
        stream: the rows to train on.
        folder: gets the checkpoints and the loss log.
        description: see ``run_folder.describe_run``.
        checkpoint_seconds: time between two checkpoints.
        qat: the LoRA layers over quantised matrices; None trains without requantisation.
        teacher: the base, for distillation; None trains without.
        start_from: an adapter whose weights, or a checkpoint of another run whose weights and
            optimizer state this one starts with, unless it has a checkpoint of its own.
    """

    model: Any
    recipe: TrainingRecipe
    stream: TrainingStream | ParallelStream
    folder: Path
    description: Mapping[str, Any]
    checkpoint_seconds: float = 300.0
    qat: QuantizationAwareLora | None = None
    teacher: BaseTeacher | None = None
    start_from: Path | None = None

    def run(self, on_step: Callable[[StepReport], None]) -> TrainingState:
        """Train to the end of the recipe, or until SIGTERM or SIGINT, which finish a step first.

        Nothing is written before the first documents have proved usable.

        Raises:
            MidfillError: no usable documents, a loss that is not finite, or a checkpoint that
                can't be read or written.
        """
        from accelerate import Accelerator

        precision = resolve_precision(self.recipe.precision)
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
        state = self._load_state(optimizer)
        lora = MergedLora(self.model) if self.recipe.method == "lora" else None
        gpu = accelerator.device.type != "cpu"
        micro_batches = MicroBatches(self.recipe) if gpu else None
        if gpu:
            compile_layers(self.model)
        loss_module, optimizer = accelerator.prepare(
            InfillingLoss(
                self.model,
                self.stream.maker.end_token_id,
                self.teacher,
                self.recipe.distillation,
                None if micro_batches is None else self.recipe.row_tokens,
            ),
            optimizer,
        )
        batches = self._batches(state)
        claim_folder(self.folder, self.description)
        checkpoints = self.folder / CHECKPOINTS
        saved_at, saved, resumed = time.monotonic(), state, state
        with (
            _stop_signals() as stop,
            open_loss_log(self.folder / LOSS_LOG, state.step) as log,
            _row_workers(accelerator.device) as workers,
        ):
            while state.step < self.recipe.steps and not stop.is_set():
                batch = next(batches)
                parts = batch if micro_batches is None else micro_batches.join(batch)
                self._requantise(state.step, first=state == resumed)
                if lora is not None:
                    lora.merge()
                backward = _Backward(accelerator, loss_module, workers)
                report = self._step(backward, optimizer, batch, parts, state)
                state = report.state
                log.write(report)
                on_step(report)
                if time.monotonic() - saved_at > self.checkpoint_seconds:
                    save_checkpoint(checkpoints, state, self.model, optimizer.optimizer)
                    saved_at, saved = time.monotonic(), state
            if state != saved:
                save_checkpoint(checkpoints, state, self.model, optimizer.optimizer)
        return state

    def _load_state(self, optimizer: torch.optim.Optimizer) -> TrainingState:
        """Load the run's newest checkpoint, or the weights it starts from, if any."""
        newest = newest_checkpoint(self.folder / CHECKPOINTS)
        if newest is not None:
            return load_checkpoint(newest, self.model, optimizer)
        if self.start_from is not None and (self.start_from / ADAPTER_WEIGHTS).is_file():
            load_adapter(self.start_from, self.model)
        elif self.start_from is not None:
            # Weights and optimizer state are taken over; steps, rows and learning rate are not.
            load_checkpoint(self.start_from, self.model, optimizer)
        return TrainingState()

    def _requantise(self, step: int, *, first: bool) -> None:
        """Requantise the frozen weights every few steps, and at the first step after a start."""
        if self.qat is None or step < self.recipe.qat_start * self.recipe.steps:
            return
        if first or step % self.recipe.qat_interval == 0:
            self.qat.requantise()

    def _batches(self, state: TrainingState) -> Iterator[list[PackedRow]]:
        """Return the rows of each coming step; those of the first step are made at once."""
        rows = self.stream.rows(skip=state.rows)
        enough = self.recipe.tokens_per_step * STEP_FILL

        def batches() -> Iterator[list[PackedRow]]:
            while True:
                batch: list[PackedRow] = []
                while sum(len(row.ids) for row in batch) < enough:
                    batch.append(next(rows))
                yield batch

        endless = batches()
        first = islice(endless, 1 if state.step < self.recipe.steps else 0)
        return chain(list(first), endless)

    def _step(
        self,
        backward: "_Backward",
        optimizer: Any,
        batch: list[PackedRow],
        parts: list[PackedRow],
        state: TrainingState,
    ) -> StepReport:
        """Accumulate the gradients of a batch, in parts, and make one optimizer step."""
        started = time.perf_counter()
        loss = backward.run(parts)
        if not math.isfinite(loss):
            raise MidfillError(
                f"the loss of step {state.step + 1} is {loss}; start again with a lower "
                "learning_rate, the last checkpoint is unchanged"
            )
        rate = self.recipe.learning_rate_at(state.step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        backward.clip_gradients(self.recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        seconds = time.perf_counter() - started
        tokens = sum(len(row.ids) for row in batch)
        after = replace(
            state,
            step=state.step + 1,
            rows=state.rows + len(batch),
            tokens=state.tokens + tokens,
            characters=state.characters + sum(row.characters for row in batch),
            seconds=state.seconds + seconds,
        )
        return StepReport(after, loss, rate, tokens, seconds)


@dataclass(frozen=True)
class _Backward:
    """Computes gradients of parts of a batch.

    Args:
        accelerator: decides the precision.
        loss_module: the loss of a part, prepared by the accelerator.
        workers: process the parts.
    """

    accelerator: Any
    loss_module: Any
    workers: ThreadPoolExecutor

    def run(self, parts: list[PackedRow]) -> float:
        """Accumulate the gradients of the mean loss per weighted token; return it, in nats."""
        total = float(sum(part.weights.sum() for part in parts))

        def backward(part: PackedRow) -> torch.Tensor:
            loss: torch.Tensor = self.loss_module(part) / total
            self.accelerator.backward(loss)
            return loss.detach()

        return sum(map(float, list(self.workers.map(backward, parts))))

    def clip_gradients(self, norm: float) -> None:
        """Scale the gradients down to a norm, if theirs is larger."""
        self.accelerator.clip_grad_norm_(self.loss_module.parameters(), norm)


def resolve_precision(precision: Precision) -> Precision:
    """Resolve "auto" for this machine: bfloat16 where it is multiplied natively."""
    if precision != "auto":
        return precision
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported() else "fp32"
    return "bf16" if torch.cpu._is_avx512_bf16_supported() else "fp32"


@contextmanager
def _row_workers(device: torch.device) -> Iterator[ThreadPoolExecutor]:
    """Provide the threads that process the rows of a step.

    On a CPU every core processes rows of its own. Cores that share each matrix product would wait
    for each other hundreds of times per step, and all of them for one that is busy elsewhere.
    Gradients are summed in the order in which rows finish, so runs agree to rounding only.
    """
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    torch.set_autocast_cache_enabled(False)  # threads share it, and the first to finish clears it
    try:
        with ThreadPoolExecutor(threads, initializer=_use_one_core) as workers:
            yield workers
    finally:
        torch.set_autocast_cache_enabled(True)


def _use_one_core() -> None:
    torch.set_num_threads(1)


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """Provide an event that SIGTERM and SIGINT set instead of ending the process.

    Outside the main thread, signals are left alone and nothing sets it.
    """
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
