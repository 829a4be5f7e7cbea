"""Costs: the slots and bytes that each method holds, and how fast it is beside full KV."""

from collections.abc import Callable, Sequence
from statistics import median

from midfill.bench.methods.haystacks import Haystacks
from midfill.bench.methods.results import Cost, MethodsOptions
from midfill.bench.methods.session import Holding, MethodSession
from midfill.bench.methods.variants import FULL, Variant

_SHORT = "full KV, short"


def measure_costs(
    session: MethodSession,
    haystacks: Haystacks,
    options: MethodsOptions,
    variants: Sequence[Variant],
    progress: Callable[[str], None],
) -> tuple[dict[str, Cost], Cost]:
    """Measure every variant and full KV, in turn, so that all meet the same machine.

    Returns:
        Costs by specification at the long context, full KV's among them, and full KV's at the
        short one.
    """
    room = session.info.context - options.decoded - 1
    long = _prompt(session, haystacks, min(options.speed_context, room))
    short = _prompt(session, haystacks, min(options.short_context, room))
    prompts = {FULL: long, **{one.specification: long for one in variants}, _SHORT: short}
    methods = {name: FULL if name == _SHORT else name for name in prompts}
    progress(f"prefill of {len(long)} tokens")
    session.hold(long, FULL, 2, cold=False)
    held: dict[str, list[Holding]] = {name: [] for name in prompts}
    first: dict[str, list[Holding]] = {name: [] for name in prompts}
    for _ in range(options.repeats):
        for name, tokens in prompts.items():
            progress(f"decoding at {len(tokens)} tokens: {methods[name]}")
            first[name].append(session.hold(short, methods[name], 2, cold=True))
            held[name].append(session.hold(tokens, methods[name], options.decoded, cold=False))
    costs = {
        name: _cost(session, methods[name], len(tokens), held[name], first[name])
        for name, tokens in prompts.items()
    }
    return {name: cost for name, cost in costs.items() if name != _SHORT}, costs[_SHORT]


def _prompt(session: MethodSession, haystacks: Haystacks, tokens: int) -> list[int]:
    return session.encode("".join(haystacks.lines(0, tokens + 50)))[:tokens]


def _cost(
    session: MethodSession,
    method: str,
    context: int,
    held: Sequence[Holding],
    cold: Sequence[Holding],
) -> Cost:
    slots = held[0].after_prefill
    lists = 0 if method == FULL else session.cell_list_bytes
    rates = [1 / one.decode_seconds for one in held]
    return Cost(
        context=context,
        after_prefill=slots,
        peak=max(one.peak for one in cold),
        bytes=slots * (session.slot_bytes + lists),
        tokens_per_second=median(rates),
        runs=rates,
        ttft_seconds=median(one.ttft_seconds for one in cold),
    )
