"""Kernels that call each other are compiled once, as a part of what Python calls."""

from typing import Any

import numpy as np
import pytest
from numba.core.codegen import JITCodeLibrary

from midfill.kernels.cpu.jit import (
    inlined_kernel,
    kernel,
    kernel_by_number,
    kernel_by_type,
    optimized_first,
)
from midfill.kernels.cpu.linking import Kernel


def chain() -> tuple[Kernel, ...]:
    """Return three kernels, the first of which calls the second, and that one the third.

    The third is optimised before it is linked.
    """

    @optimized_first
    @kernel
    def scaled(x, at, factor):  # type: ignore[no-untyped-def]
        return x[at] * factor

    @inlined_kernel
    def pair(x, at):  # type: ignore[no-untyped-def]
        return scaled(x, at, 2.0) + scaled(x, 0, np.float64(at))

    @kernel
    def total(x):  # type: ignore[no-untyped-def]
        out = pair(x, 0)
        for at in range(1, len(x)):
            out += pair(x, at)
        return out

    return total, pair, scaled


X = np.arange(1.0, 6.0)


def test_a_kernel_gives_the_same_called_by_itself_and_by_others() -> None:
    total, pair, scaled = chain()
    one_by_one = [scaled(X, at, 2.0) + scaled(X, 0, float(at)) for at in range(len(X))]
    assert [pair(X, at) for at in range(len(X))] == one_by_one
    assert total(X) == sum(one_by_one)
    assert pair(X, 3) == one_by_one[3]


def test_what_others_call_becomes_machine_code_with_them_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []
    finalize = JITCodeLibrary._finalize_specific

    def counted(library: Any) -> None:
        if library.name.startswith("chain."):  # and not Numba's own
            made.append(library.name.rsplit(".", 1)[-1])
        finalize(library)

    monkeypatch.setattr(JITCodeLibrary, "_finalize_specific", counted)
    total, pair, scaled = chain()
    assert total(X) == 40.0
    assert made == ["total"]
    assert [len(each.signatures) for each in (total, pair, scaled)] == [1, 0, 0]
    assert pair(X, 1) == 5.0
    assert made == ["total", "pair"]


def test_the_code_of_what_others_call_is_kept_once_however_often_it_is_linked() -> None:
    total, pair, scaled = chain()
    assert total(X) == 40.0
    assert pair(X, 1) == 5.0
    for part in (pair, scaled):
        for linked in part._linked.overloads.values():
            assert linked.library._get_module_for_linking() is linked.library._final_module


def test_a_literal_counts_as_any_other_argument_of_its_type() -> None:
    total, pair, scaled = chain()
    assert total(X) == 40.0
    assert [len(each.linked_signatures) for each in (total, pair, scaled)] == [0, 1, 1]


def test_what_is_chosen_by_type_is_linked_too() -> None:
    @kernel
    def whole(x):  # type: ignore[no-untyped-def]
        return x[0] + 1

    @kernel
    def real(x):  # type: ignore[no-untyped-def]
        return x[0] / 2

    choose = kernel_by_type(lambda x: whole if "int" in str(x.dtype) else real)

    @kernel
    def chosen(x):  # type: ignore[no-untyped-def]
        return choose(x)

    assert chosen(np.array([3])) == 4
    assert chosen(np.array([3.0])) == 1.5
    with pytest.raises(TypeError, match="only kernels"):
        choose(X)


def test_what_an_inlined_kernel_calls_is_inlined_only_if_it_says_so() -> None:
    total, pair, scaled = chain()
    assert total(X) == 40.0
    flags = [
        [linked.library.get_llvm_str().count("alwaysinline") > 0 for linked in overloads]
        for overloads in (part._linked.overloads.values() for part in (scaled, pair))
    ]
    assert flags == [[False], [True]]


def test_one_kernel_of_several_is_called_by_its_number() -> None:
    def adds(amount: int) -> Any:
        @kernel
        def add(out, at):  # type: ignore[no-untyped-def]
            out[at] += amount

        return add

    by_number = kernel_by_number({3: adds(30), 1: adds(10), 7: adds(70)})

    @kernel
    def run(numbers, out):  # type: ignore[no-untyped-def]
        for at in range(len(numbers)):
            by_number(numbers[at], out, at)

    out = np.zeros(4, np.int64)
    run(np.array([1, 3, 7, 5]), out)
    assert out.tolist() == [10, 30, 70, 70]
    assert len(by_number.linked_signatures) == 1
    only = kernel_by_number({2: adds(20)})

    @kernel
    def run_only(out):  # type: ignore[no-untyped-def]
        only(9, out, 0)

    run_only(out)
    assert out[0] == 30
