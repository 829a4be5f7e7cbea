"""Values of options as people write them: sizes, lists of counts, FIM tokens, windows, names."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import typer

from midfill.config import DEFAULT_SCHEDULER, FimTokens
from midfill.errors import InvalidRequestError, OptionError
from midfill.serving.options import WindowSize

T = TypeVar("T", bound=str)

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Return the bytes of "2GB", "512M", "1.5GiB" or "1000000"; units are powers of 1024.

    Raises:
        typer.BadParameter: the text is no size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write it like 2GB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def parse_counts(text: str) -> tuple[int, ...]:
    """Return positive numbers separated by commas.

    Raises:
        typer.BadParameter: the text is no list of positive numbers.
    """
    try:
        counts = tuple(int(part) for part in text.split(","))
    except ValueError:
        counts = ()
    if not counts or min(counts) < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 512,1500")
    return counts


def parse_names(text: str, known: Sequence[T], option: str) -> tuple[T, ...]:
    """Return the names that a list separated by commas holds, in the order of ``known``.

    Raises:
        MidfillError: an unknown name, or none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = ", ".join(unknown) or "nothing"
        raise OptionError(f"{option} names {what}; there are {', '.join(known)}")
    return tuple(name for name in known if name in names)


def parse_fim_tokens(text: str) -> FimTokens:
    """Return the sentinels named by "PRE,SUF,MID".

    Raises:
        typer.BadParameter: the text does not name exactly three.
    """
    parts = text.split(",")
    if len(parts) != 3 or not all(parts):
        raise typer.BadParameter("name three tokens: PREFIX,SUFFIX,MIDDLE")
    return FimTokens(*parts)


def parse_window(text: str) -> WindowSize:
    """Return the numbers of characters named by "BEFORE,AFTER".

    Raises:
        typer.BadParameter: the text does not hold two numbers, or one is too small.
    """
    try:
        before, after = (int(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no window; write it like 1200,400") from None
    if before < 1 or after < 0:
        raise typer.BadParameter("a window has at least 1 character before the caret, 0 after it")
    return WindowSize(before, after)


def parse_method(text: str) -> str:
    """Return the specification of a method, checked.

    Raises:
        typer.BadParameter: there is no such method or option, or a value doesn't fit.
    """
    if text == "none":
        return text
    from midfill.methods.registry import resolve_method

    return checked(text, resolve_method)


def parse_reuse(text: str) -> str:
    """Return the specification of a method of reuse, checked; "auto" and "off" are two.

    Raises:
        typer.BadParameter: there is no such method or option, or a value doesn't fit.
    """
    if text in ("auto", "off"):
        return text
    from midfill.methods.resolver import check_reuse

    return checked(text, check_reuse)


def parse_allowed_method(text: str) -> str:
    """Return the name of a method that requests may choose, checked; "any" and "none" are two.

    Raises:
        typer.BadParameter: there is no such method.
    """
    if text in ("any", "none"):
        return text
    from midfill.methods.registry import check_name

    return checked(text, check_name)


def parse_scheduler(text: str) -> str:
    """Return the specification of scheduling policies, checked.

    Raises:
        typer.BadParameter: there is no such policy or option, or a value doesn't fit.
    """
    if text == DEFAULT_SCHEDULER:  # what most starts need no registry for
        return text
    from midfill.engine.scheduling.registry import resolve_scheduler

    return checked(text, resolve_scheduler)


def parse_codec(text: str) -> str:
    """Return the specification of a codec of stored KV, checked.

    Raises:
        typer.BadParameter: there is no such codec or option, or a value doesn't fit.
    """
    if text == "none":
        return text
    from midfill.methods.codecs import check_codec

    return checked(text, check_codec)


def checked(text: str, resolve: Callable[[str], object]) -> str:
    """Return a specification that ``resolve`` accepts.

    Raises:
        typer.BadParameter: it refuses it.
    """
    try:
        resolve(text)
    except InvalidRequestError as error:
        raise typer.BadParameter(str(error)) from None
    return text
