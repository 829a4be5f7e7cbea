"""Values cross between processes with their types, and bring no code along."""

import collections
import decimal
import enum
import fractions
import json
import math
import os
import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from midfill_lab.evaluation.sandbox.values import (
    FrameError,
    Opaque,
    decode,
    encode,
    exception_name,
    make_exception,
    read_frame,
    write_frame,
)

SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.just("\ud800")
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.fractions()
    | st.decimals(allow_nan=False)
)
HASHABLE = st.recursive(
    SIMPLE, lambda inner: st.lists(inner).map(tuple) | st.frozensets(inner), max_leaves=6
)
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(HASHABLE, inner)
        | st.lists(inner).map(tuple)
        | st.lists(inner).map(collections.deque)
    ),
    max_leaves=12,
)


def sent(value: object) -> Any:
    return decode(json.loads(json.dumps(encode(value))))


def types_of(value: object) -> Any:
    """Return the types in a value whose order is certain."""
    if isinstance(value, dict):
        return dict, [(types_of(k), types_of(v)) for k, v in value.items()]
    if isinstance(value, list | tuple | collections.deque):
        return type(value), [types_of(part) for part in value]
    return type(value)


@settings(max_examples=50, deadline=None)
@given(VALUES)
def test_builtin_values_arrive_as_they_were(value: object) -> None:
    arrived = sent(value)
    assert arrived == value
    assert types_of(arrived) == types_of(value)


def test_unusual_numbers_arrive_as_they_were() -> None:
    assert math.isnan(sent(math.nan))
    assert math.copysign(1, sent(-0.0)) == -1
    assert sent([math.inf, -math.inf, 1e-320, 10**5000]) == [math.inf, -math.inf, 1e-320, 10**5000]
    assert sent(decimal.Decimal("1.50")).as_tuple() == decimal.Decimal("1.50").as_tuple()
    assert sent(fractions.Fraction(1, 3)) == fractions.Fraction(1, 3)
    assert sent(range(5, 1, -2)) == range(5, 1, -2)


def test_subclasses_arrive_as_the_builtin_type_they_derive_from() -> None:
    class Hidden(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError

        def __eq__(self, other: object) -> bool:
            return True

    class Colour(enum.IntEnum):
        RED = 3

    point = collections.namedtuple("point", "x y")
    for value, plain in (
        (Hidden([1, 2]), [1, 2]),
        (Colour.RED, 3),
        (point(1, 2), (1, 2)),
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.OrderedDict(a=1), {"a": 1}),
    ):
        assert sent(value) == plain
        assert type(sent(value)) is type(plain)


def test_iterators_and_views_keep_their_kind() -> None:
    arrived = sent(x * x for x in range(3))
    assert arrived != [0, 1, 4]
    assert list(arrived) == [0, 1, 4]
    views = {"a": 1, "b": 2}
    assert sent(views.keys()) == {"a", "b"}
    assert sent(views.values()) != [1, 2]
    assert list(sent(views.values())) == [1, 2]
    assert list(sent(views.items())) == [("a", 1), ("b", 2)]


def test_other_objects_arrive_as_something_that_equals_nothing() -> None:
    arrived = sent([object(), lambda: 0, ValueError, print])
    assert all(isinstance(each, Opaque) for each in arrived)
    assert len(set(map(id, arrived))) == 4
    assert arrived[0] != arrived[1]


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        ["list"],
        ["unknown", 1],
        ["list", 3],
        ["dict", [[1]]],
        ["set", [["list", []]]],
        ["int", "x"],
        ["bytes", "xy"],
        ["range", []],
        ["fraction", ["0x1", "0x0"]],
        ["decimal", "x"],
        ["object", 1],
        [["list", []], 1],
    ],
)
def test_what_is_no_value_is_refused(data: object) -> None:
    with pytest.raises(FrameError):
        decode(data)


def test_exceptions_arrive_as_builtin_ones() -> None:
    class OwnError(KeyError):
        pass

    for error, kind in (
        (OwnError("x"), KeyError),
        (ZeroDivisionError(), ZeroDivisionError),
        (UnicodeDecodeError("utf-8", b"", 0, 1, ""), UnicodeDecodeError),
        (SystemExit(0), SystemExit),
    ):
        assert type(make_exception(exception_name(error))) is kind
    for name in ("print", "nothing", None, 3, "int", "ExceptionGroup"):
        assert type(make_exception(name)) is Exception


def test_frames_of_any_length_arrive_in_order() -> None:
    reader, writer = os.pipe()
    messages = [["a" * length] for length in (0, 1, 10**5, 10**6, 3)]
    thread = threading.Thread(target=lambda: [write_frame(writer, m) for m in messages])
    thread.start()
    assert [read_frame(reader) for _ in messages] == messages
    thread.join()
    os.close(writer)
    with pytest.raises(FrameError, match="has ended"):
        read_frame(reader)
    os.close(reader)


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", b"\1\0\0\0[", b"\2\0", b"\1\0\0\0\xff"])
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    reader, writer = os.pipe()
    os.write(writer, data)
    os.close(writer)
    with pytest.raises(FrameError):
        read_frame(reader)
    os.close(reader)
