"""Holdings: which replicas have computed which prompts of a document, as their server knows it."""

from collections import OrderedDict, deque
from collections.abc import Collection, Sequence

import numpy as np

from midfill.arrays import Int32Array

_PROMPTS = 2  # of a document at a replica: the last one asked, and one computed in idle time
_MAX_TOKENS = 16_000_000  # remembered, 64 MB


class Holdings:
    """The last prompts of each document at each replica; documents at rest are forgotten first.

    Args:
        max_tokens: how many tokens of prompts are remembered.
    """

    def __init__(self, max_tokens: int = _MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._tokens = 0
        self._prompts: OrderedDict[str, dict[str, deque[Int32Array]]] = OrderedDict()

    def record(self, document: str, replica: str, token_ids: Sequence[int]) -> None:
        """Remember that a replica has computed a prompt of a document."""
        prompts = self._prompts.setdefault(document, {}).setdefault(replica, deque())
        self._prompts.move_to_end(document)
        prompts.append(np.array(token_ids, np.int32))
        self._tokens += len(token_ids)
        if len(prompts) > _PROMPTS:
            self._tokens -= len(prompts.popleft())
        while self._tokens > self._max_tokens:
            _, forgotten = self._prompts.popitem(last=False)
            self._tokens -= sum(len(one) for group in forgotten.values() for one in group)

    def forget(self, document: str, replica: str) -> None:
        """Forget what a replica has computed of a document."""
        forgotten = self._prompts.get(document, {}).pop(replica, ())
        self._tokens -= sum(map(len, forgotten))

    def held(
        self, document: str, token_ids: Sequence[int], replicas: Collection[str]
    ) -> dict[str, int]:
        """Return how many of a prompt's first tokens replicas have computed, by their names.

        Args:
            document: which it belongs to.
            token_ids: the prompt.
            replicas: those that are there; what others have computed is forgotten.
        """
        known = self._prompts.get(document)
        if known is None:
            return {}
        for name in [name for name in known if name not in replicas]:
            self.forget(document, name)
        tokens = np.array(token_ids, np.int32)
        return {name: max(_shared(one, tokens) for one in group) for name, group in known.items()}


def _shared(one: Int32Array, other: Int32Array) -> int:
    """Return how many tokens two prompts begin with alike."""
    span = min(len(one), len(other))
    differs = np.flatnonzero(one[:span] != other[:span])
    return int(differs[0]) if len(differs) else span
