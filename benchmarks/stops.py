"""What it costs a prefill to stop after each layer.

Methods that look at a prompt between its layers have the forward pass stop there, which leaves the
compiled code and enters it again on every thread. Measured in two ways: how long a call takes that
computes nothing, which other work on the machine hardly changes; and whole prefills, with stops and
without, in turn. A prefill without stops is also compared with another one without, which shows
what such a comparison can tell at all.
"""

import random
import time
from collections.abc import Callable
from statistics import median

import msgspec
import numpy as np
import torch

from midfill.lab.bench.cpu_model import open_cpu_model
from midfill.lab.bench.versions.report import estimate_ratio
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from midfill.system.machine import Machine, describe_machine
from midfill.system.reporting.result_table import ResultTable

_EMPTY_CALLS = 300


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A median of ratios of pairs, with its 95% interval."""

    median: float
    low: float
    high: float


class StopsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        rows: of the prefill.
        stops: number of stops.
        pairs: compared.
        empty_call: seconds of a call that runs no layer, the median.
        whole: seconds of a prefill without stops, the median.
        wall, processor: time with stops over time without.
        control: processor time of a prefill without stops over that of another.
    """

    model: str
    machine: Machine
    load: float
    threads: int
    rows: int
    stops: int
    pairs: int
    empty_call: float
    whole: float
    wall: Ratio
    processor: Ratio
    control: Ratio


def measure_stops(
    model: str,
    *,
    rows: int = 1024,
    pairs: int = 40,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> StopsReport:
    """Load ``model`` on the CPU kernels and compare prefills with stops and without.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    with open_cpu_model(model, threads, progress) as loaded:
        runner = loaded.runner
        prefill = _Prefill(runner, rows)
        empty = prefill.empty_call()
        times = _in_turn(prefill, pairs, progress)
        (wall, used), (wall_again, used_again), (stopping, used_stopping) = times
        return StopsReport(
            model=model,
            machine=describe_machine(),
            load=loaded.load,
            threads=runner.threads,
            rows=rows,
            stops=runner.config.layers + 1,
            pairs=pairs,
            empty_call=empty,
            whole=median([*wall, *wall_again]),
            wall=_ratio(stopping, wall),
            processor=_ratio(used_stopping, used),
            control=_ratio(used_again, used),
        )


class _Prefill:
    """A prefill of so many rows, in one call or in many; a runner's first slots are overwritten."""

    def __init__(self, runner: CpuRunner, rows: int) -> None:
        self._runner = runner
        numbers = np.arange(rows, dtype=np.int32)
        ends = np.array([0, rows], np.int32)
        self._batch = ForwardBatch(numbers, numbers, numbers, ends, ends, numbers, numbers[-1:])

    def in_one_call(self) -> None:
        self._runner.forward(self._batch)

    def layer_by_layer(self) -> None:
        hidden = self._runner.embed(self._batch)
        for layer in range(self._runner.config.layers):
            self._runner.run_layers(self._batch, hidden, layer, layer + 1)
        self._runner.compute_logits(self._batch, hidden)

    def empty_call(self) -> float:
        """Return the seconds of a call that runs no layer, the median of many."""
        shape = (self._batch.rows, self._runner.config.hidden)
        hidden = torch.zeros(shape)
        seconds = []
        for _ in range(_EMPTY_CALLS):
            started = time.perf_counter()
            self._runner.run_layers(self._batch, hidden, 0, 0)
            seconds.append(time.perf_counter() - started)
        return median(seconds)


def _in_turn(
    prefill: _Prefill, pairs: int, progress: Callable[[str], None]
) -> list[tuple[list[float], list[float]]]:
    """Return wall and processor seconds, run by run: without stops, again without, with stops."""
    runs = (prefill.in_one_call, prefill.in_one_call, prefill.layer_by_layer)
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in runs]
    chance = random.Random(0)
    for pair in range(pairs + 1):
        progress(f"pair {pair} of {pairs}")
        for place in chance.sample(range(len(runs)), len(runs)):
            started, used = time.perf_counter(), time.process_time()
            runs[place]()
            if pair:  # the first one warms up
                times[place][0].append(time.perf_counter() - started)
                times[place][1].append(time.process_time() - used)
    return times


def _ratio(own: list[float], other: list[float]) -> Ratio:
    found, low, high = estimate_ratio([a / b for a, b in zip(own, other, strict=True)])
    return Ratio(median=found, low=low, high=high)


def stops_table(report: StopsReport) -> ResultTable:
    """Return the table of a report."""
    rows = [
        ("with stops, time", report.wall),
        ("with stops, processor time", report.processor),
        ("without stops again, processor time", report.control),
    ]
    share = report.stops * report.empty_call / report.whole
    return ResultTable(
        rows=[
            {
                "prefill": name,
                "over one call": f"{ratio.median:.3f}",
                "95% interval": f"{ratio.low:.3f} to {ratio.high:.3f}",
            }
            for name, ratio in rows
        ],
        caption=(
            f"{report.model}: a prefill of {report.rows:,} rows that stops {report.stops} times,"
            f" beside one in one call; medians of {report.pairs} runs of each, in turn. A call"
            f" that computes nothing takes {report.empty_call * 1e6:.0f} µs, so {report.stops} of"
            f" them are {share:.1%} of a prefill of {report.whole * 1e3:.0f} ms. Threads:"
            f" {report.threads}; {report.machine}; load {report.load:.1f}."
        ),
    )
