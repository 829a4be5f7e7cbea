"""The sampler against a naive reference that always looks at the whole vocabulary.

Draws are stratified instead of random: with draws (i + 1/2) / N, a correct sampler chooses every
token p * N times, plus or minus one, in whatever order it walks through the tokens.
"""

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill.arrays import Float32Array, Float64Array
from midfill.engine.request import EngineSamplingParams
from midfill.engine.sampling import sampler
from midfill.engine.sampling.sampler import (
    RandomStream,
    SampledToken,
    SampleRow,
)
from midfill.runners.cpu.logits import NUMPY_LOGITS
from midfill.runners.forward.logits import log_softmax

STRATA = 1000


def sample(logits: Float32Array, rows: list[SampleRow]) -> list[SampledToken | None]:
    return sampler.sample(NUMPY_LOGITS, logits, rows)


def row(
    params: EngineSamplingParams,
    draw: float = 0.0,
    index: int = 0,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
) -> SampleRow:
    history = np.array(prompt + output, dtype=np.int32)
    return SampleRow(index, params, history, len(prompt), draw)


def tokens(sampled: list[SampledToken | None]) -> list[int]:
    assert all(one is not None for one in sampled)
    return [one.token_id for one in sampled if one is not None]


def frequencies(
    logits: Float32Array,
    params: EngineSamplingParams,
    prompt: tuple[int, ...] = (),
    output: tuple[int, ...] = (),
) -> Counter[int]:
    draws = (np.arange(STRATA) + 0.5) / STRATA
    return Counter(tokens(sample(logits, [row(params, u, 0, prompt, output) for u in draws])))


def reference(logits: Float64Array, params: EngineSamplingParams) -> Float64Array:
    """Probabilities by the definitions, filter after filter, each over the whole vocabulary."""
    scores = logits / params.temperature

    def softmax(values: Float64Array) -> Float64Array:
        weights = np.exp(values - values.max())
        return weights / weights.sum()

    def keep(mask: npt.NDArray[np.bool_]) -> None:
        scores[~mask] = -np.inf

    if params.top_k:
        keep(scores >= np.sort(scores)[-min(params.top_k, len(scores))])
    if params.top_p < 1.0:
        probabilities = softmax(scores)
        order = probabilities.argsort()[::-1]
        before = probabilities[order].cumsum() - probabilities[order]
        mask = np.zeros(len(scores), dtype=bool)
        mask[order[before < params.top_p]] = True
        keep(mask)
    if params.min_p > 0.0:
        probabilities = softmax(scores)
        keep(probabilities >= params.min_p * probabilities.max())
    if params.typical_p < 1.0:
        probabilities = softmax(scores)
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = np.where(probabilities > 0, -np.log(probabilities), np.inf)
            entropy = np.nansum(np.where(probabilities > 0, probabilities * surprise, 0.0))
        order = np.abs(surprise - entropy).argsort(kind="stable")
        before = probabilities[order].cumsum() - probabilities[order]
        mask = np.zeros(len(scores), dtype=bool)
        mask[order[before < params.typical_p]] = True
        keep(mask)
    return softmax(scores)


def assert_distribution(logits: Float32Array, params: EngineSamplingParams) -> None:
    counts = frequencies(logits, params)
    expected = reference(logits[0].astype(np.float64), params) * STRATA
    for token in range(logits.shape[1]):
        assert abs(counts[token] - expected[token]) <= 1.01, (token, params)
    assert all(expected[token] > 0 for token in counts), "a token that was filtered out was chosen"


def random_logits(vocab: int, seed: int, spread: float = 3.0) -> Float32Array:
    normal = np.random.default_rng(seed).standard_normal((1, vocab), np.float32)
    return normal * np.float32(spread)


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 2.5},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 500},
        {"top_p": 0.9},
        {"top_p": 0.01},
        {"top_p": 0.999},
        {"min_p": 0.2},
        {"min_p": 1.0},
        {"typical_p": 0.6},
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        {"temperature": 1.5, "top_k": 30, "top_p": 0.95, "min_p": 0.05, "typical_p": 0.9},
    ],
)
def test_filters_give_the_distribution_they_define(fields: dict[str, float]) -> None:
    assert_distribution(random_logits(60, seed=1), EngineSamplingParams(**fields))


