"""What is asked of workers: lengths of prompts and answers, arrivals, and targets of latency."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import NamedTuple, Protocol

import msgspec

from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import MidfillError


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of one request: of its prompt, and of its answer, which has at least one."""

    prompt: int
    output: int

    def __post_init__(self) -> None:
        if self.prompt < 1 or self.output < 1:
            raise MidfillError(
                f"a request has at least one token of prompt and one of output, not {self.prompt}"
                f" and {self.output}"
            )


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the second at which it arrives."""

    seconds: float
    lengths: Lengths


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request's latency must not exceed.

    Attributes:
        ttft: seconds to the first token.
        tpot: seconds per token after it.
        share: of the requests that have to meet both.
    """

    ttft: float
    tpot: float
    share: float = 0.9

    def scaled(self, factor: float) -> "Targets":
        """Return both times multiplied (the paper's SLO scale)."""
        return Targets(self.ttft * factor, self.tpot * factor, self.share)


@dataclass(frozen=True, slots=True)
class Served:
    """How a request was served.

    Attributes:
        arrival: of the request.
        first_token, finish: seconds since the same moment as its arrival.
    """

    arrival: Arrival
    first_token: float
    finish: float

    @property
    def ttft(self) -> float:
        """Seconds from its arrival to its first token."""
        return self.first_token - self.arrival.seconds

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 without any."""
        further = self.arrival.lengths.output - 1
        return (self.finish - self.first_token) / further if further else 0.0

    def meets(self, targets: Targets) -> bool:
        """Whether it was fast enough."""
        return self.ttft <= targets.ttft and self.tpot <= targets.tpot


def attainment(served: Sequence[Served], targets: Targets) -> float:
    """Return the share of requests that met both targets."""
    return sum(request.meets(targets) for request in served) / len(served) if served else 0.0


def poisson_arrivals(
    history: Sequence[Lengths], rate: float, count: int, seed: int
) -> list[Arrival]:
    """Return requests with lengths drawn from a history, arriving by a Poisson process.

    The same seed gives the same lengths in the same order at every rate, and gaps that differ by a
    factor only, so that rates can be compared.

    Raises:
        MidfillError: the history is empty.
    """
    if not history:
        raise MidfillError("lengths are drawn from past requests, and there are none")
    rng = random.Random(seed)
    now, found = 0.0, list[Arrival]()
    for _ in range(count):
        now += rng.expovariate(1.0) / rate if rate > 0 else inf
        found.append(Arrival(now, rng.choice(history)))
    return found


_FIRST_TOKEN_ID = 50  # beyond bytes and special tokens in most vocabularies


class DisaggregationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Attributes:
        prompts, outputs: tokens of requests; each is drawn from these.
        requests: of each run.
        simulated: requests of each simulation when workers are searched for.
        utilisation: of the prefill worker; the rate follows from it.
        seed: of lengths and arrivals.
        patience: targets as multiples of the mean prefill, and of a step of two answers.
    """

    prompts: tuple[int, ...] = (64, 128, 192, 256)
    outputs: tuple[int, ...] = (8, 16, 32)
    requests: int = 150
    simulated: int = 1000
    utilisation: float = 0.5
    seed: int = 0
    patience: tuple[float, float] = (3.0, 2.0)

    @property
    def lengths(self) -> list[Lengths]:
        """Return what requests are drawn from."""
        return [Lengths(prompt, output) for prompt in self.prompts for output in self.outputs]


class Submits(Protocol):
    """What serves requests."""

    def submit(self, *requests: EngineRequest) -> OutputStream: ...


class LoadResult(NamedTuple):
    """How requests were served, all seconds between two outputs, and how long all of it took."""

    served: list[Served]
    gaps: list[float]
    seconds: float


async def serve(
    engine: Submits, arrivals: Sequence[Arrival], seed: int, on_end: Callable[[int], None]
) -> LoadResult:
    """Send requests as they arrive.

    Args:
        engine: serves them.
        arrivals: when they arrive, and their lengths.
        seed: of the prompts' tokens.
        on_end: called with how many have ended.
    """
    rng = random.Random(seed)
    prompts = [random_prompt(each.lengths.prompt, rng) for each in arrivals]
    started = time.perf_counter()
    gaps: list[float] = []
    ended = 0

    async def serve(arrival: Arrival, prompt: list[int]) -> Served:
        nonlocal ended
        await asyncio.sleep(max(0.0, started + arrival.seconds - time.perf_counter()))
        times = await output_times(engine, greedy(prompt, arrival.lengths.output))
        gaps.extend(after - before for before, after in pairwise(times))
        ended += 1
        on_end(ended)
        return Served(arrival, times[0] - started, times[-1] - started)

    served = await asyncio.gather(*map(serve, arrivals, prompts))
    return LoadResult(list(served), gaps, time.perf_counter() - started)


async def output_times(engine: Submits, request: EngineRequest) -> list[float]:
    """Return when each of a request's outputs has come, by ``time.perf_counter``."""
    with engine.submit(request) as outputs:
        return [time.perf_counter() async for _ in outputs]


def random_prompt(tokens: int, rng: random.Random) -> list[int]:
    """Return random tokens, so that nothing of a prompt is cached."""
    return [rng.randrange(_FIRST_TOKEN_ID, _FIRST_TOKEN_ID + 200) for _ in range(tokens)]


def greedy(prompt: list[int], output: int) -> EngineRequest:
    """Return a request for exactly so many tokens."""
    sampling = EngineSamplingParams(max_tokens=output, temperature=0.0, ignore_eos=True)
    return EngineRequest(
        request_id=f"{random.getrandbits(64):x}", token_ids=prompt, sampling=sampling
    )
