"""Costs: the slots and bytes that each method holds, and how fast it is beside full KV."""

from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from midfill.lab.bench.methods.haystacks import Haystacks
from midfill.lab.bench.methods.results import Cost, MethodsOptions
from midfill.lab.bench.methods.session import Holding, MethodSession
from midfill.lab.bench.methods.variants import FULL, Variant


def measure_costs(
    session: MethodSession,
    haystacks: Haystacks,
    options: MethodsOptions,
    variants: Sequence[Variant],
    progress: Callable[[str], None],
) -> dict[str, Cost]:
    """Measure every variant and full KV.

    Runs of full KV at both contexts precede each run of a variant: moments later the machine may
    have other work to do.

    Returns:
        Costs by specification at the long context, full KV's among them.
    """
    room = session.info.context - options.decoded - 1
    long = _prompt(session, haystacks, min(options.speed_context, room))
    short = _prompt(session, haystacks, min(options.short_context, room))
    for tokens in (long, short):
        progress(f"prefill of {len(tokens)} tokens")
        session.hold(tokens, FULL, 2, cold=False)
    runs: dict[str, list[_Run]] = {FULL: [], **{one.specification: [] for one in variants}}
    for _ in range(options.repeats):
        for method, measured in runs.items():
            progress(f"decoding at {len(long)} tokens: {method}")
            measured.append(
                _Run(
                    cold=session.hold(short, method, 2, cold=True),
                    short=session.hold(short, FULL, options.decoded, cold=False),
                    full=session.hold(long, FULL, options.decoded, cold=False),
                    own=session.hold(long, method, options.decoded, cold=False),
                )
            )
    return {
        method: _cost(session, method, len(long), len(short), measured)
        for method, measured in runs.items()
    }


class _Run(NamedTuple):
    """What one repeat measures of a method.

    Attributes:
        cold: of the short prompt, nothing cached.
        short, full: full KV at the short and at the long context, decoding.
        own: the method at the long context, decoding.
    """

    cold: Holding
    short: Holding
    full: Holding
    own: Holding


def _prompt(session: MethodSession, haystacks: Haystacks, tokens: int) -> list[int]:
    return session.encode("".join(haystacks.lines(0, tokens + 50)))[:tokens]


def _cost(
    session: MethodSession, method: str, context: int, short: int, runs: Sequence[_Run]
) -> Cost:
    slots = runs[0].own.after_prefill
    lists = 0 if method == FULL else session.cell_list_bytes
    return Cost(
        context=context,
        short_context=short,
        after_prefill=slots,
        bytes=slots * (session.slot_bytes + lists),
        tokens_per_second=median(1 / run.own.decode_seconds for run in runs),
        times_full=[run.full.decode_seconds / run.own.decode_seconds for run in runs],
        times_short=[run.short.decode_seconds / run.own.decode_seconds for run in runs],
        ttft_seconds=median(run.cold.ttft_seconds for run in runs),
        peak=max(run.cold.peak for run in runs),
    )
