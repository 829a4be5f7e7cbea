"""Cores: how fast the engine is on some of them, and beside somebody who keeps one busy.

An editor, a compiler and midfill share a laptop's cores. The kernels' threads meet at barriers some
hundred times per step, so where one of them waits for its core, all do. Each setting has an engine
of its own in this process, and all take turns, so that a machine that becomes slower does so for
all.
"""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Annotated

import msgspec
import typer

from benchmarks.report import publish
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.system.machine import Machine, available_threads, describe_machine
from midfill_lab.bench.engine_loads import Load, LoadedEngine, open_engine
from midfill_lab.bench.neighbours import busy_processes
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_PROMPT = 512
_DECODED = 48  # steps per measurement
LOADS = (
    Load(name="prefill of 512", context=16, rows=_PROMPT, repeats=1),
    Load(name="decode, 1 stream", context=16, repeats=_DECODED),
    Load(name="decode, 16 streams", streams=16, context=16, repeats=_DECODED // 2),
)


@dataclass(frozen=True)
class Setting:
    """How an engine runs, and what runs beside it.

    Attributes:
        threads: of the kernels.
        pinned: whether each of them stays on a core of its own.
        busy: processes beside it that never wait.
    """

    threads: int
    pinned: bool = False
    busy: int = 0

    def __str__(self) -> str:
        threads = f"{self.threads} thread" + ("s" if self.threads > 1 else "")
        return threads + (", pinned" if self.pinned else "")

    def fair_share(self, cores: int) -> float:
        """Return the share of the cores it can use that a fair system leaves it."""
        wanted = min(self.threads, cores)
        given = min(1.0, cores / (self.threads + self.busy)) * self.threads
        return min(given / wanted, 1.0)


def settings_for(cores: int) -> list[Setting]:
    """Return what is measured on so many cores."""
    alone = [Setting(threads) for threads in _powers(cores)]
    crowded = [Setting(threads, busy=1) for threads in _powers(cores)]
    can_pin = cores > 1 and hasattr(os, "sched_setaffinity")
    pins = [Setting(cores, pinned=True, busy=busy) for busy in (0, 1) if can_pin]
    return [*alone, *pins[:1], Setting(2 * cores), *crowded, *pins[1:]]


def _powers(cores: int) -> list[int]:
    """Return the powers of two below ``cores``, and ``cores``."""
    return [*(1 << bit for bit in range(cores.bit_length()) if 1 << bit < cores), cores]


class SettingRates(msgspec.Struct, frozen=True, kw_only=True):
    """What one setting reached.

    Attributes:
        name: of the setting.
        busy: processes beside it.
        fair_share: of what it has alone, in a system that is fair to threads.
        rates: tokens/s of each of ``LOADS``, in each round.
    """

    name: str
    busy: int
    fair_share: float
    rates: list[list[float]]


class CoresReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        rounds: in each of which all settings take their turn.
    """

    model: str
    machine: Machine
    rounds: int
    settings: list[SettingRates]


def measure_cores(
    model: str, *, rounds: int = 7, progress: Callable[[str], None] = lambda _: None
) -> CoresReport:
    """Measure prefill and decode under each setting.

    Args:
        model: its name or path.
        rounds: how often each setting is measured.
        progress: receives what is being done.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    cores = available_threads()
    settings = settings_for(cores)
    rates: dict[Setting, list[list[float]]] = {setting: [] for setting in settings}
    with ExitStack() as stack:
        engines: dict[int, tuple[LoadedEngine, list[int]]] = {}
        for threads in sorted({setting.threads for setting in settings}):
            before = _kernel_threads()
            opened = stack.enter_context(open_engine(model, threads, progress))
            own = sorted(_kernel_threads() - before)
            engines[threads] = opened, [threading.get_native_id(), *own]
        for number in range(1, rounds + 1):
            for setting in settings:
                progress(f"round {number} of {rounds}: {setting}, {setting.busy} beside")
                engine, own = engines[setting.threads]
                with pinned(own if setting.pinned else []), busy_processes(setting.busy):
                    rates[setting].append([_rate(engine, load) for load in LOADS])
    return CoresReport(
        model=model,
        machine=describe_machine(),
        rounds=rounds,
        settings=[
            SettingRates(
                name=str(setting),
                busy=setting.busy,
                fair_share=setting.fair_share(cores),
                rates=found,
            )
            for setting, found in rates.items()
        ],
    )


def _rate(engine: LoadedEngine, load: Load) -> float:
    """Return the tokens/s of a load."""
    with engine.bench.running(load) as spend:
        return load.streams * load.rows / spend(load.repeats).busy


def _kernel_threads() -> set[int]:
    """Return the system's ids of this process's other threads."""
    ids = {thread.native_id for thread in threading.enumerate()}
    return {number for number in ids if number is not None} - {threading.get_native_id()}


@contextmanager
def pinned(threads: list[int]) -> Iterator[None]:
    """Keep each of some threads on a core of its own.

    Args:
        threads: their ids in the system, no more than there are cores.
    """
    cores = sorted(os.sched_getaffinity(0)) if threads else []
    for thread, core in zip(threads, cores, strict=False):
        os.sched_setaffinity(thread, {core})
    try:
        yield
    finally:
        for thread in threads:
            os.sched_setaffinity(thread, cores)


def cores_table(report: CoresReport) -> ResultTable:
    """A row per setting, a column per load."""
    alone = {each.name: each for each in report.settings if not each.busy}
    rows = []
    for each in report.settings:
        cells = {}
        for place, load in enumerate(LOADS):
            found = [rates[place] for rates in each.rates]
            cell = f"{median(found):,.0f} ({min(found):,.0f}\N{EN DASH}{max(found):,.0f})"
            if each.busy:
                pairs = zip(each.rates, alone[each.name].rates, strict=True)
                kept = median(crowded[place] / free[place] for crowded, free in pairs)
                cell += f", {kept:.0%}"
            cells[load.name] = cell
        share = f"{each.fair_share:.0%}" if each.busy else ""
        rows.append({"engine": each.name, "busy": str(each.busy or ""), "fair": share, **cells})
    return ResultTable(
        title="Cores",
        rows=rows,
        labels=3,
        caption=f"{report.model}: tokens/s, without speculation; medians of {report.rounds} rounds"
        " in turn (lowest to highest). Busy: processes beside it that never wait; fair: the share"
        " of its cores that is left where each thread gets as much time as any other, beside the"
        f" share of its speed alone that it keeps. {report.machine}.",
    )


def cores(
    model: ModelArgument = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each setting is measured.")] = 7,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure the engine on one core, on all, pinned, and beside a process that keeps one busy."""
    with show_steps("loading") as progress:
        report = measure_cores(model or DEFAULT_MODEL, rounds=rounds, progress=progress)
    publish(report, cores_table(report), section="cores", json=json, docs=docs)
