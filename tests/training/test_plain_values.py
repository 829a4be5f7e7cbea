"""Values of TOML and JSON are checked against the fields they are for."""

from dataclasses import dataclass, field
from typing import Literal

import pytest

from midfill.errors import MidfillError
from midfill.training.plain_values import build


@dataclass(frozen=True)
class Inner:
    share: float = 0.5
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outer:
    count: int = 1
    most: int | None = None
    on: bool = False
    way: Literal["a", "b"] = "a"
    pair: tuple[int, int] = (1, 2)
    inner: Inner = field(default_factory=Inner)


def test_what_is_left_out_has_its_default() -> None:
    assert build(Outer, {}) == Outer()
    assert build(Outer, {"inner": {"share": 1}}) == Outer(inner=Inner(share=1.0))


def test_every_kind() -> None:
    values = {
        "count": 3,
        "most": 4,
        "on": True,
        "way": "b",
        "pair": [5, 6],
        "inner": {"share": 0.25, "names": [".py", ".pyi"]},
    }
    expected = Outer(3, 4, True, "b", (5, 6), Inner(0.25, (".py", ".pyi")))
    assert build(Outer, values) == expected
    assert build(Outer, {"most": None}) == Outer()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"counts": 1}, "unknown name counts; known: count, most"),
        ({"inner": {"part": 1}}, "unknown name inner.part; known: share, names"),
        ({"count": 1.0}, "count must be a whole number, not 1.0"),
        ({"count": True}, "count must be a whole number, not True"),
        ({"count": "1"}, "count must be a whole number, not '1'"),
        ({"most": "many"}, "most must be a whole number, not 'many'"),
        ({"on": 1}, "on must be true or false, not 1"),
        ({"way": "c"}, "way must be one of a, b, not 'c'"),
        ({"way": ["a"]}, r"way must be one of a, b, not \['a'\]"),
        ({"pair": [1, 2, 3]}, "pair must be a list of 2, not"),
        ({"pair": [1, "x"]}, "pair must be a whole number, not 'x'"),
        ({"pair": 1}, "pair must be a list of 2, not 1"),
        ({"inner": 3}, "inner must be a table of names and values, not 3"),
        ({"inner": {"share": "half"}}, "inner.share must be a number, not 'half'"),
        ({"inner": {"share": float("nan")}}, "inner.share must be a number, not nan"),
        ({"inner": {"names": ".py"}}, "inner.names must be a list, not '.py'"),
    ],
)
def test_errors_name_the_field(values: dict[str, object], message: str) -> None:
    with pytest.raises(MidfillError, match=message):
        build(Outer, values)
