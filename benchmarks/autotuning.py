"""Autotuning: what the first start chose for a model on this chip, beside each alternative.

Steps with every setting run in turn, so that a machine that becomes slower does so for all.
"""

from collections.abc import Callable
from statistics import median
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.errors import MidfillError
from midfill.kernels.cpu.clock import DOWN, GATE_UP, HEAD, OUTPUT, QKV, ticks_per_second
from midfill.kernels.cpu.panel_products import MAX_QUANTIZED_ROWS
from midfill.kernels.cpu.tiles import MATRICES, PREFETCH, Prefetch, even_tile_rows
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.autotune import MEASURED_ROWS, TileTable
from midfill.runners.cpu.runner import CpuRunner
from midfill.system.machine import Machine, describe_machine
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

CHOSEN = "chosen"
_PHASES = [QKV, OUTPUT, GATE_UP, DOWN, HEAD]
_SLOTS = 64


class SettingTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a step's products under one setting.

    Attributes:
        setting: "tiles of 2 rows", "prefetch L1", or ``CHOSEN``.
        rows: of the step: one through all layers, or several through two layers and the head.
        seconds: of each of ``tiles.MATRICES``, in each round.
    """

    setting: str
    rows: int
    seconds: list[list[float]]

    def median_ms(self) -> list[float]:
        """Return the median of each matrix, in milliseconds."""
        return [1000 * median(column) for column in zip(*self.seconds, strict=True)]


class AutotuningReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        prefetches: what was chosen for each of ``tiles.MATRICES``.
        rounds: in each of which all settings take their turn.
    """

    model: str
    machine: Machine
    threads: int
    prefetches: list[str]
    rounds: int
    settings: list[SettingTimes]


def measure_autotuning(
    model: str,
    *,
    rounds: int = 40,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> AutotuningReport:
    """Time steps as they were tuned, and with each alternative for all matrices.

    Args:
        model: its name or path.
        rounds: how often each setting is timed.
        threads: of the kernels; None takes all.
        progress: receives what is being done.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels, or the chip's
            counter can't be read.
    """
    frequency = ticks_per_second()
    if not frequency > 0:
        raise MidfillError("this chip's counter can't be read, so nothing was tuned")
    progress(f"loading {model}")
    runner = CpuRunner.load(open_checkpoint(resolve(model)), slots=_SLOTS, threads=threads)
    chosen = runner.tile_rows
    alternatives = {1: _prefetches(chosen), MEASURED_ROWS: _heights(chosen)}
    settings = []
    for rows, tables in alternatives.items():
        seconds: dict[str, list[list[float]]] = {name: [] for name in tables}
        for number in range(rounds + 1):  # the first one only warms up
            progress(f"{rows} rows: round {number} of {rounds}")
            for name, table in tables.items():
                ticks = runner.time_tiles(table, rows)[_PHASES]
                if number:
                    seconds[name].append((ticks / runner.threads / frequency).tolist())
        settings += [
            SettingTimes(setting=name, rows=rows, seconds=found) for name, found in seconds.items()
        ]
    runner.close()
    return AutotuningReport(
        model=model,
        machine=describe_machine(),
        threads=runner.threads,
        prefetches=[Prefetch(int(number)).name for number in chosen[:, PREFETCH]],
        rounds=rounds,
        settings=settings,
    )


def _prefetches(chosen: TileTable) -> dict[str, TileTable]:
    """Return the tables that prefetch in one way everywhere, and the chosen one."""
    tables = {}
    for prefetch in Prefetch:
        table = chosen.copy()
        table[:, PREFETCH] = prefetch
        tables[f"prefetch {prefetch.name}"] = table
    return {**tables, CHOSEN: chosen}


def _heights(chosen: TileTable) -> dict[str, TileTable]:
    """Return the tables with tiles of one height everywhere, and the chosen one."""
    tables = {}
    for height in range(1, MAX_QUANTIZED_ROWS + 1):
        table = np.stack([even_tile_rows(height)] * len(MATRICES))
        table[:, PREFETCH] = chosen[:, PREFETCH]
        tables[f"tiles of {height} row{'s' if height > 1 else ''}"] = table
    return {**tables, CHOSEN: chosen}


def autotuning_table(report: AutotuningReport) -> ResultTable:
    """A row per setting, a column per matrix."""
    rows = []
    for each in report.settings:
        found = each.median_ms()
        cells = {name: f"{ms:.3f}" for name, ms in zip(MATRICES, found, strict=True)}
        whole = f"{1000 * median(map(sum, each.seconds)):.3f}"
        rows.append({"rows": str(each.rows), "setting": each.setting, **cells, "all": whole})
    prefetches = ", ".join(
        f"{matrix} {prefetch}" for matrix, prefetch in zip(MATRICES, report.prefetches, strict=True)
    )
    return ResultTable(
        title="Autotuning",
        rows=rows,
        labels=2,
        caption=f"{report.model}: milliseconds of a step's products, {report.threads} threads;"
        f" medians of {report.rounds} rounds in turn. One row runs through the whole model,"
        f" {MEASURED_ROWS} through two layers and the head. Prefetches that were chosen:"
        f" {prefetches}. {report.machine}.",
    )


def autotuning(
    model: ModelArgument = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each setting is timed.")] = 40,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Time how a model's products were tuned on this chip, beside each alternative, in turn."""
    with show_steps("loading") as progress:
        report = measure_autotuning(
            model or DEFAULT_MODEL, rounds=rounds, threads=threads, progress=progress
        )
    publish(report, autotuning_table(report), section="autotuning", json=json, docs=docs)
