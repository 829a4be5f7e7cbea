"""Messages between the judge and the program's process: plain data in frames of JSON.

Values of builtin types (and ranges, deques, decimals, fractions) arrive equal to what was sent,
type included. A value of a subclass arrives as the builtin type it derives from, read with that
type's own methods. An iterator arrives as an iterator over its first items. Of any other object
only its existence arrives. Decoding runs no code of the sender.
"""

import builtins
import collections
import decimal
import fractions
import itertools
import json
import os
import struct
from collections.abc import Callable, Iterable
from typing import Any

MAX_FRAME_BYTES = 1 << 24
_HEADER = struct.Struct("<I")
_EXACT_INTEGERS = 1 << 53
_MAX_ITERATOR_ITEMS = 100_000


class FrameError(Exception):
    """The other side has ended, or sent something that is not a message."""


class Opaque:
    """Stands for an object that can't be sent; it equals itself only."""


def write_frame(descriptor: int, message: object) -> None:
    """Write one message.

    Raises:
        FrameError: the reader is gone, or the message is too long.
    """
    data = json.dumps(message).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError("the message is too long")
    left = memoryview(_HEADER.pack(len(data)) + data)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError as error:
        raise FrameError(str(error)) from None


def read_frame(descriptor: int) -> Any:
    """Read one message.

    Raises:
        FrameError: the writer is gone, or it is no message.
    """
    (length,) = _HEADER.unpack(_read_exactly(descriptor, _HEADER.size))
    if length > MAX_FRAME_BYTES:
        raise FrameError("the message is too long")
    try:
        return json.loads(_read_exactly(descriptor, length))
    except (ValueError, RecursionError):
        raise FrameError("it is not JSON") from None


def encode(value: object) -> Any:
    """Return a value as JSON holds it: lists that start with the name of their type.

    Raises:
        RecursionError: the value contains itself.
    """
    if value is None or type(value) in (bool, str, float):
        return value
    for kind, (name, parts) in _ENCODERS.items():
        if isinstance(value, kind):
            return parts(value) if name is None else [name, parts(value)]
    return ["object"]


def decode(data: Any) -> Any:
    """Return the value that ``encode`` was given.

    Raises:
        FrameError: it is not such data.
    """
    try:
        return _decode(data)
    except (TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
        raise FrameError(f"it is no value: {error}") from None


def exception_name(error: BaseException) -> str:
    """Return the name of the builtin exception that an exception is, or derives from."""
    for kind in type(error).__mro__:
        name: str = kind.__name__
        if getattr(builtins, name, None) is kind:
            return name
    return "Exception"


def make_exception(name: object) -> BaseException:
    """Return a new builtin exception of a name; an Exception if there is none."""
    kind = getattr(builtins, name, None) if isinstance(name, str) else None
    if isinstance(kind, type) and issubclass(kind, BaseException):
        try:
            return kind.__new__(kind)
        except TypeError:  # a group needs its members
            return Exception()
    return Exception()


def _read_exactly(descriptor: int, length: int) -> bytes:
    data = bytearray()
    while len(data) < length:
        try:
            part = os.read(descriptor, min(length - len(data), 1 << 20))
        except OSError as error:
            raise FrameError(str(error)) from None
        if not part:
            raise FrameError("the other side has ended")
        data += part
    return bytes(data)


def _encode_integer(value: int) -> Any:
    number = int.__pos__(value)
    return number if abs(number) < _EXACT_INTEGERS else ["int", hex(number)]


def _encode_all(values: Iterable[object]) -> list[Any]:
    return [encode(value) for value in values]


def _encode_items(pairs: Iterable[tuple[object, object]]) -> list[Any]:
    return [[encode(key), encode(value)] for key, value in pairs]


# Methods are called on the builtin types: a subclass may have overridden them.
_ENCODERS: dict[Any, tuple[str | None, Callable[[Any], Any]]] = {
    int: (None, _encode_integer),
    float: (None, float.__pos__),
    str: (None, str.__str__),
    list: ("list", lambda value: _encode_all(list.__iter__(value))),
    tuple: ("tuple", lambda value: _encode_all(tuple.__iter__(value))),
    dict: ("dict", lambda value: _encode_items(dict.items(value))),
    set: ("set", lambda value: _encode_all(set.__iter__(value))),
    frozenset: ("frozenset", lambda value: _encode_all(frozenset.__iter__(value))),
    bytes: ("bytes", lambda value: bytes.hex(value)),
    bytearray: ("bytearray", lambda value: bytearray.hex(value)),
    complex: ("complex", lambda value: [value.real, value.imag]),
    range: ("range", lambda value: [hex(part) for part in (value.start, value.stop, value.step)]),
    collections.deque: ("deque", lambda value: _encode_all(collections.deque.__iter__(value))),
    decimal.Decimal: ("decimal", decimal.Decimal.__str__),
    fractions.Fraction: ("fraction", lambda value: [hex(value.numerator), hex(value.denominator)]),
    type({}.keys()): ("keys", _encode_all),
    type({}.values()): ("values", _encode_all),
    type({}.items()): ("items", _encode_items),
    collections.abc.Iterator: (
        "iterator",
        lambda value: _encode_all(itertools.islice(value, _MAX_ITERATOR_ITEMS)),
    ),
}


def _decode(data: Any) -> Any:
    if data is None or type(data) in (bool, str, int, float):
        return data
    if data == ["object"]:
        return Opaque()
    name, parts = data
    return _DECODERS[name](parts)


def _decode_all(parts: list[Any]) -> list[Any]:
    return [_decode(part) for part in parts]


def _decode_items(parts: list[Any]) -> dict[Any, Any]:
    return {_decode(key): _decode(value) for key, value in parts}


def _integer(text: str) -> int:
    return int(text, 16)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": _integer,
    "list": _decode_all,
    "tuple": lambda parts: tuple(_decode_all(parts)),
    "dict": _decode_items,
    "set": lambda parts: set(_decode_all(parts)),
    "frozenset": lambda parts: frozenset(_decode_all(parts)),
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda parts: range(*map(_integer, parts)),
    "deque": lambda parts: collections.deque(_decode_all(parts)),
    "decimal": decimal.Decimal,
    "fraction": lambda parts: fractions.Fraction(*map(_integer, parts)),
    "keys": lambda parts: dict.fromkeys(_decode_all(parts)).keys(),
    "values": lambda parts: dict(enumerate(_decode_all(parts))).values(),
    "items": lambda parts: _decode_items(parts).items(),
    "iterator": lambda parts: iter(_decode_all(parts)),
}
