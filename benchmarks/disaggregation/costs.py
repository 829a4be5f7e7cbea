"""What the simulator is told of two real workers: fitted times, measured as they will be used.

Workers of one machine share its memory, its caches and this process, which passes all tokens on.
So everything is measured twice, with the other worker idle and busy, as clients see it: messages
between processes included. ``Costs.between`` is what is in between, for a worker that is busy for a
share of the time.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import TypeVarTuple

from benchmarks.disaggregation.latency import (
    DecodeLatency,
    DecodeSample,
    PrefillLatency,
    PrefillSample,
    between,
    fit_decode,
    fit_prefill,
)
from benchmarks.disaggregation.simulated_workers import DecodeWorker, PrefillWorker, Transfer
from benchmarks.disaggregation.simulator import Deployment, Simulated, simulate_workers
from benchmarks.disaggregation.workload import (
    Arrival,
    DisaggregationLoad,
    greedy,
    output_times,
    random_prompt,
)
from midfill.engine.disaggregated.engine import DisaggregatedEngine
from midfill.engine.process.client import EngineClient

_DECODED = 24  # tokens of an answer whose steps are measured
_TRIES = 5
_THRESHOLD = 3  # sequences, where a batch's costs change
_BATCHES = (1, 2, 3, 5)  # sequences of the fitted steps
_OTHERS = 4  # of a step that the fit is checked with
_PARTNERS = 2  # answers in progress while the decode worker is to be busy
_ROUNDS = 8  # until the shares of busy time agree with what is simulated with them


@dataclass(frozen=True)
class Costs:
    """Fitted times.

    Attributes:
        prefill, decode: of the workers.
        transfer: from a first token to where the decode worker can go on.
    """

    prefill: PrefillLatency
    decode: DecodeLatency
    transfer: Transfer

    def between(self, other: "Costs", prefill_busy: float, decode_busy: float) -> "Costs":
        """Return the costs where the workers are busy for some of the time.

        Args:
            other: where the other worker is always busy; these are where it is idle.
            prefill_busy, decode_busy: shares of the time.
        """
        mine, busy = self.transfer, other.transfer
        return Costs(
            self.prefill.between(other.prefill, decode_busy),
            self.decode.between(other.decode, prefill_busy),
            Transfer(
                between(mine.seconds_per_token, busy.seconds_per_token, decode_busy),
                between(mine.constant, busy.constant, decode_busy),
                between(mine.read_share, busy.read_share, decode_busy),
            ),
        )


@dataclass(frozen=True)
class MeasuredCosts:
    """What was measured.

    Attributes:
        idle, busy: where the other worker is.
        prefill_error, decode_error: largest relative error on sizes that were not fitted.
    """

    idle: Costs
    busy: Costs
    prefill_error: float
    decode_error: float

    def simulate(
        self, arrivals: list[Arrival], prefill: PrefillWorker, decode: DecodeWorker
    ) -> tuple[Simulated, Costs]:
        """Simulate requests with costs that agree with how busy the workers then are.

        Args:
            arrivals: the requests.
            prefill, decode: the workers; their latencies are replaced.
        """
        shares = (0.5, 0.5)
        for _ in range(_ROUNDS):
            costs = self.idle.between(self.busy, *shares)
            deployment = Deployment(
                (replace(prefill, latency=costs.prefill),),
                (replace(decode, latency=costs.decode),),
                costs.transfer,
            )
            simulated = simulate_workers(arrivals, deployment)
            shares = (simulated.prefill_busy, simulated.decode_busy)
        return simulated, costs


async def measure_costs(
    engine: DisaggregatedEngine,
    prefiller: EngineClient,
    decoder: EngineClient,
    load: DisaggregationLoad,
    progress: Callable[[str], None],
) -> MeasuredCosts:
    """Measure what prefills, decode steps and transfers cost.

    Args:
        engine: hands requests over from one worker to the other.
        prefiller, decoder: the prefill and the decode worker.
        load: sizes.
        progress: told what is measured.
    """
    meter = _Meter(engine, prefiller, decoder, load)
    progress("measuring prefills, steps and transfers, the other worker idle")
    prefill, decode = await meter.prefill(), await meter.decode()
    idle = Costs(prefill, decode, await meter.transfer(decode, beside=0))
    progress("measuring prefills and transfers beside decoding")
    async with _kept_busy(meter.decode_once, _PARTNERS):
        prefill = await meter.prefill()
        transfer = await meter.transfer(idle.decode, beside=_PARTNERS)
    progress("measuring steps beside prefills")
    async with _kept_busy(meter.prefill_once, 1):
        decode = await meter.decode()
    progress("checking what was fitted at other sizes")
    return MeasuredCosts(
        idle,
        Costs(prefill, decode, transfer),
        await meter.prefill_error(idle.prefill),
        await meter.decode_error(idle.decode),
    )


@contextlib.asynccontextmanager
async def _kept_busy(work: Callable[[], Awaitable[None]], times: int) -> AsyncIterator[None]:
    """Keep doing some work, so many times at once."""

    async def keep() -> None:
        while True:
            await work()

    tasks = [asyncio.create_task(keep()) for _ in range(times)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _Meter:
    """Measures two workers.

    Args:
        engine, prefiller, decoder, load: as of ``measure_costs``.
    """

    def __init__(
        self,
        engine: DisaggregatedEngine,
        prefiller: EngineClient,
        decoder: EngineClient,
        load: DisaggregationLoad,
    ) -> None:
        self._engine, self._prefiller, self._decoder = engine, prefiller, decoder
        self._rng = random.Random(load.seed)
        low, high = min(load.prompts), max(load.prompts)
        self._sizes = [low, (2 * low + high) // 3, (low + 2 * high) // 3, high]
        self._ends = (low, high)

    # --- what keeps the other worker busy ---

    async def decode_once(self) -> None:
        """Have the decode worker generate an answer."""
        await output_times(self._decoder, greedy(self._prompt(self._ends[0]), 2 * _DECODED))

    async def prefill_once(self) -> None:
        """Have the prefill worker compute a prompt."""
        await output_times(self._prefiller, greedy(self._prompt(sum(self._ends) // 2), 1))

    # --- prefills ---

    async def prefill(self) -> PrefillLatency:
        """Fit the latency of prefills."""
        times = await _medians(self._prefill_seconds, [(size,) for size in self._sizes])
        return fit_prefill([PrefillSample(sizes, seconds) for sizes, seconds in times.items()])

    async def prefill_error(self, latency: PrefillLatency) -> float:
        """Return the relative error of a latency at a size that it was not fitted to."""
        times = await _medians(self._prefill_seconds, [(sum(self._ends) // 2,)])
        return max(_error(latency.seconds(size), seconds) for size, seconds in times.items())

    async def _prefill_seconds(self, tokens: int) -> float:
        """Measure a prefill, the first token's way to this process included."""
        request = greedy(self._prompt(tokens), 1)
        started = time.perf_counter()
        await output_times(self._prefiller, request)
        return time.perf_counter() - started

    # --- decode steps ---

    async def decode(self) -> DecodeLatency:
        """Fit the latency of decode steps."""
        shapes = [(size, context) for size in _BATCHES for context in self._ends]
        times = await _medians(self._seconds_per_step, shapes)
        samples = [DecodeSample(_contexts(*shape), seconds) for shape, seconds in times.items()]
        return fit_decode(samples, _THRESHOLD)

    async def decode_error(self, latency: DecodeLatency) -> float:
        """Return the relative error of a latency at a size that it was not fitted to."""
        shape = (_OTHERS, sum(self._ends) // 2)
        times = await _medians(self._seconds_per_step, [shape])
        expected = latency.seconds(_OTHERS, sum(_contexts(*shape)))
        return _error(expected, times[shape])

    async def _seconds_per_step(self, sequences: int, context: int) -> float:
        """Return the mean, from when all sequences decode to when the first one ends."""
        requests = [greedy(self._prompt(context), _DECODED + sequences) for _ in range(sequences)]
        arrived: dict[str, list[float]] = {each.request_id: [] for each in requests}
        with self._decoder.submit(*requests) as outputs:
            async for output in outputs:
                arrived[output.request_id] += [time.perf_counter()] * len(output.token_ids)
        together = max(times[0] for times in arrived.values())
        times = min(arrived.values(), key=lambda times: times[-1])
        steps = sum(each > together for each in times)
        return max(times[-1] - together, 1e-6) / max(steps, 1)

    # --- transfers ---

    async def transfer(self, decode: DecodeLatency, beside: int) -> Transfer:
        """Measure transfers of two sizes.

        A transfer takes as long as a client waits for its second token, but for the steps that the
        simulator counts: the one in progress when the KV is there, half of it on average, and the
        one that computes the token.

        Args:
            decode: latency of steps.
            beside: answers that the decode worker generates meanwhile.
        """
        low, high = self._ends
        context = beside * (low + _DECODED)
        sizes = [(tokens,) for tokens in self._ends]
        gaps = await _medians(self._handover, sizes)
        reads = await _medians(self._export, sizes)
        in_progress = decode.seconds(beside, context) / 2 if beside else 0.0
        times = [
            max(gap - in_progress - decode.seconds(beside + 1, context + tokens), 1e-4)
            for (tokens,), gap in gaps.items()
        ]
        per_token = max(0.0, (times[1] - times[0]) / (high - low))
        constant = max(0.0, mean(times) - per_token * mean(self._ends))
        return Transfer(per_token, constant, read_share=min(1.0, sum(reads.values()) / sum(times)))

    async def _handover(self, tokens: int) -> float:
        """Return the seconds between the first and the second token of an answer."""
        times = await output_times(self._engine, greedy(self._prompt(tokens), 2))
        return times[1] - times[0]

    async def _export(self, tokens: int) -> float:
        """Return the seconds for which a prefill worker is busy with a prompt's transfer."""
        request = greedy(self._prompt(tokens), 1)
        await output_times(self._prefiller, request)
        started = time.perf_counter()
        await self._prefiller.export_kv("", request.token_ids)
        return time.perf_counter() - started

    def _prompt(self, tokens: int) -> list[int]:
        return random_prompt(tokens, self._rng)


S = TypeVarTuple("S")


async def _medians(
    measure: Callable[[*S], Awaitable[float]], sizes: Sequence[tuple[*S]]
) -> dict[tuple[*S], float]:
    """Return the median seconds of each size.

    All sizes are measured in turn, so what disturbs the machine for a while doesn't spoil one.
    """
    times: dict[tuple[*S], list[float]] = {size: [] for size in sizes}
    for _ in range(_TRIES):
        for size in sizes:
            times[size].append(await measure(*size))
    return {size: median(seconds) for size, seconds in times.items()}


def _contexts(sequences: int, context: int) -> tuple[int, ...]:
    """Return the tokens of contexts in the middle of answers that are measured."""
    return (context + _DECODED // 2,) * sequences


def _error(expected: float, measured: float) -> float:
    return abs(expected - measured) / measured
