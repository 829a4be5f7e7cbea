"""What becomes of a load's requests, and the figures made of it; names are vLLM's.

TTFT is the time from sending a request to its first token, TPOT the time per token after it, ITL
the gap between two messages with tokens, E2EL the time to the end of the answer.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from midfill.errors import OptionError
from midfill_lab.bench.serving.workload import TimedRequest

OK = "ok"
"""Status of an answer that is complete."""
UNSENT = "unsent"
"""Status of a turn whose program had failed before."""

PERCENTILES = (50, 90, 95, 99)


class RequestResult(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a request. Times are in seconds after the load's start.

    Attributes:
        index, kind, tenant, program, turn: as in ``TimedRequest``.
        due: when it was to be sent.
        sent: when it was.
        arrivals: when each message with tokens arrived.
        ended: when the answer, or the error, was complete.
        prompt_tokens, cached_tokens, completion_tokens: the server's usage.
        status: ``OK``, ``UNSENT``, or the code of an error: "queue_full", or "429" where a server
            names none.
    """

    index: int
    kind: str
    tenant: str
    program: int | None = None
    turn: int = 0
    due: float
    sent: float
    arrivals: list[float] = []
    ended: float
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    status: str = OK

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return (self.arrivals[0] if self.arrivals else self.ended) - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None without any."""
        further = self.completion_tokens - 1
        return (self.arrivals[-1] - self.arrivals[0]) / further if further > 0 else None

    @property
    def gaps(self) -> list[float]:
        """Seconds between messages with tokens."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def e2el(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended - self.sent


def request_result(request: TimedRequest, **fields: Any) -> RequestResult:
    """Return what became of a request.

    Args:
        request: the request.
        fields: those of the result that don't come from the request.
    """
    return RequestResult(
        index=request.index,
        kind=request.kind,
        tenant=request.tenant,
        program=request.program,
        turn=request.turn,
        **fields,
    )


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a request must keep to count for goodput, in seconds; None sets no limit.

    Attributes:
        ttft, tpot, e2el: of the request.
        itl: of its longest gap.
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2el: float | None = None

    def are_met(self, result: RequestResult) -> bool:
        """Whether a complete answer was fast enough."""
        measured = (
            (self.ttft, result.ttft),
            (self.tpot, result.tpot or 0.0),
            (self.itl, max(result.gaps, default=0.0)),
            (self.e2el, result.e2el),
        )
        return all(limit is None or value <= limit for limit, value in measured)

    def __str__(self) -> str:
        """Return them as ``parse_limits`` takes them."""
        given = msgspec.structs.asdict(self).items()
        return ",".join(f"{name}:{1000 * limit:g}" for name, limit in given if limit is not None)


def parse_limits(text: str) -> Limits:
    """Return the limits of "ttft:200,tpot:50", in milliseconds as in ``vllm bench serve``.

    Raises:
        OptionError: there is no such measure, or no such number.
    """
    found: dict[str, float] = {}
    for part in text.replace(",", " ").split():
        name, _, value = part.partition(":")
        try:
            found[name] = float(value) / 1000
        except ValueError:
            raise OptionError(f"--goodput takes limits as ttft:200,tpot:50, not {part!r}") from None
        if name not in Limits.__struct_fields__:
            known = ", ".join(Limits.__struct_fields__)
            raise OptionError(f"--goodput names {name}; there are {known}")
    return Limits(**found)


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Mean and percentiles of some times, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float