@pytest.mark.parametrize("spread", [0.05, 0.5, 1.5, 6.0])
@pytest.mark.parametrize("fields", [{"top_p": 0.9}, {"min_p": 0.1}, {"top_p": 0.97, "min_p": 0.5}])
def test_flat_and_sharp_distributions_over_a_large_vocabulary(
    spread: float, fields: dict[str, float]
) -> None:
    # Nuclei from a few tokens to nearly all 6,000 of them. Counts are added up, so that a tail cut
    # too early shows although each of its tokens is rare.
    params = EngineSamplingParams(**fields)
    logits = random_logits(6000, 2, spread)
    counts = frequencies(logits, params)
    expected = reference(logits[0].astype(np.float64), params) * STRATA
    drawn = np.array([counts[token] for token in range(6000)])
    assert np.abs(drawn.cumsum() - expected.cumsum()).max() <= 1.01
    assert (expected[drawn > 0] > 0).all()


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.floats(0.1, 3.0),
    st.integers(0, 50),
    st.floats(0.05, 1.0),
    st.floats(0.0, 1.0),
    st.floats(0.05, 1.0),
)
def test_any_combination_of_filters(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, typical_p: float
) -> None:
    params = EngineSamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p
    )
    assert_distribution(random_logits(40, seed, spread=2.0), params)


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"top_k": 20},
        {"top_k": 300},
        {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.95},
        {"min_p": 0.05},
        {"typical_p": 0.7},
        {"top_p": 0.99, "typical_p": 0.7},
    ],
)
def test_a_real_vocabulary(spread: float, fields: dict[str, float]) -> None:
    # Tokens are walked in order of id, so the naive choice is known for each single draw.
    params = EngineSamplingParams(**fields)
    logits = random_logits(49_157, 3, spread)
    draws = (np.arange(40) + 0.5) / 40
    cumulative = reference(logits[0].astype(np.float64), params).cumsum()
    chosen = tokens(sample(logits, [row(params, draw) for draw in draws]))
    # A cumulative sum of float32 probabilities is good to about this much.
    assert (cumulative[chosen] >= draws - 1e-5).all()
    before = np.where(np.array(chosen) > 0, cumulative[np.array(chosen) - 1], 0.0)
    assert (before <= draws + 1e-5).all()


def test_greedy_takes_the_most_likely_whatever_the_draw() -> None:
    logits = random_logits(100, 3)
    best = int(logits.argmax())
    greedy = EngineSamplingParams(temperature=0.0, top_p=0.5, top_k=3)
    assert tokens(sample(logits, [row(greedy, u) for u in (0.0, 0.5, 0.999)])) == [best] * 3


@pytest.mark.parametrize("temperature", [1e-300, 1.1e-5, 1e-2, 100.0])
def test_extreme_temperatures_do_not_overflow(temperature: float) -> None:
    logits = random_logits(50, 4) * 1000
    for extra in ({}, {"top_k": 5}, {"top_p": 0.9}):
        params = EngineSamplingParams(temperature=temperature, **extra)
        chosen = tokens(sample(logits, [row(params, u) for u in (0.0, 0.37, 0.9999999)]))
        if temperature < 1:
            assert set(chosen) == {int(logits.argmax())}
        assert all(0 <= token < 50 for token in chosen)


@pytest.mark.parametrize("top_k", [0, 2, 5])
@pytest.mark.parametrize("temperature", [0.2, 1.0])
def test_a_token_is_alone_from_exactly_its_own_probability_on(
    top_k: int, temperature: float
) -> None:
    others = [0.05, 0.05, 0.05, 0.05, 0.0][: (top_k or 6) - 1]
    weights = np.array([*others, 0.8, *[0.05, 0.05, 0.05, 0.05, 0.0][len(others) :]])
    logits = (np.log(np.maximum(weights, 1e-30)) * temperature).astype(np.float32)[None]
    own = 0.8 / (0.8 + 0.05 * min((top_k or 5) - 1, 4))
    for top_p, alone in ((own - 1e-4, True), (own + 1e-4, False)):
        params = EngineSamplingParams(temperature=temperature, top_k=top_k, top_p=top_p)
        chosen = frequencies(logits, params)
        assert (set(chosen) == {len(others)}) == alone


def test_the_largest_draw_selects_a_kept_token() -> None:
    logits = np.array([[0.0, -1.0, -2.0, -200.0, -np.inf]], np.float32)
    last = math.nextafter(1.0, 0.0)
    for extra in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.1}, {"typical_p": 0.99}):
        (chosen,) = tokens(sample(logits, [row(EngineSamplingParams(**extra), last)]))
        assert chosen in (0, 1, 2)
    for seed in range(50):  # sums that round up and down
        kept = EngineSamplingParams(top_p=0.8)
        assert len(tokens(sample(random_logits(50, seed), [row(kept, last)]))) == 1


