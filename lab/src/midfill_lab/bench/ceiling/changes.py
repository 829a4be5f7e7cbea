"""What methods move: the bounds of prefill and decode, and how many users the KV pool holds.

A method may store KV in fewer bytes, keep a part of it, run fewer rows, or compute fewer pairs of
rows and keys. Which of the bounds that moves follows from the model of work alone: what only
stores less makes no prefill shorter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from midfill.kernels.cpu.kv_cache import KVCacheDtype
from midfill_lab.bench.ceiling.results import CeilingOptions, Crossovers, Moved
from midfill_lab.bench.roofline.bounds import bound_part, bound_step
from midfill_lab.bench.roofline.ceilings import Resource, Roofline
from midfill_lab.bench.roofline.work import (
    ATTENTION,
    LAYER_GROUPS,
    NOTHING_SAVED,
    ModelSize,
    Rows,
    Savings,
    step_work,
)


@dataclass(frozen=True)
class Change:
    """What a kind of method does.

    Attributes:
        name: shown in tables.
        kv_cache_dtype: how KV is stored; None as it is.
        decode: what is left of a decode step's work; the share of keys is also that of the bytes
            held.
        prefill: what is left of a prefill's work.
    """

    name: str
    kv_cache_dtype: KVCacheDtype | None = None
    decode: Savings = NOTHING_SAVED
    prefill: Savings = NOTHING_SAVED


_MAX_ROWS = 1 << 20
CHANGES = (
    Change("nothing"),
    Change("KV in float32", KVCacheDtype.F32),
    Change("KV in int8", KVCacheDtype.I8),
    Change("half of the KV kept", decode=Savings(keys=0.5)),
    Change("a quarter of the KV kept", decode=Savings(keys=0.25)),
    Change("an eighth of the KV kept", decode=Savings(keys=0.125)),
    Change("half of the prompt's rows run", prefill=Savings(rows=0.5, pairs=0.5)),
    Change("a fifth of the prompt's pairs", prefill=Savings(pairs=0.2)),
)


def moved_bytes(model: ModelSize, options: CeilingOptions) -> list[int]:
    """Return the bytes that a decode step reads under each change, of one and of most streams."""
    sizes = [
        sum(part.bytes for part in step_work(_changed(model, change), [rows], change.decode))
        for change in CHANGES
        for rows in (
            Rows(1, max(options.contexts)),
            Rows(max(options.streams), max(options.contexts)),
        )
    ]
    return [int(size) for size in sizes]


def _changed(model: ModelSize, change: Change) -> ModelSize:
    if change.kv_cache_dtype is None:
        return model
    return replace(model, kv_cache_dtype=change.kv_cache_dtype)


def moved_bounds(
    model: ModelSize, roofline: Roofline, options: CeilingOptions, kv_bytes: int
) -> list[Moved]:
    """Return what each change does at the longest context and prompt.

    Args:
        model: the model.
        roofline: the machine's ceilings.
        options: contexts, streams and prompts.
        kv_bytes: of the KV pool.
    """
    context, many = max(options.contexts), max(options.streams)
    prompt = Rows(1, 0, max(options.prefill))
    found = []
    for change in CHANGES:
        size = _changed(model, change)

        def seconds(rows: Rows, savings: Savings, size: ModelSize = size) -> float:
            return bound_step(step_work(size, [rows], savings), roofline).seconds

        held = size.slot_bytes * change.decode.keys
        found.append(
            Moved(
                name=change.name,
                kv_bytes=held,
                users=int(kv_bytes / (held * context)),
                decode_one=seconds(Rows(1, context), change.decode),
                decode_many=seconds(Rows(many, context), change.decode),
                prefill=seconds(prompt, change.prefill),
            )
        )
    return found


def find_crossovers(model: ModelSize, roofline: Roofline, context: int) -> Crossovers:
    """Return from where on products, KV and attention take more than weights and products do.

    Args:
        model: the model.
        roofline: the machine's ceilings.
        context: the most tokens of a stream.
    """

    def computes(rows: int) -> bool:
        bounds = [
            bound_part(part, roofline)
            for part in step_work(model, [Rows(1, 0, rows)])
            if part.name in LAYER_GROUPS
        ]
        reading = sum(b.seconds for b in bounds if b.resource in (Resource.MEMORY, Resource.CACHE))
        return 2 * reading < sum(b.seconds for b in bounds)

    def reads_more_kv(tokens: int) -> bool:
        parts = step_work(model, [Rows(1, tokens)])
        read = sum(part.bytes for part in parts if part.name == ATTENTION)
        return read > model.weight_bytes

    def attends(tokens: int) -> bool:
        bound = bound_step(step_work(model, [Rows(1, 0, tokens)]), roofline)
        return bound.seconds_of(ATTENTION) > bound.seconds_of(*LAYER_GROUPS)

    return Crossovers(
        rows=_first(computes, _MAX_ROWS) or _MAX_ROWS,
        context=_first(reads_more_kv, context),
        prompt=_first(attends, context),
    )


def _first(holds: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to ``most`` for which a growing condition holds."""
    if not holds(most):
        return None
    low, high = 0, most  # it holds for high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
