"""DistServe's placement search: how many workers of each kind serve a rate within both targets.

Source: DistServe (Zhong et al., OSDI 2024, arXiv 2401.09670), section 4.1, algorithm 1: each phase
is simulated alone, the highest rate that one worker serves is found by bisection, and workers are
replicated up to the wanted rate. The paper also chooses how each worker divides the model among its
devices; the engine's workers don't, so there is one kind of each. A request has to meet both
targets, which each phase alone doesn't know of: the whole deployment is simulated with other
arrivals, and workers are added to the phase that misses its target more often until it keeps both,
and then taken away as long as it still does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil

import msgspec

from benchmarks.disaggregation.simulated_workers import DecodeWorker, PrefillWorker, Transfer
from benchmarks.disaggregation.simulator import (
    Deployment,
    simulate,
    simulate_decode,
    simulate_prefill,
)
from benchmarks.disaggregation.workload import (
    Arrival,
    Lengths,
    Served,
    Targets,
    attainment,
    poisson_arrivals,
)

_STEPS = 8
"""Of the bisection: the rate is known to less than a hundredth."""
_DOUBLINGS = 20
_MAX_WORKERS = 32


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Workers for a rate.

    Attributes:
        rate: requests per second.
        prefill_goodput, decode_goodput: requests per second that one worker of each kind serves,
            the other phase being no matter.
        prefill, decode: how many workers of each kind.
        attainment: share of requests that meet both targets, simulated with other arrivals than
            those that the workers were chosen by.
    """

    rate: float
    prefill_goodput: float
    decode_goodput: float
    prefill: int
    decode: int
    attainment: float


@dataclass(frozen=True)
class PlacementSearch:
    """What a placement is searched for.

    Attributes:
        prefill, decode: a worker of each kind.
        transfer: between them.
        lengths: of past requests, which others are drawn from.
        targets: of their latency.
        seed: of arrivals; what is chosen is checked with another one.
        requests: of each simulation.
    """

    prefill: PrefillWorker
    decode: DecodeWorker
    transfer: Transfer
    lengths: Sequence[Lengths]
    targets: Targets
    seed: int = 0
    requests: int = 1000

    @cached_property
    def prefill_goodput(self) -> float:
        """Requests per second whose first tokens one prefill worker has there in time."""
        return self._goodput(
            lambda arrivals: simulate_prefill(arrivals, [self.prefill]),
            lambda served: served.ttft <= self.targets.ttft,
        )

    @cached_property
    def decode_goodput(self) -> float:
        """Requests per second that one decode worker decodes fast enough."""
        return self._goodput(
            lambda arrivals: simulate_decode(arrivals, [self.decode], self.transfer),
            lambda served: served.tpot <= self.targets.tpot,
        )

    def place(self, rate: float) -> Placement:
        """Return the workers for so many requests per second.

        Raises:
            MidfillError: a request is too long for the workers.
        """
        prefill = _workers(rate, self.prefill_goodput)
        decode = _workers(rate, self.decode_goodput)
        served = self.served(rate, prefill, decode)
        while not self._keeps_both(served) and max(prefill, decode) < _MAX_WORKERS:
            late = sum(one.ttft > self.targets.ttft for one in served)
            slow = sum(one.tpot > self.targets.tpot for one in served)
            prefill, decode = (prefill + 1, decode) if late >= slow else (prefill, decode + 1)
            served = self.served(rate, prefill, decode)
        # Several workers share what comes in bursts, so they serve more than one alone does.
        while prefill > 1 and self._keeps_both(self.served(rate, prefill - 1, decode)):
            prefill -= 1
        while decode > 1 and self._keeps_both(self.served(rate, prefill, decode - 1)):
            decode -= 1
        reached = attainment(self.served(rate, prefill, decode), self.targets)
        return Placement(
            rate=rate,
            prefill_goodput=self.prefill_goodput,
            decode_goodput=self.decode_goodput,
            prefill=prefill,
            decode=decode,
            attainment=reached,
        )

    def served(self, rate: float, prefill: int, decode: int) -> list[Served]:
        """Simulate so many workers, with other arrivals than those of the goodputs."""
        deployment = Deployment((self.prefill,) * prefill, (self.decode,) * decode, self.transfer)
        arrivals = poisson_arrivals(self.lengths, rate, self.requests, self.seed + 1)
        return simulate(arrivals, deployment)

    def _keeps_both(self, served: Sequence[Served]) -> bool:
        return attainment(served, self.targets) >= self.targets.share

    def _goodput(
        self,
        serve: Callable[[list[Arrival]], list[Served]],
        meets: Callable[[Served], bool],
    ) -> float:
        """Return the highest rate at which enough requests meet a target; 0 if they never do.

        Args:
            serve: simulates one worker.
            meets: whether a request does.
        """

        def keeps_up(rate: float) -> bool:
            served = serve(poisson_arrivals(self.lengths, rate, self.requests, self.seed))
            return sum(map(meets, served)) >= self.targets.share * len(served)

        high = 1 / 1024
        if not keeps_up(high):
            return 0.0
        for _ in range(_DOUBLINGS):
            if not keeps_up(high):
                break
            high *= 2
        low = high / 2
        for _ in range(_STEPS):
            middle = (low + high) / 2
            low, high = (middle, high) if keeps_up(middle) else (low, middle)
        return low


def _workers(rate: float, goodput: float) -> int:
    """Return how many workers serve a rate; as many as are tried where one serves none."""
    return min(max(ceil(rate / goodput), 1), _MAX_WORKERS) if goodput > 0 else _MAX_WORKERS
