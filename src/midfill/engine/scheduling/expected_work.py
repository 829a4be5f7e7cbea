"""ExpectedWork: how many tokens a document's next prompt will probably have computed.

The server that admits requests doesn't see the engine's cache. It knows what earlier prompts of a
document cost, and which documents came after it: the cache evicts what was used longest ago, so a
document's KV is probably there as long as those that were used since leave room for it.
"""

from collections import OrderedDict
from typing import NamedTuple

ANSWER_TOKENS = 16
"""What an answer counts for beside its prompt. Its length isn't known, and most are short."""
_MAX_DOCUMENTS = 8192
_RATE = 0.5  # share by which a prompt's cost moves its document's estimate
_HELD_SHARE = 0.75  # of the pool; answers and earlier states of documents take slots, too


class _Cost(NamedTuple):
    """What a document's last prompts cost: tokens computed, on average, and the last one's size."""

    computed: float
    size: int


class ExpectedWork:
    """What prompts cost of the documents whose KV is probably cached.

    Attributes:
        slots: size of the KV pool in tokens; 0 while it isn't known.
    """

    def __init__(self) -> None:
        self.slots = 0
        self._costs: OrderedDict[str, _Cost] = OrderedDict()  # used longest ago first
        self._size = 0

    def is_cached(self, document: str) -> bool:
        """Whether KV of an earlier prompt of a document is probably cached."""
        return document in self._costs

    def tokens(self, document: str, prompt_tokens: int) -> float:
        """Return what a request counts for: its tokens that are probably not cached, its answer.

        Args:
            document: the planner's id of its document; "" where it has none.
            prompt_tokens: of its prompt.
        """
        known = self._costs.get(document)
        expected = prompt_tokens if known is None else min(known.computed, prompt_tokens)
        return expected + ANSWER_TOKENS

    def record(self, document: str, prompt_tokens: int, computed: int) -> None:
        """Note that a document's prompt is cached now, and how many of its tokens were computed."""
        if not document:
            return
        mean = float(computed)
        before = self._costs.pop(document, None)
        if before is not None:
            mean = before.computed + _RATE * (mean - before.computed)
            self._size -= before.size
        self._costs[document] = _Cost(mean, prompt_tokens)
        self._size += prompt_tokens
        while len(self._costs) > 1 and self._is_too_large():
            _, dropped = self._costs.popitem(last=False)
            self._size -= dropped.size

    def clear(self) -> None:
        """Forget everything: the cache is empty."""
        self._costs.clear()
        self._size = 0

    def _is_too_large(self) -> bool:
        held = self.slots and self._size > _HELD_SHARE * self.slots
        return bool(held) or len(self._costs) > _MAX_DOCUMENTS
