"""Libraries that only some commands need: midfill's extras."""

import importlib.util
from collections.abc import Sequence

from midfill.errors import MidfillError


def require(what: str, libraries: Sequence[str], *, extra: str) -> None:
    """Check that libraries are installed, without importing them.

    Args:
        what: the feature that needs them, for the message.
        libraries: names of the modules.
        extra: midfill's extra that installs them.

    Raises:
        MidfillError: some are missing; the message says how to install them.
    """
    missing = [name for name in libraries if not _is_installed(name)]
    if missing:
        raise MidfillError(
            f"{what} needs {', '.join(missing)}; install it with: pip install 'midfill[{extra}]'"
        )


def _is_installed(name: str) -> bool:
    """Whether a module can be found. Of a name with dots, the packages around it are imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
