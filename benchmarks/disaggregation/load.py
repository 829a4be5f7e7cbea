"""The load of ``python -m benchmarks disaggregation``, and how it is sent to whatever serves it."""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import msgspec

from midfill.engine.disaggregated.workload import Arrival, Lengths, Served
from midfill.engine.process.output_stream import OutputStream
from midfill.engine.request import EngineRequest, EngineSamplingParams

_FIRST_TOKEN_ID = 50  # beyond bytes and special tokens in most vocabularies


class DisaggregationLoad(msgspec.Struct, frozen=True, kw_only=True):
    """The load.

    Attributes:
        prompts, outputs: tokens of requests; each is drawn from these.
        requests: of each run.
        utilisation: of the prefill worker; the rate follows from it.
        seed: of lengths and arrivals.
        patience: targets as multiples of the mean prefill, and of a step of two answers.
    """

    prompts: tuple[int, ...] = (64, 128, 192, 256)
    outputs: tuple[int, ...] = (8, 16, 32)
    requests: int = 150
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

    async def one(arrival: Arrival, prompt: list[int]) -> Served:
        nonlocal ended
        await asyncio.sleep(max(0.0, started + arrival.seconds - time.perf_counter()))
        times = await output_times(engine, greedy(prompt, arrival.lengths.output))
        gaps.extend(after - before for before, after in pairwise(times))
        ended += 1
        on_end(ended)
        return Served(arrival, times[0] - started, times[-1] - started)

    served = await asyncio.gather(*map(one, arrivals, prompts))
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
