"""Many users' sessions: what each asks for, and when."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Step:
    """A user's next request.

    Attributes:
        document: what it is about.
        prompt: its tokens.
        new: how many of them a replica computes that has had the document's last request.
        think: pause before it, after the last answer, in multiples of the mean pause.
    """

    document: int
    prompt: int
    new: int
    think: float = 0.0


def population(
    users: int,
    requests: int,
    samples: Sequence[tuple[int, int]],
    *,
    documents: int = 3,
    switching: float = 0.05,
    opening: float = 0.01,
    seed: int = 0,
) -> list[list[Step]]:
    """Return the sessions of many users, whose pauses are distributed exponentially.

    Args:
        users: how many.
        requests: of each.
        samples: tokens of a prompt, and how many of them are new, as counted in editing sessions.
        documents: of each user.
        switching: probability that a request is about another document than the last.
        opening: probability that it is about a new one, which takes the place of the last.
        seed: of all random choices.
    """
    generator = np.random.default_rng(seed)
    pairs = np.array(samples, np.int64)
    further = itertools.count(users * documents)

    def session(user: int) -> Iterator[Step]:
        chosen = pairs[generator.integers(len(pairs), size=requests)].tolist()
        thinks = generator.exponential(1.0, requests).tolist()
        thinks[0] = float(generator.random())  # not all begin at once
        switches = (generator.random(requests) < switching).tolist()
        opens = (generator.random(requests) < opening).tolist()
        open_ones = [user * documents + number for number in range(documents)]
        at = int(generator.integers(documents))
        for number, (prompt, new) in enumerate(chosen):
            if switches[number]:
                at = (at + 1) % documents
            if opens[number]:
                open_ones[at] = next(further)
                new = prompt
            yield Step(open_ones[at], prompt, new, thinks[number])

    return [list(session(user)) for user in range(users)]
