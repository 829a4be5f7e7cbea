"""The search finds what trying all deployments finds, and what it chooses keeps the targets."""

from itertools import pairwise

import pytest

from benchmarks.disaggregation.latency import DecodeCost, DecodeLatency, PrefillLatency
from benchmarks.disaggregation.placement import PlacementSearch
from benchmarks.disaggregation.simulated_workers import DecodeWorker, PrefillWorker, Transfer
from benchmarks.disaggregation.simulator import simulate_prefill
from benchmarks.disaggregation.workload import Lengths, Targets, attainment, poisson_arrivals
from midfill.engine.disaggregated.workers import Pool

POOL = Pool(pages=5000, page_tokens=1)
STEP = DecodeCost(0.004, 0.0, 0.002)  # a batch of n takes 4 + 2n ms per step
SEARCH = PlacementSearch(
    prefill=PrefillWorker(latency=PrefillLatency(0.0, 0.001, 0.0), pool=POOL, saturating_tokens=1),
    decode=DecodeWorker(latency=DecodeLatency(STEP, STEP, 1), pool=POOL, max_batch=32),
    transfer=Transfer(constant=0.001),
    lengths=[Lengths(60, 20), Lengths(140, 40)],
    targets=Targets(ttft=0.5, tpot=0.02),
    requests=200,
)


def keeps_both(search: PlacementSearch, rate: float, prefill: int, decode: int) -> bool:
    served = search.served(rate, prefill, decode)
    return attainment(served, search.targets) >= search.targets.share


@pytest.mark.parametrize("rate", [2.0, 12.0, 30.0])
def test_no_deployment_of_fewer_workers_keeps_both_targets(rate: float) -> None:
    found = SEARCH.place(rate)
    assert keeps_both(SEARCH, rate, found.prefill, found.decode)
    fewer = [
        (prefill, decode)
        for prefill in range(1, found.prefill + found.decode)
        for decode in range(1, found.prefill + found.decode - prefill)
    ]
    assert not any(keeps_both(SEARCH, rate, *workers) for workers in fewer)


def test_what_is_chosen_keeps_the_targets_with_other_arrivals() -> None:
    found = SEARCH.place(20.0)
    assert found.attainment >= SEARCH.targets.share
    assert found.attainment == attainment(
        SEARCH.served(20.0, found.prefill, found.decode), SEARCH.targets
    )


def test_a_higher_rate_takes_no_fewer_workers() -> None:
    placements = [SEARCH.place(rate) for rate in (1.0, 8.0, 25.0, 50.0)]
    for before, after in pairwise(placements):
        assert before.prefill <= after.prefill
        assert before.decode <= after.decode
    assert len({found.prefill_goodput for found in placements}) == 1


def test_goodput_is_the_rate_up_to_which_the_target_is_kept() -> None:
    goodput = SEARCH.prefill_goodput
    assert 1 < goodput < 10  # a mean prompt takes a tenth of a second

    def share(rate: float) -> float:
        arrivals = poisson_arrivals(SEARCH.lengths, rate, SEARCH.requests, SEARCH.seed)
        served = simulate_prefill(arrivals, [SEARCH.prefill])
        return sum(one.ttft <= SEARCH.targets.ttft for one in served) / len(served)

    assert share(goodput) >= SEARCH.targets.share > share(1.02 * goodput)


def test_a_target_that_one_request_misses_alone_has_no_goodput() -> None:
    impatient = PlacementSearch(
        prefill=SEARCH.prefill,
        decode=SEARCH.decode,
        transfer=SEARCH.transfer,
        lengths=SEARCH.lengths,
        targets=Targets(ttft=0.01, tpot=0.02),
        requests=20,
    )
    assert impatient.prefill_goodput == 0.0
    assert impatient.place(1.0).attainment == 0.0
