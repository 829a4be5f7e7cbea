"""The workloads: pure generators of timed requests, seeded, made of real source files.

independent     prompts that share nothing; with a low burstiness they come in bursts
editing         users who type, each in a document of its own that grows, and whose editors ask
                again after every few keystrokes, whether or not the last answer has come
agents          programs of several turns. A turn's prompt is that of the turn before, its
                answer, and what a tool has found meanwhile; tools differ in how long they take
shared-prefix   batches of requests that arrive together and begin with the same text
mixed           a few long documents beside many short chats, which are more important

Requests carry the hints that a client could give: the expected length of the answer is the mean of
its kind, and how long clients wait differs between them.
"""

import heapq
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from midfill_lab.bench.documents import document_pieces
from midfill_lab.bench.editing import SESSION_KINDS, Round, edit_session
from midfill_lab.bench.serving.workload import (
    TimedRequest,
    WorkloadName,
    WorkloadOptions,
    arrival_times,
    limited,
)

_SPREAD = (0.5, 1.5)
"""Lengths are drawn evenly from this multiple of their mean to that."""
_SESSION_ROUNDS = 64
_LONG_SHARE, _LONG, _SHORT = 0.1, 5.0, 0.125
"""Of the mixed load: share of long documents; lengths as multiples of ``characters``."""
_TOOL_SHARE = 0.25
"""What a tool finds is as long as this multiple of ``characters``."""
_TOOLS = {"ls": (0.4, 0.1), "grep": (0.3, 0.4), "pytest": (0.2, 1.7), "make": (0.1, 5.0)}
"""Share of the calls, and how long a call takes as a multiple of ``pause``, on average."""


def make_requests(options: WorkloadOptions) -> list[TimedRequest]:
    """Return the requests of a load: in order of arrival, each later turn after the one before.

    Raises:
        OptionError: no request arrives within the duration.
    """
    requests = WORKLOADS[options.workload](options)
    if options.deadline is None:
        return list(requests)
    rng = random.Random(f"{options.seed} deadlines")
    deadlines = (options.deadline * rng.uniform(*_SPREAD) for _ in requests)
    return [
        replace(request, deadline=deadline)
        for request, deadline in zip(requests, deadlines, strict=True)
    ]


class _Draws:
    """Random choices of a load.

    Args:
        options: the load.
    """

    def __init__(self, options: WorkloadOptions) -> None:
        self.options = options
        self.rng = random.Random(f"{options.seed} {options.workload}")
        self.pieces = document_pieces(options.characters, seed=options.seed)

    def times(self, count: int, share: float = 1.0) -> list[float]:
        """Return at most ``count`` arrivals at a share of the rate."""
        options = self.options
        times = arrival_times(options.request_rate * share, options.burstiness, self.rng)
        return limited(times, count, options.duration)

    def user(self) -> int:
        """Return one of the users."""
        return self.rng.randrange(self.options.users)

    def text(self, multiple: float = 1.0) -> str:
        """Return code of about so many times ``characters``; it begins as no other text does."""
        length = round(self.options.characters * multiple * self.rng.uniform(*_SPREAD))
        text = f"# {self.rng.getrandbits(48):012x}\n"
        while len(text) < length:
            text += self.rng.choice(self.pieces)
        return text[: max(length, len("# \n") + 12)]

    def output(self, multiple: float = 1.0) -> dict[str, Any]:
        """Return the fields of an answer's number of tokens."""
        mean = self.options.output_tokens * multiple
        tokens = max(1, round(mean * self.rng.uniform(*_SPREAD)))
        return {"max_tokens": tokens, "expected_tokens": max(1, round(mean))}

    def tool(self) -> tuple[str, float]:
        """Return a tool and the seconds that a call of it takes."""
        (name,) = self.rng.choices(list(_TOOLS), [share for share, _ in _TOOLS.values()])
        return name, self.options.pause * _TOOLS[name][1] * self.rng.uniform(*_SPREAD)


def _independent(options: WorkloadOptions) -> list[TimedRequest]:
    draws = _Draws(options)
    found = []
    for index, arrival in enumerate(draws.times(options.requests)):
        user = draws.user()
        found.append(
            TimedRequest(
                index=index,
                arrival=arrival,
                prompt=draws.text(),
                **draws.output(),
                user=user,
                tenant=options.tenant_of(user),
            )
        )
    return found


