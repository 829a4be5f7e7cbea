"""Where a step's time goes, beside the bytes and operations that the model requires."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from midfill.engine.messages import EngineInfo
from midfill.kernels.cpu.clock import (
    ATTENTION,
    DOWN,
    EMBED,
    GATE_UP,
    HEAD,
    NORM,
    OUTPUT,
    QKV,
    ROTATE,
    WAIT,
)
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.engine_loads import Load, Reading, open_engine, steps_of
from midfill_lab.bench.roofline import work
from midfill_lab.bench.roofline.bounds import StepBound, bound_steps
from midfill_lab.bench.roofline.ceilings import Roofline, measure_roofline
from midfill_lab.bench.roofline.work import model_size, step_work
from midfill_lab.reporting import ResultTable

LOADS = (
    Load(name="decode at 16", context=16, repeats=100),
    Load(name="decode at 2,000", context=2000, repeats=100),
    Load(name="decode at 16, 16 streams", streams=16, context=16, repeats=60),
    Load(name="decode at 500, 16 streams", streams=16, context=500, repeats=60),
    Load(name="8 more tokens at 2,000", context=2000, rows=8, repeats=40),
    Load(name="32 more tokens at 2,000", context=2000, rows=32, repeats=30),
    Load(name="512 more tokens at 16", context=16, rows=512, repeats=5),
)


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part of the time.

    Attributes:
        name: shown in tables.
        seconds: the mean over repeats and threads.
        bytes_least: bytes that must be read from memory.
        operations_least: required additions and multiplications.
        seconds_least: the least time that the machine's ceilings allow for both.
    """

    name: str
    seconds: float
    bytes_least: float = 0.0
    operations_least: float = 0.0
    seconds_least: float = 0.0


class LoadProfile(msgspec.Struct, frozen=True, kw_only=True):
    """A load and the parts of one repeat's time, which add up to ``seconds``.

    Attributes:
        load: what ran.
        seconds: of one repeat.
        seconds_least: the least time that the machine's ceilings allow, see ``roofline.bounds``.
        parts: of ``seconds``.
    """

    load: Load
    seconds: float
    seconds_least: float
    parts: list[Part]


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    engine: EngineInfo
    roofline: Roofline
    loads: list[LoadProfile]


def measure_profile(
    model: str,
    loads: tuple[Load, ...] = LOADS,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> ProfileReport:
    """Load ``model`` on the CPU kernels, without speculation, and break every load's time down.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    with open_engine(model, threads, progress) as engine:
        progress("measuring what the machine can do")
        roofline = measure_roofline(engine.runner.threads)
        size = model_size(engine.runner)
        profiles = []
        for load in loads:
            progress(load.name)
            with engine.bench.running(load) as spend:
                spent = spend(load.repeats)
            steps = steps_of(load, 0, load.repeats, max(round(spent.steps), 1))
            bound = bound_steps([step_work(size, rows) for rows in steps], roofline)
            profiles.append(
                LoadProfile(
                    load=load,
                    seconds=spent.busy,
                    seconds_least=bound.seconds,
                    parts=_parts(spent, bound),
                )
            )
    return ProfileReport(
        model=Path(model).stem if Path(model).is_file() else model,
        machine=describe_machine(),
        engine=engine.info,
        roofline=roofline,
        loads=profiles,
    )


def _parts(spent: Reading, bound: StepBound) -> list[Part]:
    """Return the parts of one repeat's time, with what the model requires of each."""

    def of(*phases: int) -> float:
        return float(spent.phases[list(phases)].sum())

    def bounded(name: str, seconds: float, groups: Sequence[str]) -> Part:
        found = [part for part in bound.parts if part.name in groups]
        return Part(
            name=name,
            seconds=seconds,
            bytes_least=sum(part.bytes for part in found),
            operations_least=sum(part.operations for part in found),
            seconds_least=bound.seconds_of(*groups),
        )

    kernels = float(spent.phases.sum())
    return [
        bounded("layer weights", of(QKV, OUTPUT, GATE_UP, DOWN), work.LAYER_GROUPS),
        bounded("output head", of(HEAD), (work.HEAD,)),
        bounded("attention", of(ATTENTION), (work.ATTENTION,)),
        Part(name="norms, RoPE, KV write", seconds=of(EMBED, NORM, ROTATE)),
        Part(name="waiting", seconds=of(WAIT)),
        Part(name="starting threads", seconds=spent.forward - kernels),
        Part(name="sampling", seconds=spent.sampling),
        Part(name="scheduling", seconds=spent.busy - spent.forward - spent.sampling),
    ]


def profile_tables(report: ProfileReport) -> list[ResultTable]:
    """Return a table per load; the last one's caption says what was measured."""
    tables = [_table(profile) for profile in report.loads]
    tables[-1] = replace(tables[-1], caption=_caption(report))
    return tables


def _table(profile: LoadProfile) -> ResultTable:
    tokens = profile.load.streams * profile.load.rows / profile.seconds
    total = Part(
        name="all",
        seconds=profile.seconds,
        bytes_least=sum(part.bytes_least for part in profile.parts),
        operations_least=sum(part.operations_least for part in profile.parts),
        seconds_least=profile.seconds_least,
    )
    return ResultTable(
        title=f"{profile.load.name}: {tokens:,.0f} tokens/s",
        titled=True,
        rows=[_cells(part, profile.seconds) for part in (*profile.parts, total)],
    )


def _cells(part: Part, whole: float) -> dict[str, str]:
    bound = part.seconds_least > 0.0
    return {
        "part": part.name,
        "ms": f"{part.seconds * 1e3:.3f}",
        "share": f"{part.seconds / whole:.0%}",
        "MB": f"{part.bytes_least / 1e6:.1f}" if bound else "",
        "MFLOP": f"{part.operations_least / 1e6:,.0f}" if bound else "",
        "least ms": f"{part.seconds_least * 1e3:.3f}" if bound else "",
        "reached": f"{part.seconds_least / part.seconds:.0%}" if bound and part.seconds else "",
    }


def _caption(report: ProfileReport) -> str:
    ceilings = report.roofline
    return (
        f"{report.model}, {report.engine.backend}, without speculation; ceilings measured in the "
        f"same call: {ceilings.bytes_per_second / 1e9:.1f} GB/s from memory, "
        f"{ceilings.int8_per_second / 1e9:,.0f} GOP/s on int8, "
        f"{ceilings.float32_per_second / 1e9:,.0f} GFLOP/s on float32; {report.machine}."
    )
