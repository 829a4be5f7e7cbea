"""Prefill and decode speed as a table."""

from midfill.bench.speed import Rate, SpeedReport
from midfill.reporting.result_table import ResultTable


def speed_table(report: SpeedReport) -> ResultTable:
    """A row for each length of prompt."""
    engine = report.engine
    prefill = [_cells(f"prefill of {n} tokens", rate) for n, rate in report.prefill.items()]
    decode = [_cells(f"decode at {n} tokens", rate) for n, rate in report.decode.items()]
    return ResultTable(
        title="Prefill and decode",
        rows=prefill + decode,
        caption=f"{report.model}, one request at a time, without speculation, "
        f"median of {report.options.repeats} runs; "
        f"{engine.backend}, weights {engine.weight_bytes / 1e6:.1f} MB, KV pool "
        f"{engine.kv_bytes / 1e9:.2f} GB ({engine.slots} tokens), loaded in "
        f"{engine.load_seconds:.1f} s; {report.machine}.",
    )


def _cells(measured: str, rate: Rate) -> dict[str, str]:
    return {
        "measured": measured,
        "tokens/s": f"{rate.tokens_per_second:.0f}",
        "slowest": f"{rate.slowest:.0f}",
        "fastest": f"{rate.fastest:.0f}",
    }