def test_the_smallest_draw_skips_tokens_that_were_filtered_out() -> None:
    # The most likely token is less surprising than typical here, so typical-p drops it.
    logits = np.array([[1.2, *([0.0] * 30), -np.inf]], np.float32)
    counts = frequencies(logits, EngineSamplingParams(typical_p=0.5))
    assert counts.keys() <= set(range(1, 31))
    (chosen,) = tokens(sample(logits, [row(EngineSamplingParams(typical_p=0.5), 0.0)]))
    assert chosen != 0


class TestPenalties:
    LOGITS = np.array([[2.0, 1.9, -1.0, 0.5, 1.8]], np.float32)
    HOT = EngineSamplingParams(temperature=1.0)

    def chosen(self, prompt: tuple[int, ...], output: tuple[int, ...], **fields: object) -> int:
        params = EngineSamplingParams(temperature=0.0, **fields)
        return tokens(sample(self.LOGITS, [row(params, 0.0, 0, prompt, output)]))[0]

    def distribution(
        self, prompt: tuple[int, ...], output: tuple[int, ...], **fields: object
    ) -> list[int]:
        counts = frequencies(self.LOGITS, EngineSamplingParams(**fields), prompt, output)
        return [counts[token] for token in range(5)]

    def expected(self, logits: list[float]) -> object:
        weights = np.exp(np.array(logits))
        return pytest.approx((weights / weights.sum() * STRATA).tolist(), abs=1.01)

    def test_presence_counts_output_tokens_once(self) -> None:
        assert self.distribution((1,), (0, 0, 3), presence_penalty=0.5) == self.expected(
            [1.5, 1.9, -1.0, 0.0, 1.8]
        )

    def test_frequency_counts_every_time(self) -> None:
        assert self.distribution((1,), (0, 0, 3), frequency_penalty=0.5) == self.expected(
            [1.0, 1.9, -1.0, 0.0, 1.8]
        )

    def test_repetition_counts_the_prompt_too_and_respects_signs(self) -> None:
        assert self.distribution((1, 2), (0,), repetition_penalty=2.0) == self.expected(
            [1.0, 0.95, -2.0, 0.5, 1.8]
        )

    def test_bias_comes_last(self) -> None:
        assert self.distribution(
            (), (0,), repetition_penalty=2.0, logit_bias={0: 3.0, 4: -100.0}
        ) == self.expected([4.0, 1.9, -1.0, 0.5, -98.2])

    def test_they_apply_to_greedy_choice(self) -> None:
        assert self.chosen((), ()) == 0
        assert self.chosen((), (0,), presence_penalty=0.15) == 1
        assert self.chosen((), (), logit_bias={2: 50.0}) == 2

    def test_the_logits_given_are_not_changed(self) -> None:
        before = self.LOGITS.copy()
        self.chosen((1,), (0,), repetition_penalty=2.0, presence_penalty=1.0, logit_bias={1: 3.0})
        assert np.array_equal(self.LOGITS, before)


def test_a_rows_token_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(5)
    logits = np.concatenate(
        [random_logits(3000, seed, spread=0.5 + seed % 4) for seed in range(12)]
    )
    kinds = [
        {},
        {"temperature": 0.0},
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.9},
        {"top_k": 3},
        {"top_p": 0.95},
        {"min_p": 0.02, "temperature": 1.7},
        {"typical_p": 0.5},
        {"presence_penalty": 1.0, "top_p": 0.5},
    ]
    rows = [
        row(
            EngineSamplingParams(**kinds[number % len(kinds)]),
            rng.random(),
            number % 12,
            (1, 2),
            (5,),
        )
        for number in range(120)
    ]
    alone = [tokens(sample(logits, [one]))[0] for one in rows]
    assert tokens(sample(logits, rows)) == alone
    shuffled = rng.permutation(len(rows)).tolist()
    mixed = tokens(sample(logits, [rows[number] for number in shuffled]))
    assert mixed == [alone[number] for number in shuffled]
    # Also when the row is the only one the model returned.
    single = [
        tokens(sample(logits[one.row : one.row + 1].copy(), [one._replace(row=0)]))[0]
        for one in rows
    ]
    assert single == alone


