"""The least time that a machine's ceilings allow for a step, and what binds it.

The parts of a step follow one another, with a barrier between them. So a step takes at least the
sum of what its parts take, each the longer of reading its bytes and of doing its operations, and
at least the time to read all of its bytes once: a part may find some of its own in the cache, but
all of them together can't be read faster than so many bytes are.
"""

from collections.abc import Sequence

import msgspec

from midfill_lab.bench.roofline.ceilings import Resource, Roofline
from midfill_lab.bench.roofline.work import PartWork


class PartBound(msgspec.Struct, frozen=True, kw_only=True):
    """One part of a step.

    Attributes:
        name: of the part.
        bytes: that must be read.
        operations: that must be done.
        seconds: the least time for both.
        resource: which takes that long.
    """

    name: str
    bytes: float
    operations: float
    seconds: float
    resource: Resource


class StepBound(msgspec.Struct, frozen=True, kw_only=True):
    """A step, or several one after the other.

    Attributes:
        parts: of the step.
        seconds: the least time of the whole.
        resource: what binds most of it.
    """

    parts: list[PartBound]
    seconds: float
    resource: Resource

    @property
    def bytes(self) -> float:
        """Bytes that must be read."""
        return sum(part.bytes for part in self.parts)

    @property
    def operations(self) -> float:
        """Operations that must be done."""
        return sum(part.operations for part in self.parts)

    def seconds_of(self, *names: str) -> float:
        """Return the least time of some parts."""
        return sum(part.seconds for part in self.parts if part.name in names)


def bound_part(work: PartWork, roofline: Roofline) -> PartBound:
    """Return the least time of one part."""
    reading = work.bytes / roofline.read_rate(int(work.bytes))
    computing = work.operations / roofline.operation_rate(work.arithmetic)
    reads = reading >= computing
    return PartBound(
        name=work.name,
        bytes=work.bytes,
        operations=work.operations,
        seconds=reading if reads else computing,
        resource=roofline.read_from(int(work.bytes)) if reads else work.arithmetic,
    )


def bound_step(work: Sequence[PartWork], roofline: Roofline) -> StepBound:
    """Return the least time of a step."""
    parts = [bound_part(each, roofline) for each in work]
    total = sum(part.bytes for part in parts)
    summed = sum(part.seconds for part in parts)
    reading = total / roofline.read_rate(int(total))
    if reading > summed:
        return StepBound(parts=parts, seconds=reading, resource=roofline.read_from(int(total)))
    return StepBound(parts=parts, seconds=summed, resource=_binding(parts))


def bound_steps(works: Sequence[Sequence[PartWork]], roofline: Roofline) -> StepBound:
    """Return the least time of steps one after the other, at least one, of the same parts."""
    steps = [bound_step(work, roofline) for work in works]
    parts = [
        PartBound(
            name=same[0].name,
            bytes=sum(part.bytes for part in same),
            operations=sum(part.operations for part in same),
            seconds=sum(part.seconds for part in same),
            resource=_binding(same),
        )
        for same in zip(*(step.parts for step in steps), strict=True)
    ]
    seconds = sum(step.seconds for step in steps)
    return StepBound(parts=parts, seconds=seconds, resource=_binding(steps))


def _binding(parts: Sequence[PartBound | StepBound]) -> Resource:
    """Return the resource that parts or steps wait for longest, together."""
    seconds = dict.fromkeys(Resource, 0.0)
    for part in parts:
        seconds[part.resource] += part.seconds
    return max(seconds, key=lambda resource: seconds[resource])
