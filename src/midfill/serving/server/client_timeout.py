"""How long a client waits for its answer, as far as it says so.

``X-Request-Timeout`` is midfill's own header. OpenAI's libraries send their timeout without being
asked: ``X-Stainless-Read-Timeout`` (Python) and ``X-Stainless-Timeout`` (JavaScript).
"""

import math
from collections.abc import Iterable

from midfill.errors import InvalidRequestError

_OWN = b"x-request-timeout"
_LIBRARIES = (b"x-stainless-read-timeout", b"x-stainless-timeout")


def client_timeout(headers: Iterable[tuple[bytes, bytes]]) -> float | None:
    """Return the seconds that a client waits, by its headers; None if it does not say.

    Raises:
        InvalidRequestError: midfill's own header is no number of seconds above 0.
    """
    given = dict(headers)
    if _OWN in given:
        seconds = _seconds(given[_OWN])
        if seconds is None:
            raise InvalidRequestError.of_field(
                "X-Request-Timeout", "must be a number of seconds above 0, such as 10 or 2.5"
            )
        return seconds
    return next((_seconds(given[name]) for name in _LIBRARIES if name in given), None)


def _seconds(value: bytes) -> float | None:
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0.0 < seconds < math.inf else None
