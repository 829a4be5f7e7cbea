"""Where a step's time goes, beside the bytes and operations that the model requires."""

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.messages import EngineInfo
from midfill.engine.request import EngineRequest, EngineSamplingParams
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
    ticks_per_second,
)
from midfill.kernels.cpu.weight_formats import WeightFormat
from midfill.models.checkpoints.model_store import resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.runners.cpu.packed_model import PackedModel
from midfill.runners.cpu.runner import CpuRunner, slot_bytes
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.roofline import Roofline, measure_roofline
from midfill_lab.reporting import ResultTable


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine does repeatedly.

    Attributes:
        name: shown in tables.
        streams: requests at once.
        context: cached tokens per request.
        rows: tokens to compute per request and step; 1 decodes.
        repeats: how often it is measured.
    """

    name: str
    streams: int = 1
    context: int
    rows: int = 1
    repeats: int


LOADS = (
    Load(name="decode at 16", context=16, repeats=100),
    Load(name="decode at 2,000", context=2000, repeats=100),
    Load(name="decode at 16, 16 streams", streams=16, context=16, repeats=60),
    Load(name="decode at 500, 16 streams", streams=16, context=500, repeats=60),
    Load(name="8 more tokens at 2,000", context=2000, rows=8, repeats=40),
    Load(name="32 more tokens at 2,000", context=2000, rows=32, repeats=30),
    Load(name="512 more tokens at 16", context=16, rows=512, repeats=5),
)

_WARM_UP = Load(name="warm-up", context=16, repeats=50)


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
    """A load and the parts of one repeat's time, which add up to ``seconds``."""

    load: Load
    seconds: float
    parts: list[Part]


class ProfileReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    engine: EngineInfo
    roofline: Roofline
    loads: list[LoadProfile]


class _Reading(NamedTuple):
    """Seconds since the engine's start, and in each phase, the mean over threads."""

    busy: float
    forward: float
    sampling: float
    phases: npt.NDArray[np.float64]

    def since(self, earlier: "_Reading", repeats: int) -> "_Reading":
        """Return the time of one repeat."""
        return _Reading(
            (self.busy - earlier.busy) / repeats,
            (self.forward - earlier.forward) / repeats,
            (self.sampling - earlier.sampling) / repeats,
            (self.phases - earlier.phases) / repeats,
        )


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
    progress(f"loading {model}")
    options = ModelOptions(backend="cpu", threads=threads, speculation=False)
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), options.weights)
    engine, runner, info = load_engine(checkpoint, options)
    assert isinstance(runner, CpuRunner)
    progress("measuring what the machine can do")
    roofline = measure_roofline(runner.threads)
    bench = _Bench(engine, runner, ticks_per_second())
    bench.decode(_WARM_UP)
    profiles = []
    for load in loads:
        progress(load.name)
        spent = bench.decode(load) if load.rows == 1 else bench.extend(load)
        parts = _parts(runner, load, spent, roofline)
        profiles.append(LoadProfile(load=load, seconds=spent.busy, parts=parts))
    runner.close()
    return ProfileReport(
        model=Path(model).stem if Path(model).is_file() else model,
        machine=describe_machine(),
        engine=info,
        roofline=roofline,
        loads=profiles,
    )


