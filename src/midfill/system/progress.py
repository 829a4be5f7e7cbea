"""Progress: how long work tells its caller how far it has come."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total); done and total in bytes or steps, total 0 where unknown."""
