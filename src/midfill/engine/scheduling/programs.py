"""Programs: what is known of chains of requests, for a policy that keeps KV between them.

A client names a program (``RequestHints.program``) with each of its requests: an agent's task whose
turns each continue the last one's text. This is the bookkeeping of Continuum (Li et al., 2025,
arXiv 2511.02230); its policy is a pure function of what stands here.
"""

import math
from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from midfill.engine.scheduling.scheduler import ProgramId
from midfill.engine.scheduling.step_cost import StepCost

_MAX_PROGRAMS = 4096
_MAX_TOOLS = 256
_MAX_DURATIONS = 1000
_MAX_DELAYS = 100
_MAX_CHUNKS = 64


class FinishedTurn(NamedTuple):
    """A turn of a program that has just ended.

    Attributes:
        tool: the tool that its answer calls; "" if it calls none, or nobody can tell.
        tool_durations: how long earlier calls of this tool took, in seconds, ascending.
        durations: the same of all tools.
        queue_delay: how long follow-ups waited to be admitted whose KV was not kept, on average: T.
        progress_weight: how much a program's progress tells about what is left of it, from -1 to 1:
            eta.
        rebuild_seconds: how long it would take to compute the turn's KV again: R.
    """

    tool: str
    tool_durations: Sequence[float]
    durations: Sequence[float]
    queue_delay: float
    progress_weight: float
    rebuild_seconds: float

    @property
    def benefit(self) -> float:
        """Seconds that a follow-up saves if the KV is still there: T * eta + R."""
        return self.queue_delay * self.progress_weight + self.rebuild_seconds


@dataclass(slots=True)
class _Program:
    """A program that has not ended."""

    arrived: float
    turns: int = 0
    last_finish: float | None = None
    last_tool: str = ""


class Durations:
    """The latest durations of a kind of event, in seconds."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque()
        self.ascending: list[float] = []

    def add(self, seconds: float) -> None:
        """Add one; the oldest is forgotten where there are too many."""
        if len(self._recent) == _MAX_DURATIONS:
            self.ascending.remove(self._recent.popleft())
        self._recent.append(seconds)
        insort(self.ascending, seconds)


class Progress:
    """How much a program's progress tells about how many turns are left of it."""

    def __init__(self) -> None:
        self._count = self._done = self._left = 0
        self._done_squares = self._left_squares = self._products = 0

    def add(self, turns: int) -> None:
        """Add a program that has ended after so many turns: pairs (k, turns - k), k = 1..turns."""
        total = turns * (turns + 1) // 2
        squares = turns * (turns + 1) * (2 * turns + 1) // 6
        self._count += turns
        self._done += total
        self._left += turns * turns - total
        self._done_squares += squares
        self._left_squares += squares - turns * turns
        self._products += turns * total - squares

    @property
    def weight(self) -> float:
        """Minus the correlation of turns done and turns left: eta; 1 while it is undefined."""
        done = self._count * self._done_squares - self._done**2
        left = self._count * self._left_squares - self._left**2
        if not done or not left:
            return 1.0
        both = self._count * self._products - self._done * self._left
        return min(max(-both / math.sqrt(done * left), -1.0), 1.0)


class RebuildCost:
    """How long it takes to compute the KV of a text, learned from the engine's own steps.

    Args:
        cost: how long steps take; updated after every step.
        chunk: tokens of a step.
    """

    def __init__(self, cost: StepCost, chunk: int) -> None:
        self._cost, self._chunk = cost, chunk
        self._observed = False

    def seconds(self, tokens: int) -> float:
        """Return the time for a text of so many tokens; 0 before any step was observed."""
        if not self._observed or tokens < 1:
            return 0.0
        chunk = max(self._chunk, -(-tokens // _MAX_CHUNKS))
        pieces = [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
        return sum(
            self._cost.seconds(min(piece, self._chunk), number * chunk + piece / 2)
            * max(piece / self._chunk, 1.0)
            for number, piece in enumerate(pieces)
        )

    def record_step(self, rows: int, keys: float, seconds: float) -> None:
        """Learn from the time that a step took; see ``StepCost.observe``."""
        self._observed = True
        self._cost.observe(rows, keys, seconds)


class Programs:
    """The programs that have not ended, and what was learned from all.

    There is a bound to how many are remembered; those that were silent for longest are forgotten.
    Programs are their tenants' own. How long tools take and follow-ups wait is learned of all
    tenants together: it decides for how long KV is kept, and nothing else.

    Args:
        cost: how long KV takes to compute.
    """

    def __init__(self, cost: RebuildCost) -> None:
        self.cost = cost
        self._programs: OrderedDict[ProgramId, _Program] = OrderedDict()
        self._tools: OrderedDict[str, Durations] = OrderedDict()
        self._all_tools = Durations()
        self._delays: deque[float] = deque(maxlen=_MAX_DELAYS)
        self._progress = Progress()

    def __len__(self) -> int:
        return len(self._programs)

    def record_arrival(self, program: ProgramId, now: float) -> float:
        """Note that a program's request has arrived; return when its first one did."""
        known = self._programs.setdefault(program, _Program(now))
        self._programs.move_to_end(program)
        if len(self._programs) > _MAX_PROGRAMS:
            self._programs.popitem(last=False)
        if known.last_finish is not None and known.last_tool:
            duration = max(now - known.last_finish, 0.0)
            self._all_tools.add(duration)
            self._durations_of(known.last_tool).add(duration)
        known.last_finish = None
        return known.arrived

    def record_admission(self, program: ProgramId, waited: float, *, retained: bool) -> None:
        """Note that a program's request has left the queue.

        Args:
            program: the program.
            waited: seconds since the request's arrival.
            retained: whether its KV was pinned: such requests come first, so they tell nothing of
                how long others wait.
        """
        known = self._programs.get(program)
        if known is not None and known.turns and not retained:
            self._delays.append(waited)

    def finish_turn(
        self, program: ProgramId, tool: str, tokens: int, now: float, *, last_step: bool
    ) -> FinishedTurn | None:
        """Note the end of a program's turn.

        Args:
            program: the program.
            tool: what the answer calls; "" if it calls none.
            tokens: whose KV could be kept.
            now: the time.
            last_step: whether the program ends with it; it is forgotten then.

        Returns:
            What decides for how long its KV is kept; None if there is nothing to be kept for.
        """
        known = self._programs.get(program)
        if known is None:
            return None
        known.turns += 1
        if last_step:
            self._progress.add(known.turns)
            del self._programs[program]
            return None
        known.last_finish, known.last_tool = now, tool
        if not tool:
            return None
        return FinishedTurn(
            tool=tool,
            tool_durations=self._durations_of(tool).ascending,
            durations=self._all_tools.ascending,
            queue_delay=sum(self._delays) / max(len(self._delays), 1),
            progress_weight=self._progress.weight,
            rebuild_seconds=self.cost.seconds(tokens),
        )

    def _durations_of(self, tool: str) -> Durations:
        found = self._tools.setdefault(tool, Durations())
        self._tools.move_to_end(tool)
        if len(self._tools) > _MAX_TOOLS:
            self._tools.popitem(last=False)
        return found
