"""Names with options: how they are taken apart, and that errors name what was asked for."""

from dataclasses import dataclass

import pytest

from midfill.errors import InvalidRequestError
from midfill.specifications import (
    defaults,
    make_options,
    nearest_name,
    parse_options,
    split_specification,
)


@dataclass(frozen=True)
class Oven:
    degrees: int = 180
    minutes: float = 45.0
    shelf: str = "middle"


def test_parts_are_joined_with_a_plus_that_is_no_part_of_a_number() -> None:
    parts = split_specification("bake:minutes=2e+1+cool", param="recipe")
    assert parts == ["bake:minutes=2e+1", "cool"]
    assert split_specification("", param="recipe") == [""]


def test_options_have_the_types_of_their_fields() -> None:
    assert make_options(Oven, "oven", "degrees=200,minutes=2e+1,shelf=top", param="recipe") == Oven(
        200, 20.0, "top"
    )
    assert make_options(Oven, "oven", "", param="recipe") == Oven(**defaults(Oven))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("degree=3", "oven has no option 'degree'; did you mean 'degrees'?"),
        ("degrees=hot", "oven: degrees must be a whole number, not 'hot'"),
        ("minutes=long", "oven: minutes must be a number, not 'long'"),
        ("minutes", "oven: write minutes=VALUE"),
    ],
)
def test_what_does_not_fit_is_an_error_of_what_was_asked_for(settings: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        make_options(Oven, "oven", settings, param="recipe")
    assert str(error.value) == said
    assert error.value.param == "recipe"


def test_only_the_known_fields_are_options() -> None:
    with pytest.raises(InvalidRequestError, match="oven has no option 'shelf'; there are degrees"):
        parse_options(Oven, "oven", "shelf=top", known=["degrees"], param="recipe")
    with pytest.raises(InvalidRequestError, match="oven has no option 'shelf': it has none"):
        parse_options(Oven, "oven", "shelf=top", known=[], param="recipe")


def test_a_specification_of_megabytes_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="at most 1000 characters, not 2000000") as error:
        split_specification("a" * 2_000_000, param="recipe")
    assert error.value.param == "recipe"


def test_the_nearest_name_is_one_that_begins_so_or_is_spelled_alike() -> None:
    known = ["sarathi-serve", "priority"]
    assert nearest_name("sarathi", known) == "; did you mean 'sarathi-serve'?"
    assert nearest_name("PRIORTY", known) == "; did you mean 'priority'?"
    assert nearest_name("x", known) == "; there are sarathi-serve, priority"
