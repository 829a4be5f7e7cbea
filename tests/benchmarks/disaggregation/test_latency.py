import pytest

from benchmarks.disaggregation.latency import (
    DecodeCost,
    DecodeLatency,
    DecodeSample,
    PrefillLatency,
    PrefillSample,
    fit_decode,
    fit_prefill,
)
from midfill.errors import MidfillError


def prefill_samples(model: PrefillLatency) -> list[PrefillSample]:
    batches = [(64,), (256,), (512, 128), (1024,), (2048,), (300, 300, 300)]
    return [PrefillSample(batch, model.seconds(batch)) for batch in batches]


def test_a_prefill_that_follows_the_model_is_found_exactly() -> None:
    model = PrefillLatency(0.02, 0.001, 3e-7)
    found = fit_prefill(prefill_samples(model))
    assert found.seconds((700, 90)) == pytest.approx(model.seconds((700, 90)))


def test_coefficients_are_never_negative() -> None:
    samples = [
        PrefillSample((tokens,), 0.001 * tokens**0.9) for tokens in (16, 64, 256, 1024, 4096)
    ]
    found = fit_prefill(samples)
    assert min(found.constant, found.per_token, found.per_square) >= 0


def test_small_and_large_batches_of_decodes_cost_differently() -> None:
    model = DecodeLatency(DecodeCost(0.02, 1e-6, 0.001), DecodeCost(0.01, 2e-6, 0.004), 4)
    samples = [
        DecodeSample((context,) * size, model.seconds(size, context * size))
        for size in (1, 2, 3, 4, 6, 8)
        for context in (100, 1000)
    ]
    found = fit_decode(samples, threshold=4)
    for size in (2, 7):
        assert found.seconds(size, 500 * size) == pytest.approx(model.seconds(size, 500 * size))


def test_batches_of_one_kind_alone_stand_for_the_other() -> None:
    cost = DecodeCost(0.02, 1e-6, 0.001)
    model = DecodeLatency(cost, cost, 100)
    samples = [
        DecodeSample((context,) * size, model.seconds(size, context * size))
        for size in (1, 2, 3)
        for context in (100, 1000)
    ]
    found = fit_decode(samples, threshold=8)
    assert found.large == found.small
    assert found.seconds(2, 500) == pytest.approx(model.seconds(2, 500))


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [PrefillSample((100,), 0.1)] * 5,
        [PrefillSample((tokens,), 0.0) for tokens in (1, 2, 3)],
    ],
)
def test_times_that_determine_nothing_are_refused(samples: list[PrefillSample]) -> None:
    with pytest.raises(MidfillError, match="measure at least three different sizes"):
        fit_prefill(samples)
