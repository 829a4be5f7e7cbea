"""Tables of bounds and what is reached."""

from midfill_lab.bench.ceiling.results import CeilingReport, LoadCeiling, Moved, Spread
from midfill_lab.bench.roofline.work import ATTENTION, HEAD, LAYER_GROUPS
from midfill_lab.reporting import ResultTable

_BUSY_SHARE = 0.1
"""Others' share of the processors' time from which on a machine counts as busy."""


def ceiling_tables(report: CeilingReport) -> list[ResultTable]:
    """Return a row per load, and a row per change of what the model requires."""
    options = report.options
    return [
        ResultTable(
            title="Bounds and what is reached",
            rows=[_load_cells(ceiling) for ceiling in report.loads],
            caption=_caption(report),
        ),
        ResultTable(
            title="What methods move",
            rows=[
                _moved_cells(moved, report.moved[0], max(options.contexts), max(options.streams))
                for moved in report.moved
            ],
            caption="Bounds under the same ceilings, computed, not measured; in brackets, how many"
            f" times as fast as with nothing changed. Prefill: of {max(options.prefill):,} tokens."
            " Users: whose contexts the KV pool holds at once.",
        ),
    ]


def _load_cells(ceiling: LoadCeiling) -> dict[str, str]:
    bound, measured = ceiling.bound, ceiling.seconds
    attention = sum(part.bytes for part in bound.parts if part.name == ATTENTION)
    return {
        "load": ceiling.load.name,
        "weights MB": f"{(bound.bytes - attention) / 1e6:,.1f}",
        "KV MB": f"{attention / 1e6:,.1f}",
        "GOP": f"{bound.operations / 1e9:,.2f}",
        "layers ms": _milliseconds(bound.seconds_of(*LAYER_GROUPS)),
        "attention ms": _milliseconds(bound.seconds_of(ATTENTION)),
        "head ms": _milliseconds(bound.seconds_of(HEAD)),
        "least ms": _milliseconds(bound.seconds),
        "binds": bound.resource.value,
        "measured ms": "-" if measured is None else _milliseconds(measured.median),
        "tokens/s": "-" if measured is None else f"{ceiling.tokens / measured.median:,.0f}",
        "reached": _share(ceiling.reached),
        "of a plain read": _share(ceiling.of_plain_read),
    }


def _share(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{spread.median:.0%} ({spread.lowest:.0%} to {spread.highest:.0%})"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


def _moved_cells(moved: Moved, nothing: Moved, context: int, many: int) -> dict[str, str]:
    def times(before: float, after: float) -> str:
        return f"{before / after:.2f}x"

    return {
        "what is changed": moved.name,
        "KV bytes/token": f"{moved.kv_bytes:,.0f}",
        "users": f"{moved.users:,}",
        f"1 stream at {context:,}, ms": f"{_milliseconds(moved.decode_one)}"
        f" ({times(nothing.decode_one, moved.decode_one)})",
        f"{many} streams at {context:,}, ms": f"{_milliseconds(moved.decode_many)}"
        f" ({times(nothing.decode_many, moved.decode_many)})",
        "prefill, ms": f"{_milliseconds(moved.prefill)} ({times(nothing.prefill, moved.prefill)})",
    }


def _caption(report: CeilingReport) -> str:
    ceilings, engine = report.roofline, report.engine
    beaten = [c for c in report.loads if c.reached is not None and c.reached.median > 1.0]
    return (
        f"{report.model}, {engine.backend}, without speculation. Weights and KV: bytes that must be"
        " read; GOP: operations. Least: the sum of the layers', attention's and the head's, or the"
        " time to read all bytes if that is longer, under the ceilings measured just before and"
        f" after; median of {report.options.rounds} rounds, in brackets the lowest and the highest."
        " A plain read does nothing but read a step's bytes, once, as often as the step runs; the"
        " ceilings are the fastest moments of many reads."
        " A prompt beside streams is cut into steps, which read the weights anew."
        f" Best ceilings of the run: {_ceilings(report)}."
        f" A step's products bind from {report.crossovers.rows} rows on,"
        f" {_kv_binds(report)}. {_attention_binds(report)}."
        f" {_busy(report)}"
        + (
            f" Beaten by {', '.join(c.load.name for c in beaten)}: the machine was faster in the"
            " step than in the probes, or rows were sent to fewer experts than if each were as"
            " likely."
            if beaten
            else ""
        )
        + f" {report.machine}; {ceilings.cache_bytes / 2**20:.0f} MiB of cache."
    )


def _ceilings(report: CeilingReport) -> str:
    ceilings = report.roofline
    memory = f"{ceilings.bytes_per_second / 1e9:.1f} GB/s from memory"
    plural = "" if ceilings.streams == 1 else "s"
    way = f"{ceilings.streams} stream{plural} per thread"
    prefetched = "prefetched" if ceilings.prefetched else "not prefetched"
    step = int(report.loads[len(report.options.prefill)].bound.bytes)  # of the first decode
    return (
        f"{memory} ({way}, {prefetched}, {ceilings.huge_page_share:.0%} in huge pages),"
        f" {ceilings.read_rate(step) / 1e9:.1f} GB/s for the {step / 1e6:.0f} MB of the first"
        f" decode step again and again, {ceilings.read_rate(2**20) / 1e9:.0f} GB/s from the cache,"
        f" {ceilings.int8_per_second / 1e9:,.0f} GOP/s on int8,"
        f" {ceilings.bfloat16_per_second / 1e9:,.0f} on bfloat16,"
        f" {ceilings.float32_per_second / 1e9:,.0f} on float32"
    )


def _kv_binds(report: CeilingReport) -> str:
    context = report.crossovers.context
    if context is None:
        return "and within the model's context no stream's KV is as many bytes as the weights"
    return f"and a stream's KV is more bytes than the weights from {context:,} tokens on"


def _attention_binds(report: CeilingReport) -> str:
    prompt = report.crossovers.prompt
    if prompt is None:
        return "Attention takes no prompt within the context as long as the layers' products"
    return f"Attention takes longer than the layers' products in prompts of {prompt:,} tokens on"


def _busy(report: CeilingReport) -> str:
    load = f"load {report.load_average:.1f} when it began"
    if report.others is None:
        return f"Whether others kept the machine busy is unknown ({load})."
    state = "busy" if report.others >= _BUSY_SHARE else "idle otherwise"
    return f"The machine was {state}: others took {report.others:.0%} of its time ({load})."
