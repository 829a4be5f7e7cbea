"""Numbers of bytes as people write them."""

import re

import typer

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", re.IGNORECASE)


def parse_size(text: str) -> int:
    """Bytes of "2GB", "512M", "1.5GiB" or "1000000"; units are powers of 1024.

    Raises:
        typer.BadParameter: it is none of these.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a size; write it like 2GB or 512MB")
    return int(float(match[1]) * _UNITS[match[2].upper()])
