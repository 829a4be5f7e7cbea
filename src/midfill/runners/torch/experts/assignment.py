"""Which device computes which of a layer's experts, and which are copied to the fast one.

The fast device computes experts that it holds, the slow one any; a bus copies one expert at a time
beside both. HybriMoE's section 4.1 makes the slower of the two as fast as a greedy rule can.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

LOOKAHEAD = 1
"""Layers whose experts are predicted: their routers are asked with the rows of the layer before.
The paper's three save no more in simulation, where what is predicted is less and less true."""

_CANDIDATES = 8
_MAX_COPIES = 64


class HeldExperts(Protocol):
    """What the fast device holds of a layer; see ``LayerSlots``."""

    @property
    def held(self) -> Collection[int]:
        """The experts."""

    def __len__(self) -> int:
        """Return how many there is room for."""


@dataclass(frozen=True)
class ExpertCosts:
    """Seconds that one expert takes.

    Attributes:
        slow_start: on the slow device, once for all experts of a layer that it computes.
        slow_expert: on the slow device, to read the expert's weights.
        slow_row: on the slow device, per row.
        fast: on the fast device, whatever its rows.
        copy: to the fast device.
    """

    slow_start: float
    slow_expert: float
    slow_row: float
    fast: float
    copy: float

    def slow(self, rows: int) -> float:
        """Return what the slow device takes for an expert, beside ``slow_start``."""
        return self.slow_expert + self.slow_row * rows


@dataclass(frozen=True)
class Assignment:
    """Where the experts of a layer are computed in one step.

    Attributes:
        fast, slow: the experts of each device, in the order in which it computes them.
        copied: those of ``fast`` that it doesn't hold yet, in the order in which they are copied.
        fast_seconds, slow_seconds: until each device is done.
        bus_seconds: until the last one is copied.
    """

    fast: tuple[int, ...]
    slow: tuple[int, ...]
    copied: tuple[int, ...]
    fast_seconds: float
    slow_seconds: float
    bus_seconds: float

    @property
    def seconds(self) -> float:
        """How long the layer takes."""
        return max(self.fast_seconds, self.slow_seconds)

    def idle_copies(self, costs: ExpertCosts) -> int:
        """Return how many further experts can be copied before the layer is done."""
        idle = self.seconds - self.bus_seconds
        return min(int(idle / costs.copy), _MAX_COPIES) if costs.copy > 0 else _MAX_COPIES


def assign(
    rows: Mapping[int, int], held: Collection[int], slots: int, costs: ExpertCosts
) -> Assignment:
    """Divide a layer's experts between the devices.

    The fast device takes those that it holds, most rows first, then those that are copied, most
    rows first; the slow one begins at the other end. Each next expert goes to the device that would
    be done with its own first.

    Args:
        rows: how many each expert is sent, at least one.
        held: the experts that the fast device holds.
        slots: how many it has room for; without any, it computes nothing. A slot holds one expert
            after the other, if there are more.
        costs: of an expert.
    """

    def by_rows(experts: list[int]) -> list[int]:
        return sorted(experts, key=lambda expert: (-rows[expert], expert))

    left = by_rows([each for each in rows if each in held])
    left += by_rows([each for each in rows if each not in held])
    fast: list[int] = []
    slow: list[int] = []
    copied: list[int] = []
    fast_seconds = slow_seconds = bus_seconds = 0.0
    while left:
        first, last = left[0], left[-1]
        copies = first not in held
        arrives = bus_seconds + costs.copy if copies else 0.0
        with_first = max(fast_seconds, arrives) + costs.fast
        with_last = slow_seconds + costs.slow(rows[last])
        with_last += 0.0 if slow else costs.slow_start
        if slots and with_first <= with_last:
            fast.append(left.pop(0))
            fast_seconds = with_first
            if copies:
                copied.append(first)
                bus_seconds = arrives
        else:
            slow.append(left.pop())
            slow_seconds = with_last
    return Assignment(
        tuple(fast), tuple(slow), tuple(copied), fast_seconds, slow_seconds, bus_seconds
    )


def gains_of_copies(
    rows: Mapping[int, int], held: Collection[int], slots: int, costs: ExpertCosts
) -> dict[int, float]:
    """Return how many seconds a later layer takes less with an expert that it doesn't hold yet.

    HybriMoE's section 4.2. Experts that gain nothing are left out, and all but those with most
    rows: each is worth an assignment of its own, which takes as long as a small expert.

    Args:
        rows, held, slots, costs: of that layer, see ``assign``; ``rows`` are predicted.
    """
    without = assign(rows, held, slots, costs).seconds
    missing = sorted((each for each in rows if each not in held), key=lambda each: -rows[each])
    missing = missing[:_CANDIDATES]
    gains = {
        expert: without - assign(rows, {*held, expert}, slots, costs).seconds for expert in missing
    }
    return {expert: gain for expert, gain in gains.items() if gain > 0}


def ranked_copies(
    later: Mapping[int, tuple[Mapping[int, int], HeldExperts]], costs: ExpertCosts
) -> list[tuple[int, int]]:
    """Return layers and experts of theirs that are worth being copied ahead, most useful first.

    Args:
        later: by layer, the rows that its experts are predicted to be sent, and what is held.
        costs: of an expert.
    """
    gains = {
        (layer, expert): gain
        for layer, (rows, slots) in later.items()
        for expert, gain in gains_of_copies(rows, slots.held, len(slots), costs).items()
    }
    return sorted(gains, key=lambda place: (-gains[place], place))