class _Bench:
    """Runs loads on an engine and reads its clocks."""

    def __init__(self, engine: Engine, runner: CpuRunner, ticks_per_second: float) -> None:
        self._engine = engine
        self._runner = runner
        self._tick_rate = ticks_per_second
        self._random = random.Random(0)
        self._numbers = itertools.count()

    def decode(self, load: Load) -> _Reading:
        """Run steps that give every stream one token."""
        prompts = [self._tokens(load.context) for _ in range(load.streams)]
        # The first streams answer while prompts of the last ones are computed.
        earlier = 16 + load.streams * load.context // 128
        names = [self._ask(prompt, earlier + load.repeats) for prompt in prompts]
        begun: set[str] = set()
        while len(begun) < load.streams:
            begun.update(output.request_id for output in self._engine.step())
        before = self._read()
        for _ in range(load.repeats):
            self._engine.step()
        spent = self._read().since(before, load.repeats)
        for name in names:
            self._engine.cancel(name)
        self._finish()
        return spent

    def extend(self, load: Load) -> _Reading:
        """Run requests whose cached prompts have grown by tokens that are new each time."""
        prompts = [self._tokens(load.context) for _ in range(load.streams)]
        for prompt in prompts:
            self._ask(prompt, 1)
        self._finish()
        before = self._read()
        for _ in range(load.repeats):
            for prompt in prompts:
                self._ask(prompt + self._tokens(load.rows), 1)
            self._finish()
        return self._read().since(before, load.repeats)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(100, self._runner.config.vocab) for _ in range(count)]

    def _ask(self, prompt: list[int], tokens: int) -> str:
        name = str(next(self._numbers))
        sampling = EngineSamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        self._engine.add(EngineRequest(request_id=name, token_ids=prompt, sampling=sampling))
        return name

    def _finish(self) -> None:
        while self._engine.has_work():
            self._engine.step()

    def _read(self) -> _Reading:
        stats = self._engine.stats()
        phases = self._runner.phase_ticks().mean(axis=0) / self._tick_rate
        return _Reading(stats.busy_seconds, stats.forward_seconds, stats.sampling_seconds, phases)


def _parts(runner: CpuRunner, load: Load, spent: _Reading, roofline: Roofline) -> list[Part]:
    """Return the parts of one repeat's time, with what the model requires of each."""

    def of(*phases: int) -> float:
        return float(spent.phases[list(phases)].sum())

    rows = load.streams * load.rows
    layers = _product(runner.model, ("qkv", "o", "gate", "up", "down"), rows, roofline)
    head = _product(runner.model, ("head",), load.streams, roofline)
    kernels = float(spent.phases.sum())
    return [
        layers.named("layer weights", of(QKV, OUTPUT, GATE_UP, DOWN)),
        head.named("output head", of(HEAD)),
        _attention(runner, load, roofline).named("attention", of(ATTENTION)),
        Part(name="norms, RoPE, KV write", seconds=of(EMBED, NORM, ROTATE)),
        Part(name="waiting", seconds=of(WAIT)),
        Part(name="starting threads", seconds=spent.forward - kernels),
        Part(name="sampling", seconds=spent.sampling),
        Part(name="scheduling", seconds=spent.busy - spent.forward - spent.sampling),
    ]


class _Least(NamedTuple):
    """What a part requires; see ``Part``."""

    bytes: float
    operations: float
    seconds: float

    def named(self, name: str, seconds: float) -> Part:
        return Part(
            name=name,
            seconds=seconds,
            bytes_least=self.bytes,
            operations_least=self.operations,
            seconds_least=self.seconds,
        )


def _product(
    model: PackedModel, matrices: tuple[str, ...], rows: int, roofline: Roofline
) -> _Least:
    """Return what matrix products require: weights read once, two operations per weight and row."""
    size = operations = seconds = 0.0
    for name in matrices:
        if name not in model.matrices:
            continue
        matrix = model.matrices[name]
        done = 2.0 * rows * matrix.weight_count
        exact = WeightFormat.F32 in matrix.formats
        size += matrix.stored_bytes
        operations += done
        seconds += done / (roofline.float32_per_second if exact else roofline.int8_per_second)
    return _Least(size, operations, max(seconds, size / roofline.bytes_per_second))


def _attention(runner: CpuRunner, load: Load, roofline: Roofline) -> _Least:
    """Return what attention requires: K and V read once, two products per head, row and token."""
    config = runner.config
    context = load.context + (load.repeats / 2 if load.rows == 1 else load.rows / 2)
    size = load.streams * context * slot_bytes(config, runner.kv_cache_dtype)
    pairs = load.streams * load.rows * context * config.layers * config.query_heads
    operations = 4.0 * pairs * config.head_dim
    seconds = max(size / roofline.bytes_per_second, operations / roofline.float32_per_second)
    return _Least(size, operations, seconds)


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
        seconds_least=sum(part.seconds_least for part in profile.parts),
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
