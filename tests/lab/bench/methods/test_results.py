"""Which methods are measured, and at which budgets."""

import pytest

from midfill.errors import InvalidRequestError, MidfillError
from midfill.methods.registry import METHODS, methods_of
from midfill_lab.bench.methods.results import (
    QUICK,
    MethodsOptions,
    Variant,
    choose_parts,
    choose_variants,
    merge_parts,
    parse_budgets,
)


def test_every_method_there_is_gets_its_rows() -> None:
    variants = choose_variants(None, (0.25, 0.5))
    every = [*methods_of("evict"), *methods_of("quantize")]
    assert {one.method for one in variants} == set(every)
    for name in every:
        budgets = [one.budget for one in variants if one.method == name]
        assert budgets == ([0.5, 0.25] if "budget" in METHODS[name].options() else [None])


def test_options_keep_their_commas_and_a_budget_of_ones_own_stays() -> None:
    variants = choose_variants("snapkv:window=16,kernel=3,cake:budget=64,streamingllm", (0.5,))
    assert variants == [
        Variant("snapkv:window=16,kernel=3,budget=0.5", "snapkv:window=16,kernel=3", 0.5),
        Variant("cake:budget=64", "cake:budget=64"),
        Variant("streamingllm:budget=0.5", "streamingllm", 0.5),
    ]


def test_methods_that_act_together_are_one_variant_without_nulls() -> None:
    variants = choose_variants(
        "snapkv+kivi:bits=4,residual=32,kivi+cake:budget=99", (0.5,), nulls=True
    )
    assert variants == [
        Variant("snapkv:budget=0.5+kivi:bits=4,residual=32", "snapkv+kivi:bits=4,residual=32", 0.5),
        Variant("kivi+cake:budget=99", "kivi+cake:budget=99"),
    ]


def test_bad_lists_are_one_clear_line() -> None:
    with pytest.raises(InvalidRequestError, match="did you mean 'snapkv'"):
        choose_variants("snapvk", (0.5,))
    with pytest.raises(InvalidRequestError, match="snapkv has no option 'windw'"):
        choose_variants("snapkv:windw=16", (0.5,))
    with pytest.raises(MidfillError, match="--methods names nothing"):
        choose_variants(" ,", (0.5,))
    for text in ("half", "0.5,0", ""):
        with pytest.raises(MidfillError, match="--budgets takes"):
            parse_budgets(text)
    assert parse_budgets("0.5,256") == (0.5, 256.0)


def test_runs_of_other_parts_and_the_same_lengths_go_together() -> None:
    every = MethodsOptions()
    costs, needles = (choose_parts(every, [part]) for part in ("costs", "needles"))
    assert merge_parts(costs, needles) == merge_parts(needles, costs)
    assert merge_parts(costs, needles) == choose_parts(every, ["costs", "needles"])
    assert merge_parts(costs, every) == merge_parts(every, costs) == every
    assert merge_parts(needles, choose_parts(QUICK, ["costs"])) is None
    assert merge_parts(every, MethodsOptions(needles=9)) is None
