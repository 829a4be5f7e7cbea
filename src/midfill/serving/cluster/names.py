"""What midfill's applications on a Ray cluster are called."""

import re

FRONT_APP = "midfill"
FRONT = "Front"
ENGINE = "Engine"

_ENGINES = re.compile(r"midfill-engines-(\d+)")


def engines_app(generation: int) -> str:
    """Return the name of the application of a generation of engines."""
    return f"midfill-engines-{generation}"


def generation_of(app: str) -> int | None:
    """Return which generation an application is; None if it is something else."""
    match = _ENGINES.fullmatch(app)
    return None if match is None else int(match[1])
