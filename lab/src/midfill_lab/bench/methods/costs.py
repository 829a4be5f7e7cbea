"""What methods hold, and how fast they are beside full KV moments before."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from midfill_lab.bench.methods.probes import Haystacks
from midfill_lab.bench.methods.results import FULL, Cost, CostRun, MethodsOptions
from midfill_lab.bench.methods.session import MethodSession


def measure_costs(
    session: MethodSession,
    haystacks: Haystacks,
    options: MethodsOptions,
    methods: Sequence[str],
    earlier: Mapping[str, Cost],
    progress: Callable[[str], None],
) -> Iterator[dict[str, Cost]]:
    """Measure methods by their specifications, full KV among them, in turn.

    Args:
        session: the model.
        haystacks: where prompts are from.
        options: how long they are, and how many runs.
        methods: what is measured.
        earlier: costs of runs before; those are not repeated.
        progress: called with what is being done.

    Yields:
        All costs so far by specification, after each run.
    """
    costs = dict(earlier)
    missing = [
        method
        for repeat in range(options.repeats)
        for method in methods
        if method not in costs or len(costs[method].runs) <= repeat
    ]
    if not missing:
        return
    room = session.info.context - options.decoded - 1
    long = _prompt(session, haystacks, min(options.speed_context, room))
    short = _prompt(session, haystacks, min(options.short_context, room))
    for tokens in (long, short):
        progress(f"prefill of {len(tokens)} tokens")
        session.hold(tokens, FULL, 2, cold=False)
    for number, method in enumerate(missing, 1):
        progress(f"costs of {method} ({number} of {len(missing)})")
        cost = _measure_once(session, long, short, method, options.decoded)
        known = costs[method].runs if method in costs else []
        costs[method] = msgspec.structs.replace(cost, runs=[*known, *cost.runs])
        yield dict(costs)


def _measure_once(
    session: MethodSession, long: Sequence[int], short: Sequence[int], method: str, decoded: int
) -> Cost:
    """Return a method's cost in one run.

    Full KV decodes at both contexts before the method does: a minute later the machine may have
    other work.
    """
    cold = session.hold(short, method, 2, cold=True)
    full_short = session.hold(short, FULL, decoded, cold=False)
    full = session.hold(long, FULL, decoded, cold=False)
    own = session.hold(long, method, decoded, cold=False)
    run = CostRun(
        ttft_seconds=cold.ttft_seconds,
        tokens_per_second=1 / own.decode_seconds,
        times_full=full.decode_seconds / own.decode_seconds,
        times_short=full_short.decode_seconds / own.decode_seconds,
        peak=cold.peak,
    )
    return Cost(
        context=len(long),
        short_context=len(short),
        after_prefill=own.after_prefill,
        bytes=own.after_prefill * session.slot_bytes + own.list_bytes,
        runs=[run],
    )


def _prompt(session: MethodSession, haystacks: Haystacks, tokens: int) -> list[int]:
    return session.encode("".join(haystacks.lines(0, tokens + 50)))[:tokens]
