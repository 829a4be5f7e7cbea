"""raise_open_file_limit: how many files and sockets this process may have open."""

import sys


def raise_open_file_limit(wanted: int) -> int:
    """Raise the limit to ``wanted``, as far as the system lets; return the limit.

    A limit that is higher already stays. Without such limits (Windows), returns ``wanted``.
    """
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    if soft == unlimited or soft >= wanted:
        return wanted if soft == unlimited else soft
    allowed = wanted if hard == unlimited else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (ValueError, OSError):  # macOS has a bound of its own
        return soft
    return allowed
