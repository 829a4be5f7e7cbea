"""Libraries that only some commands need: midfill's extras."""

import importlib.util
from collections.abc import Sequence

from midfill.errors import MidfillError


def require(what: str, libraries: Sequence[str], *, extra: str) -> None:
    """Check that libraries are installed, without importing them.

    Args:
        what: needs them, for the message.
        libraries: modules of an extra.
        extra: its name.

    Raises:
        MidfillError: some are missing; says how to install them.
    """
    missing = [name for name in libraries if importlib.util.find_spec(name) is None]
    if missing:
        raise MidfillError(
            f"{what} needs {', '.join(missing)}; install it with: pip install 'midfill[{extra}]'"
        )
