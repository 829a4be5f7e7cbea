"""What ``bench disaggregation`` measured, and the table and text that say so."""

import msgspec

from benchmarks.disaggregation.load import DisaggregationLoad
from midfill.system.machine import Machine
from midfill.system.reporting.result_table import ResultTable

MEASURED, SIMULATED = "two workers", "two workers, simulated"
WHOLE, CHUNKED = "one engine, whole prompts", "one engine, chunks"


class RunFigures(msgspec.Struct, frozen=True, kw_only=True):
    """How a run's requests were served.

    Attributes:
        ttft, tpot: means in seconds.
        p99_gap: seconds between two outputs of an answer; None if simulated.
        attainment: share of requests that met both targets.
        busy: share of the time that the prefill and the decode worker compute; None of one engine.
    """

    ttft: float
    tpot: float
    p99_gap: float | None
    attainment: float
    busy: tuple[float, float] | None = None


class DisaggregationReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        rate: requests per second.
        ttft_target, tpot_target: seconds.
        prefill_error, decode_error: largest relative error of the fitted latencies on sizes that
            they were not fitted to.
        prefill_slowdown, decode_slowdown: how many times as long a prefill and a step take while
            the other worker is busy.
        transfer_seconds: mean time to move a prompt's KV.
        runs: figures by what served the requests.
    """

    model: str
    machine: Machine
    load: DisaggregationLoad
    rate: float
    ttft_target: float
    tpot_target: float
    prefill_error: float
    decode_error: float
    prefill_slowdown: float
    decode_slowdown: float
    transfer_seconds: float
    runs: dict[str, RunFigures]


def disaggregation_table(report: DisaggregationReport) -> ResultTable:
    """Return a row for each way of serving."""
    rows = [
        {
            "": name,
            "mean TTFT, ms": f"{1000 * run.ttft:,.0f}",
            "mean TPOT, ms": f"{1000 * run.tpot:.1f}",
            "P99 gap, ms": "" if run.p99_gap is None else f"{1000 * run.p99_gap:,.0f}",
            "targets met": f"{run.attainment:.0%}",
            "busy": "" if run.busy is None else " / ".join(f"{share:.0%}" for share in run.busy),
        }
        for name, run in report.runs.items()
    ]
    return ResultTable(rows=rows, title="Prefill and decode apart", caption=_caption(report))


def _caption(report: DisaggregationReport) -> str:
    load, runs = report.load, report.runs
    real, simulated = runs[MEASURED], runs[SIMULATED]
    points = 100 * (simulated.attainment - real.attainment)
    return (
        f"{report.model}; {load.requests} requests at {report.rate:.2f} per second, prompts of"
        f" {min(load.prompts)} to {max(load.prompts)} tokens, answers of {min(load.outputs)} to"
        f" {max(load.outputs)}. Targets: {1000 * report.ttft_target:,.0f} ms to the first token,"
        f" {1000 * report.tpot_target:.1f} ms per further token. Busy: the prefill and the decode"
        f" worker's share of the time. The simulation is off by"
        f" {simulated.ttft / real.ttft - 1:+.0%} in TTFT, {simulated.tpot / real.tpot - 1:+.0%} in"
        f" TPOT and {points:+.0f} points in targets met. It assumes that times depend on sizes as"
        f" fitted (off by {report.prefill_error:.0%} for a prefill and {report.decode_error:.0%}"
        f" for a step at sizes that were not fitted); that a busy worker slows the other one down"
        f" as measured (a prefill takes {report.prefill_slowdown:.2f} times as long, a step"
        f" {report.decode_slowdown:.2f} times), by the share of the time that it is busy on"
        f" average; and that KV moves one prompt at a time"
        f" ({1000 * report.transfer_seconds:.1f} ms on average), which holds up the next prompt"
        f" but no step. On {report.machine}."
    )