def test_rounding_errors_in_the_logits_do_not_swap_tokens() -> None:
    # Batching changes logits in the last digits, and so which of two near-equal tokens leads.
    one, other = (
        np.array([[1.0, 1.0 + 1e-6, 0.5]], np.float32),
        np.array([[1.0 + 1e-6, 1.0, 0.5]], np.float32),
    )
    draws = (np.arange(97) + 0.5) / 97
    for fields in ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"typical_p": 0.9}):
        rows = [row(EngineSamplingParams(**fields), draw) for draw in draws]
        assert tokens(sample(one, rows)) == tokens(sample(other, rows))


class TestLogitsThatAreNotFinite:
    PARAMS = (
        EngineSamplingParams(temperature=0.0),
        EngineSamplingParams(),
        EngineSamplingParams(top_k=2),
        EngineSamplingParams(top_k=3, typical_p=0.9),
        EngineSamplingParams(typical_p=0.9),
        EngineSamplingParams(top_p=0.9, logprobs=2),
        EngineSamplingParams(presence_penalty=1.0),
    )

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_row_without_a_finite_value_gives_none_and_leaves_others_unchanged(
        self, value: float
    ) -> None:
        logits = np.concatenate([np.full((1, 30), value, np.float32), random_logits(30, 6)])
        for params in self.PARAMS:
            bad, good = sample(logits, [row(params, 0.4, 0), row(params, 0.4, 1)])
            assert bad is None
            assert good == sample(logits[1:], [row(params, 0.4, 0)])[0]

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_values_that_are_not_finite_are_impossible_tokens(self, value: float) -> None:
        logits = np.array([[value, 1.0, 1.5, value]], np.float32)
        for params in self.PARAMS:
            chosen = tokens(sample(logits, [row(params, u) for u in (0.0, 0.5, 0.99)]))
            assert set(chosen) <= {1, 2}


class TestLogprobs:
    def test_they_are_the_models_own_before_temperature_filters_and_penalties(self) -> None:
        logits = random_logits(50, 7)
        params = EngineSamplingParams(
            temperature=0.4, top_k=5, logprobs=3, repetition_penalty=1.5, logit_bias={3: 5.0}
        )
        (sampled,) = sample(logits, [row(params, 0.6, 0, (1,), (2,))])
        assert sampled is not None
        assert sampled.logprobs is not None
        truth = log_softmax(logits[0].astype(np.float64))
        assert sampled.logprobs.logprob == pytest.approx(truth[sampled.token_id].item(), abs=1e-5)
        ids = (-truth).argsort()[:3]
        assert [token for token, _ in sampled.logprobs.top] == ids.tolist()
        assert [value for _, value in sampled.logprobs.top] == pytest.approx(truth[ids].tolist())

    def test_zero_reports_the_chosen_token_alone(self) -> None:
        (sampled,) = sample(random_logits(50, 8), [row(EngineSamplingParams(logprobs=0), 0.5)])
        assert sampled is not None
        assert sampled.logprobs is not None
        assert sampled.logprobs.top == []

    def test_each_row_gets_what_it_asked_for(self) -> None:
        logits = random_logits(50, 9)
        wanted = [None, 0, 2, 50]
        rows = [row(EngineSamplingParams(temperature=0.0, logprobs=count)) for count in wanted]
        reported = [one.logprobs for one in sample(logits, rows) if one is not None]
        assert reported[0] is None
        assert [len(one.top) for one in reported if one is not None] == [0, 2, 50]

    def test_the_most_likely_of_a_real_vocabulary_are_found(self) -> None:
        logits = np.concatenate([random_logits(49_157, seed) for seed in range(4)])
        wanted = [1, 2, 20, 900]
        rows = [row(EngineSamplingParams(logprobs=count), 0.5, n) for n, count in enumerate(wanted)]
        for batch in ([one] for one in rows):
            (sampled,) = sample(logits, batch)
            assert sampled is not None
            assert sampled.logprobs is not None
            truth = (-logits[batch[0].row]).argsort()[: batch[0].params.logprobs]
            assert [token for token, _ in sampled.logprobs.top] == truth.tolist()

    def test_impossible_tokens_are_left_out(self) -> None:
        logits = np.array([[0.0, -np.inf, 1.0, np.nan]], np.float32)
        (sampled,) = sample(logits, [row(EngineSamplingParams(temperature=0.0, logprobs=4))])
        assert sampled is not None
        assert sampled.logprobs is not None
        assert [token for token, _ in sampled.logprobs.top] == [2, 0]


