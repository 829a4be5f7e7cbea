"""Variants: which methods are measured, each at which budgets."""

from collections.abc import Sequence

import msgspec

from midfill.errors import OptionError
from midfill.methods.registry import (
    METHODS,
    OFF,
    check_name,
    methods_of,
    parse_name,
    resolve_method,
)

FULL = OFF
"""Specification of full KV, beside which everything is measured."""


class Variant(msgspec.Struct, frozen=True):
    """A method as it is measured.

    Attributes:
        specification: for the engine: "snapkv:budget=0.25".
        method: the specification without a budget that was added to it.
        budget: the budget that was added; None where the method takes none, or states its own.
    """

    specification: str
    method: str
    budget: float | None = None


FULL_KV = Variant(FULL, "full KV")


def choose_variants(methods: str | None, budgets: Sequence[float]) -> list[Variant]:
    """Return the variants to measure, without full KV.

    Args:
        methods: specifications separated by commas; None takes every method there is. What
            follows a colon, up to the next name, are options: "snapkv,cake:window=16,kernel=3".
        budgets: tokens per layer, or shares of the prompt below 1, for methods that take any.

    Raises:
        InvalidRequestError: there is no such method or option, or a value doesn't fit.
        MidfillError: the list names nothing.
    """
    specifications = methods_of("evict") if methods is None else split_specifications(methods)
    if not specifications:
        raise OptionError(f"--methods names nothing; there are {', '.join(methods_of('evict'))}")
    variants = [
        variant for text in specifications for variant in _at_budgets(text, sorted(budgets)[::-1])
    ]
    for variant in variants:
        resolve_method(variant.specification)
    return variants


def parse_budgets(text: str) -> tuple[float, ...]:
    """Return budgets separated by commas.

    Raises:
        MidfillError: one is no number above 0, or there is none.
    """
    try:
        budgets = tuple(float(part) for part in text.split(","))
    except ValueError:
        budgets = ()
    if not budgets or min(budgets) <= 0:
        raise OptionError(
            f"--budgets takes shares below 1, or tokens per layer, like 0.5,0.25, not {text!r}"
        )
    return budgets


def split_specifications(text: str) -> list[str]:
    """Split a list of specifications at the commas that don't separate options."""
    found: list[str] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        if found and "=" in part and ":" not in part:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _at_budgets(specification: str, budgets: Sequence[float]) -> list[Variant]:
    name = parse_name(specification)
    check_name(name)
    takes_any = "budget" in METHODS[name].options() and "budget=" not in specification
    if not takes_any:
        return [Variant(specification, specification)]
    separator = "," if ":" in specification else ":"
    return [
        Variant(f"{specification}{separator}budget={budget:g}", specification, budget)
        for budget in budgets
    ]
