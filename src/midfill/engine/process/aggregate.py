"""What engines share that consist of other engines: a task for each request, and sums of numbers.

Engines of this kind are the workers of ``engine.disaggregated``, the replicas of a cluster, and the
servers behind a gateway.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial

import msgspec

from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineRequest, EngineStats, TenantStats, TierStats
from midfill.errors import GenerationError, MidfillError

_log = logging.getLogger(__name__)

GAUGES = frozenset(
    {
        "running",
        "waiting",
        "slots_total",
        "slots_free",
        "slots_cached",
        "slots_pinned",
        "cache_nodes",
        "cache_index_bytes",
        "background",
        "loading",
        "states_total",
        "states_used",
        "state_snapshots",
    }
)
"""Fields of ``EngineStats`` that go down again; the others only grow."""

_SUMMED = tuple(
    name
    for name in EngineStats.__struct_fields__
    if isinstance(getattr(EngineStats(), name), int | float)
)


class RequestTasks:
    """The unfinished requests of an engine, each answered by a task; owns their streams.

    Args:
        answer: puts the outputs of a request into its stream. What it raises ends the stream.
        failure: what clients are told if it raises no MidfillError, which is a bug.
        on_end: called with the id of each request that has ended.
    """

    def __init__(
        self,
        answer: Callable[[EngineRequest, OutputStream], Awaitable[None]],
        failure: str,
        on_end: Callable[[str], None] = lambda request_id: None,
    ) -> None:
        self._answer = answer
        self._failure = failure
        self._on_end = on_end
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, requests: tuple[EngineRequest, ...]) -> OutputStream:
        """Start requests; the stream yields their outputs."""
        stream = OutputStream(self, requests)
        for request in requests:
            task = asyncio.create_task(self._run(request, stream), name="request")
            self._tasks[request.request_id] = task
            # Not in the task itself: one that is cancelled before it starts would stay.
            task.add_done_callback(partial(self._end, request.request_id))
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, wherever it is. One of several answers is not ended, only ignored."""
        if index is None and (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def forget(self, request_id: str) -> None:
        """Do nothing: a task that has told the last of its outputs ends by itself."""

    async def close(self) -> None:
        """End all requests."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, request: EngineRequest, stream: OutputStream) -> None:
        try:
            await self._answer(request, stream)
        except MidfillError as error:
            stream.put(error)
        except Exception:
            _log.exception("%s", self._failure.partition(";")[0])
            stream.put(GenerationError(self._failure))

    def _end(self, request_id: str, _: object) -> None:
        del self._tasks[request_id]
        self._on_end(request_id)


def total_stats(present: Iterable[EngineStats], past: Iterable[EngineStats] = ()) -> EngineStats:
    """Return sums over engines, of what can be added.

    Args:
        present: those that are there.
        past: the last numbers of those that have gone, whose counters still count.
    """
    sums: dict[str, float] = dict.fromkeys(_SUMMED, 0)
    tiers: list[TierStats] = []
    for stats in present:
        for name in sums:
            sums[name] += getattr(stats, name)
        if stats.warm_tier is not None:
            tiers.append(stats.warm_tier)
    for stats in past:
        for name in sums.keys() - GAUGES:
            sums[name] += getattr(stats, name)
    tier = _total_tier(tiers) if tiers else None
    return msgspec.structs.replace(EngineStats(), **sums, warm_tier=tier)


def _total_tier(tiers: Iterable[TierStats]) -> TierStats:
    by_folder: dict[str, dict[str, int]] = {}
    counts: dict[str, int] = {}
    for tier in tiers:
        for name in TierStats.__struct_fields__:
            value = getattr(tier, name)
            if isinstance(value, int):
                counts[name] = counts.get(name, 0) + value
                continue
            sums = by_folder.setdefault(name, {})
            for folder, number in value.items():
                sums[folder] = sums.get(folder, 0) + number
    return msgspec.convert({**by_folder, **counts}, TierStats)


def total_tenants(
    present: Iterable[Mapping[str, TenantStats]], past: Iterable[Mapping[str, TenantStats]] = ()
) -> dict[str, TenantStats]:
    """Return the same sums by tenant."""
    counters = ("prompt_tokens", "cached_tokens", "generated_tokens")
    gauges = ("running", "waiting")
    sums: dict[str, dict[str, int]] = {}
    for fields, groups in (((*gauges, *counters), present), (counters, past)):
        for tenants in groups:
            for name, stats in tenants.items():
                sum_of = sums.setdefault(name, dict.fromkeys((*gauges, *counters), 0))
                for each in fields:
                    sum_of[each] += getattr(stats, each)
    return {name: TenantStats(**values) for name, values in sums.items()}
