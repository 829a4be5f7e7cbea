"""What a serving load is: requests with their arrival times, and the options that decide them."""

import itertools
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from midfill.errors import OptionError

WorkloadName = Literal["independent", "editing", "agents", "shared-prefix", "mixed"]


class WorkloadOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A load; the same options give the same requests.

    Attributes:
        workload: which, see ``workloads``.
        request_rate: requests per second on average, over all users; infinity sends all at once.
        burstiness: shape of the gamma distribution of the gaps between arrivals: 1 is a Poisson
            process, below 1 arrivals come in bursts, above 1 they are more regular.
        requests: how many there are, at most.
        duration: seconds in which they arrive; None sets no limit.
        users: who send them: editors with a document each, or prefixes that are shared.
        tenants: among whom the users are divided evenly.
        characters: of a prompt or a document, on average.
        output_tokens: of an answer, on average where answers differ.
        turns: of an agent's program.
        pause: seconds that a tool takes between two turns, on average over tools.
        batch: requests that share a prefix and arrive together.
        deadline: seconds after which a client gives up, on average; None waits for ever.
        seed: of all random choices.

    Raises:
        OptionError: the rate, the burstiness or the duration isn't positive.
    """

    workload: WorkloadName = "independent"
    request_rate: float = 2.0
    burstiness: float = 1.0
    requests: int = 100
    duration: float | None = None
    users: int = 8
    tenants: int = 1
    characters: int = 2000
    output_tokens: int = 32
    turns: int = 4
    pause: float = 1.0
    batch: int = 8
    deadline: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0 or not self.burstiness > 0:
            raise OptionError("--request-rate and --burstiness must be above 0")
        if self.duration is not None and not self.duration > 0:
            raise OptionError("--duration must be above 0")

    def tenant_of(self, user: int) -> str:
        """Return the tenant that a user belongs to."""
        return f"tenant-{user % self.tenants}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedRequest:
    """A request of a load.

    Attributes:
        index: its place in the load.
        arrival: seconds after the load's start; of a later turn, after the turn before has ended.
        prompt: the text, or what comes before the caret. Of a later turn, what is appended to the
            prompt and the answer of the turn before.
        suffix: what comes after the caret; None where there is no caret.
        max_tokens: of the answer, which is that long.
        kind: of request, where a load has several.
        user: who sends it.
        tenant: whom the user belongs to.
        document: the document that it is for; "" if it is for none.
        deadline: seconds after its arrival when its client gives up; None is never.
        program: the program that it is a turn of; None where it stands alone.
        turn: of the program, from 0.
        follows: ``index`` of the turn before; None for a first turn.
        is_last_turn: whether it is the program's last.
        tool: what the answer calls, whose result the next turn brings; "" for nothing.
        priority: lower values are more important.
        expected_tokens: what the client says of the answer's length, the mean of its kind; None
            says nothing.
    """

    index: int
    arrival: float
    prompt: str
    suffix: str | None = None
    max_tokens: int
    kind: str = "request"
    user: int = 0
    tenant: str = ""
    document: str = ""
    deadline: float | None = None
    program: int | None = None
    turn: int = 0
    follows: int | None = None
    is_last_turn: bool = False
    tool: str = ""
    priority: int = 0
    expected_tokens: int | None = None

    @property
    def hints(self) -> dict[str, Any]:
        """What the client says for the scheduler: fields of midfill's API that aren't defaults."""
        said = {
            "priority": self.priority or None,
            "expected_tokens": self.expected_tokens,
            "job_id": None if self.program is None else f"program-{self.program}",
            "is_last_step": self.is_last_turn or None,
        }
        return {name: value for name, value in said.items() if value is not None}


def arrival_times(rate: float, burstiness: float, rng: random.Random) -> Iterator[float]:
    """Yield the times of a renewal process with gamma-distributed gaps, without end.

    Args:
        rate: arrivals per second on average; infinity has them all at 0.
        burstiness: shape of the distribution; the gaps' coefficient of variation is its root's
            inverse.
        rng: draws the gaps.
    """
    now = 0.0
    while True:
        if math.isfinite(rate):
            now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
        yield now


def limited(times: Iterator[float], count: int, duration: float | None) -> list[float]:
    """Return the first ``count`` times, and none after ``duration``.

    Raises:
        OptionError: there is none.
    """
    end = math.inf if duration is None else duration
    found = list(itertools.takewhile(lambda time: time <= end, itertools.islice(times, count)))
    if not found:
        raise OptionError("no request arrives within --duration at this --request-rate")
    return found


def followers(requests: Sequence[TimedRequest]) -> dict[int, TimedRequest]:
    """Return the later turn that follows each request, by the request's ``index``."""
    return {request.follows: request for request in requests if request.follows is not None}


def next_turn(earlier: str, answer: str, turn: TimedRequest) -> str:
    """Return a later turn's whole prompt.

    Args:
        earlier: the whole prompt of the turn before.
        answer: what was answered to it.
        turn: the later one.
    """
    return earlier + answer + turn.prompt