def spread(values: Iterable[float]) -> Spread | None:
    """Return mean and percentiles of values; None if there are none."""
    array = np.fromiter(values, np.float64)
    if not len(array):
        return None
    p50, p90, p95, p99 = map(float, np.percentile(array, PERCENTILES))
    return Spread(count=len(array), mean=float(array.mean()), p50=p50, p90=p90, p95=p95, p99=p99)


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Latencies of the complete answers of some requests; None where there are none."""

    ttft: Spread | None
    tpot: Spread | None
    itl: Spread | None
    e2el: Spread | None


def latency(results: Sequence[RequestResult]) -> Latency:
    """Return the latencies of those results that are complete answers."""
    done = [result for result in results if result.status == OK]
    tpots = (result.tpot for result in done)
    return Latency(
        ttft=spread(result.ttft for result in done),
        tpot=spread(tpot for tpot in tpots if tpot is not None),
        itl=spread(gap for result in done for gap in result.gaps),
        e2el=spread(result.e2el for result in done),
    )


class Fairness(msgspec.Struct, frozen=True, kw_only=True):
    """How evenly tenants were served.

    Attributes:
        jain: Jain's index of their service: 1 where all got as much, 1/n where one got everything.
            Service is a tenant's tokens, of prompts and answers, that were served until the last
            request arrived: later, whoever is left gets everything.
        ttft_ratio: the highest of their median TTFTs, divided by the lowest.
        service: tokens by tenant.
    """

    jain: float
    ttft_ratio: float
    service: dict[str, float]


def fairness(results: Sequence[RequestResult]) -> Fairness | None:
    """Return how evenly tenants were served; None where there are not two with answers."""
    end = max((result.due for result in results), default=0.0)
    service: dict[str, float] = {}
    ttfts: dict[str, list[float]] = {}
    for result in results:
        service[result.tenant] = service.get(result.tenant, 0.0) + _served(result, end)
        if result.status == OK:
            ttfts.setdefault(result.tenant, []).append(result.ttft)
    if len(service) < 2 or not ttfts:
        return None
    medians = [float(np.median(values)) for values in ttfts.values()]
    lowest = min(medians)
    return Fairness(
        jain=jain_index(service.values()),
        ttft_ratio=max(medians) / lowest if lowest else 1.0,
        service=service,
    )


def _served(result: RequestResult, end: float) -> float:
    """Return the tokens of a request that were served by a time."""
    before = sum(arrival <= end for arrival in result.arrivals)
    if not before:
        return 0.0
    return result.prompt_tokens + result.completion_tokens * before / len(result.arrivals)


def jain_index(values: Iterable[float]) -> float:
    """Return Jain's fairness index: (sum x)^2 / (n sum x^2); 1 where all values are 0.

    Source: Jain, Chiu and Hawe, 1984, DEC-TR-301.
    """
    array = np.fromiter(values, np.float64)
    squares = float((array * array).sum())
    return float(array.sum()) ** 2 / (len(array) * squares) if squares else 1.0


class ServingMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a load.

    Attributes:
        requests: how many there were, turns of failed programs included.
        completed: complete answers.
        failures: how many of the others there were, by status.
        seconds: from the first request's time to the last answer's end.
        request_throughput: complete answers per second.
        output_throughput: tokens of answers per second.
        goodput: complete answers per second that kept the limits; None without limits.
        good_share: what share of all requests these are.
        cached_share: share of the prompts' tokens that was in the cache.
        latency: of all requests.
        by_kind: of those of each kind, where there are several.
        lateness: by how much requests were sent late.
        fairness: between tenants; None where there are not several.
        programs: from a program's first request to its last answer, of those that completed; None
            without programs.
    """

    requests: int
    completed: int
    failures: dict[str, int]
    seconds: float
    request_throughput: float
    output_throughput: float
    goodput: float | None
    good_share: float | None
    cached_share: float
    latency: Latency
    by_kind: dict[str, Latency]
    lateness: Spread | None
    fairness: Fairness | None
    programs: Spread | None


def summarise(results: Sequence[RequestResult], limits: Limits | None = None) -> ServingMetrics:
    """Return the figures of a load.

    Args:
        results: of all its requests; at least one.
        limits: what counts as goodput; None doesn't count it.
    """
    done = [result for result in results if result.status == OK]
    sent = [result for result in results if result.status != UNSENT]
    seconds = max(result.ended for result in results) - min(result.due for result in sent)
    good = None if limits is None else sum(limits.are_met(result) for result in done)
    prompts = sum(result.prompt_tokens for result in results)
    kinds = sorted({result.kind for result in results})
    per_second = 1.0 / seconds if seconds > 0 else 0.0
    return ServingMetrics(
        requests=len(results),
        completed=len(done),
        failures=dict(Counter(result.status for result in results if result.status != OK)),
        seconds=seconds,
        request_throughput=len(done) * per_second,
        output_throughput=sum(result.completion_tokens for result in results) * per_second,
        goodput=None if good is None else good * per_second,
        good_share=None if good is None else good / len(results),
        cached_share=sum(result.cached_tokens for result in results) / prompts if prompts else 0.0,
        latency=latency(results),
        by_kind={kind: latency(_of_kind(results, kind)) for kind in kinds if len(kinds) > 1},
        lateness=spread(max(result.sent - result.due, 0.0) for result in sent),
        fairness=fairness(results),
        programs=spread(program_seconds(results).values()),
    )


def program_seconds(results: Sequence[RequestResult]) -> Mapping[int, float]:
    """Return how long each program took, of those all of whose turns were answered."""
    turns: dict[int, list[RequestResult]] = {}
    for result in results:
        if result.program is not None:
            turns.setdefault(result.program, []).append(result)
    return {
        program: max(turn.ended for turn in own) - min(turn.sent for turn in own)
        for program, own in turns.items()
        if all(turn.status == OK for turn in own)
    }


def _of_kind(results: Sequence[RequestResult], kind: str) -> list[RequestResult]:
    return [result for result in results if result.kind == kind]
