"""What is asked of workers: lengths of prompts and answers, arrivals, and targets of latency."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

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
    return sum(one.meets(targets) for one in served) / len(served) if served else 0.0


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


@dataclass(frozen=True, slots=True)
class Demand:
    """What a placement was chosen for.

    Attributes:
        rate: requests per second.
        prompt, output: mean tokens.
    """

    rate: float
    prompt: float
    output: float

    def differs(self, other: "Demand", tolerance: float = 0.25) -> bool:
        """Whether another demand is so different that a new placement should be searched."""
        pairs = (
            (self.rate, other.rate), (self.prompt, other.prompt), (self.output, other.output),
        )  # fmt: skip
        return any(abs(after - before) > tolerance * before for before, after in pairs)