def _editing(options: WorkloadOptions) -> list[TimedRequest]:
    draws = _Draws(options)
    each = math.ceil(options.requests / options.users)
    sessions = [
        _session(draws.pieces[user % len(draws.pieces)], min(2 * each + 4, _SESSION_ROUNDS), user)
        for user in range(options.users)
    ]
    found = []
    arrivals = _user_arrivals(options)
    for index, (arrival, user) in enumerate(arrivals):
        round_ = next(sessions[user])
        found.append(
            TimedRequest(
                index=index,
                arrival=arrival,
                prompt=round_.prefix,
                suffix=round_.suffix,
                max_tokens=options.output_tokens,
                expected_tokens=options.output_tokens,
                user=user,
                tenant=options.tenant_of(user),
                document=f"document-{user}",
            )
        )
    return found


def _user_arrivals(options: WorkloadOptions) -> list[tuple[float, int]]:
    """Return arrivals with their users, each of whom has an arrival process of its own."""
    rate = options.request_rate / options.users

    def of_user(user: int) -> Iterator[tuple[float, int]]:
        rng = random.Random(f"{options.seed} user {user}")
        return ((time, user) for time in arrival_times(rate, options.burstiness, rng))

    merged = heapq.merge(*map(of_user, range(options.users)))
    users: list[int] = []

    def times() -> Iterator[float]:
        for time, user in merged:
            users.append(user)
            yield time

    if math.isinf(rate):  # all at once: the users take turns
        return [(0.0, index % options.users) for index in range(options.requests)]
    found = limited(times(), options.requests, options.duration)
    return list(zip(found, users, strict=False))


def _session(document: str, rounds: int, user: int) -> Iterator[Round]:
    """Yield the requests of a user's editor, without end."""
    seed = user
    while True:
        yield from edit_session(
            {"document": document}, SESSION_KINDS["mix"], rounds=rounds, seed=seed
        )
        seed += 1_000_003


def _agents(options: WorkloadOptions) -> list[TimedRequest]:
    draws = _Draws(options)
    instructions = draws.text()
    programs = math.ceil(options.requests / options.turns)
    found: list[TimedRequest] = []
    for program, arrival in enumerate(draws.times(programs, 1.0 / options.turns)):
        user, seconds = draws.user(), 0.0
        turns = min(options.turns, options.requests - len(found))
        for turn in range(turns):
            text, waited, is_last = draws.text(_TOOL_SHARE), seconds, turn == turns - 1
            tool, seconds = ("", 0.0) if is_last else draws.tool()
            found.append(
                TimedRequest(
                    index=len(found),
                    arrival=waited if turn else arrival,
                    prompt=f"\n{text}\n" if turn else f"{instructions}\n{text}",
                    **draws.output(),
                    user=user,
                    tenant=options.tenant_of(user),
                    program=program,
                    turn=turn,
                    follows=len(found) - 1 if turn else None,
                    is_last_turn=is_last,
                    tool=tool,
                )
            )
    return found


def _shared_prefix(options: WorkloadOptions) -> list[TimedRequest]:
    draws = _Draws(options)
    prefixes = [draws.text() for _ in range(options.users)]
    batches = math.ceil(options.requests / options.batch)
    found: list[TimedRequest] = []
    for arrival in draws.times(batches, 1.0 / options.batch):
        user = draws.user()
        for _ in range(min(options.batch, options.requests - len(found))):
            found.append(
                TimedRequest(
                    index=len(found),
                    arrival=arrival,
                    prompt=f"{prefixes[user]}\n{draws.text(_SHORT)}",
                    **draws.output(),
                    user=user,
                    tenant=options.tenant_of(user),
                    document=f"prefix-{user}",
                )
            )
    return found


def _mixed(options: WorkloadOptions) -> list[TimedRequest]:
    draws = _Draws(options)
    found = []
    for index, arrival in enumerate(draws.times(options.requests)):
        user, is_long = draws.user(), draws.rng.random() < _LONG_SHARE
        found.append(
            TimedRequest(
                index=index,
                arrival=arrival,
                prompt=draws.text(_LONG if is_long else _SHORT),
                **draws.output(0.5 if is_long else 1.0),
                priority=int(is_long),
                kind="document" if is_long else "chat",
                user=user,
                tenant=options.tenant_of(user),
            )
        )
    return found


WORKLOADS: dict[WorkloadName, Callable[[WorkloadOptions], Sequence[TimedRequest]]] = {
    "independent": _independent,
    "editing": _editing,
    "agents": _agents,
    "shared-prefix": _shared_prefix,
    "mixed": _mixed,
}
