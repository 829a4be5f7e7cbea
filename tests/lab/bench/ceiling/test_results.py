"""What is asked for names loads that a model has room for, or says which doesn't fit."""

import pytest

from midfill.errors import OptionError
from midfill_lab.bench.ceiling.results import DECODE, MIXED, PREFILL, CeilingOptions, Spread

OPTIONS = CeilingOptions(prefill=(512, 100), contexts=(16, 2000), streams=(1, 4), rounds=3)


def test_every_context_is_decoded_with_every_number_of_streams() -> None:
    loads = OPTIONS.loads()
    assert [phase for phase, _ in loads] == [PREFILL] * 2 + [DECODE] * 4 + [MIXED] * 2
    assert [(load.context, load.streams) for phase, load in loads if phase == DECODE] == [
        (16, 1), (16, 4), (2000, 1), (2000, 4),
    ]  # fmt: skip
    assert [load.rows for phase, load in loads if phase == PREFILL] == [512, 100]
    assert all(load.prompt == 512 for phase, load in loads if phase == MIXED)
    assert len({load.name for _, load in loads}) == len(loads)
    assert all(OPTIONS.repeats(load) * OPTIONS.rounds == load.repeats for _, load in loads)


@pytest.mark.parametrize(("context", "option"), [(512, "--prefill 512"), (2000, "--contexts 2000")])
def test_what_is_too_long_for_the_model_is_named(context: int, option: str) -> None:
    with pytest.raises(OptionError, match=f"^{option}: the model's context is {context} tokens"):
        OPTIONS.check(context)
    OPTIONS.check(2001)


def test_a_spread_has_the_median_and_both_ends() -> None:
    spread = Spread.of([3.0, 1.0, 7.0])
    assert (spread.median, spread.lowest, spread.highest) == (3.0, 1.0, 7.0)
