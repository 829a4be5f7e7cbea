"""Engine processes whose steps take as long as a test needs, as those of a larger model do."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

_FOLDER = Path(__file__).resolve().parent / "slow_steps"


def slowed(environment: Mapping[str, str], step_seconds: float) -> dict[str, str]:
    """Return an environment in which each step of an engine process takes ``step_seconds``.

    It applies to engines that are started by a process with this environment, at any depth.
    With 0 steps take the time that they take.
    """
    if not step_seconds:
        return dict(environment)
    paths = [str(_FOLDER), *filter(None, [environment.get("PYTHONPATH")])]
    return {
        **environment,
        "PYTHONPATH": os.pathsep.join(paths),
        "MIDFILL_TEST_STEP_SECONDS": str(step_seconds),
    }


@contextmanager
def slow_engines(step_seconds: float) -> Iterator[None]:
    """Slow the engines down that this process starts in the block."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in slowed(os.environ, step_seconds).items():
            patch.setenv(name, value)
        yield
