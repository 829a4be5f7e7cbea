"""All targets by name."""

from fuzzing import editors, models, requests, stored
from fuzzing.target import Target

TARGETS: dict[str, Target] = {
    **models.TARGETS,
    **requests.TARGETS,
    **editors.TARGETS,
    **stored.TARGETS,
}