class TestAllowedTokens:
    IDS = np.array([2, 3, 5, 20, 31, 32, 33, 50, 59], dtype=np.int32)

    @pytest.mark.parametrize(
        "fields",
        [
            {},
            {"temperature": 0.3},
            {"top_k": 4},
            {"top_k": 30},
            {"top_p": 0.7},
            {"min_p": 0.1},
            {"typical_p": 0.6},
            {"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.9},
        ],
    )
    def test_filters_see_nothing_else(self, fields: dict[str, float]) -> None:
        params = EngineSamplingParams(**fields)
        logits = random_logits(60, 11)
        draws = (np.arange(STRATA) + 0.5) / STRATA
        rows = [row(params, draw)._replace(allowed=self.IDS) for draw in draws]
        counts = Counter(tokens(sample(logits, rows)))
        expected = reference(logits[0, self.IDS].astype(np.float64), params) * STRATA
        assert [counts[token] for token in self.IDS] == pytest.approx(expected.tolist(), abs=1.01)
        assert counts.total() == sum(counts[token] for token in self.IDS)

    def test_greedy_takes_the_most_likely_of_them_penalties_included(self) -> None:
        logits = random_logits(60, 12)
        best = int(self.IDS[logits[0, self.IDS].argmax()])
        for fields, expected in (({}, best), ({"logit_bias": {31: 90.0, 4: 99.0}}, 31)):
            one = row(EngineSamplingParams(temperature=0.0, **fields))._replace(allowed=self.IDS)
            assert tokens(sample(logits, [one])) == [expected]

    def test_log_probabilities_stay_the_models(self) -> None:
        logits = random_logits(60, 13)
        params = EngineSamplingParams(temperature=0.0, logprobs=3)
        (sampled,) = sample(logits, [row(params)._replace(allowed=self.IDS)])
        (free,) = sample(logits, [row(params)])
        assert sampled is not None
        assert free is not None
        assert sampled.token_id in self.IDS.tolist()
        assert sampled.logprobs is not None
        assert free.logprobs is not None
        truth = log_softmax(logits[0])[sampled.token_id]
        assert sampled.logprobs.logprob == pytest.approx(truth, abs=1e-5)
        assert sampled.logprobs.top == free.logprobs.top

    def test_rows_with_and_without_do_not_affect_each_other(self) -> None:
        logits = np.concatenate([random_logits(3000, seed) for seed in range(4)])
        kinds = [{}, {"temperature": 0.0}, {"top_k": 40}, {"top_p": 0.9}]
        rows = [
            row(EngineSamplingParams(**kinds[n % 4]), (n + 0.5) / 48, n // 4 % 4)._replace(
                allowed=self.IDS[: n % 9 + 1] if n % 3 else None
            )
            for n in range(48)
        ]
        alone = [tokens(sample(logits, [one]))[0] for one in rows]
        assert tokens(sample(logits, rows)) == alone

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_values_that_are_not_finite_are_impossible_tokens(self, value: float) -> None:
        logits = np.array([[value, 1.0, 1.5, value, 0.0]], np.float32)
        params = EngineSamplingParams(temperature=0.0, logprobs=1)
        for ids in ([1, 4], [0, 1, 4]):
            allowed = np.array(ids, dtype=np.int32)
            (sampled,) = sample(logits, [row(params)._replace(allowed=allowed)])
            assert sampled is not None
            assert sampled.token_id == 1
            assert sampled.logprobs is not None
            assert math.isfinite(sampled.logprobs.logprob)
        hopeless = row(params)._replace(allowed=np.array([0, 3], dtype=np.int32))
        assert sample(logits, [hopeless]) == [None]


def drawn(stream: RandomStream) -> list[float]:
    return [stream.draw() for _ in range(3)]


def test_a_seed_and_an_answer_have_their_own_numbers() -> None:
    numbers = drawn(RandomStream(7))
    assert drawn(RandomStream(7)) == numbers
    assert all(0 <= number < 1 for number in numbers)
    assert len({*numbers, *drawn(RandomStream(8)), *drawn(RandomStream(7, 1))}) == 9


def test_another_answers_numbers_begin_anew() -> None:
    stream = RandomStream(None)
    before = drawn(stream)
    assert drawn(stream.of_answer(0)) == before
    assert drawn(stream.of_answer(1)) == drawn(stream.of_answer(1)) != before
