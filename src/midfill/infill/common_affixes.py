"""Longest common prefix and suffix of two texts, at the speed of memory comparison.

Doubling steps find a stretch with a difference in it; bisection finds the difference. The work is
proportional to the length of the common part, and all of it is the interpreter's own string
comparison.
"""

_STEP = 256


def common_prefix(a: str, b: str, a_start: int = 0) -> int:
    """Return the number of characters that a[a_start:] and b share at their start."""
    shared, limit = 0, max(0, min(len(a) - a_start, len(b)))
    step = _STEP
    while True:
        end = min(shared + step, limit)
        if not a.startswith(b[shared:end], a_start + shared):
            break
        if end == limit:
            return limit
        shared, step = end, 2 * step
    while end - shared > 1:  # b[shared:end] holds the first difference
        middle = (shared + end) // 2
        if a.startswith(b[shared:middle], a_start + shared):
            shared = middle
        else:
            end = middle
    return shared


def common_suffix(a: str, b: str, a_end: int | None = None) -> int:
    """Return the number of characters that a[:a_end] and b share at their end."""
    a_end, b_end = len(a) if a_end is None else a_end, len(b)
    shared, limit = 0, max(0, min(a_end, b_end))
    step = _STEP
    while True:
        end = min(shared + step, limit)
        if not a.endswith(b[b_end - end : b_end - shared], 0, a_end - shared):
            break
        if end == limit:
            return limit
        shared, step = end, 2 * step
    while end - shared > 1:
        middle = (shared + end) // 2
        if a.endswith(b[b_end - middle : b_end - shared], 0, a_end - shared):
            shared = middle
        else:
            end = middle
    return shared
