"""Lists of counts on the command line."""

import typer


def parse_counts(text: str) -> tuple[int, ...]:
    """Positive numbers separated by commas.

    Raises:
        typer.BadParameter: not that.
    """
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise typer.BadParameter(f"{text!r} is no list of numbers like 512,1500")
    return lengths
