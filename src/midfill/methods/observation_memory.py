"""ObservationMemory: what a method has observed in the beginnings of prompts, by their tokens.

The next keystroke's prompt begins like the last one. What rows of that beginning have attended to
is the same, so it need not be observed again, and its KV may come from the prefix cache.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from midfill.arrays import Float32Array, Int32Array

_MAX_BYTES = 64 << 20


def block_digests(tokens: Int32Array, block: int, tenant: str) -> list[bytes]:
    """Return digests of a prompt's beginnings, one per whole block before its last token.

    Args:
        tokens: [n] int32, the prompt.
        block: tokens of a block.
        tenant: whose prompt it is; equal prompts of others have other digests.
    """
    running = blake2b(tenant.encode(errors="surrogatepass"), digest_size=16)
    running.update(b"\0")
    digests = []
    for end in range(block, len(tokens), block):
        running.update(tokens[end - block : end].tobytes())
        digests.append(running.copy().digest())
    return digests


class ObservationMemory:
    """Scores of keys by digest; what was used least recently goes first.

    Args:
        max_bytes: of all scores.
    """

    def __init__(self, max_bytes: int = _MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0
        self._scores: OrderedDict[bytes, list[Float32Array]] = OrderedDict()

    def longest(self, digests: Sequence[bytes]) -> tuple[int, list[Float32Array]]:
        """Return how many blocks are known of a prompt, and the scores after them; (0, []): none.

        Args:
            digests: of the prompt's blocks, see ``block_digests``.
        """
        for place in reversed(range(len(digests))):
            found = self._scores.get(digests[place])
            if found is not None:
                self._scores.move_to_end(digests[place])
                return place + 1, found
        return 0, []

    def remember(self, digest: bytes, scores: list[Float32Array]) -> None:
        """Keep the scores after some block; nobody may change them."""
        if digest in self._scores:
            self._scores.move_to_end(digest)
            return
        self._scores[digest] = scores
        self._bytes += _size(scores)
        while self._bytes > self._max_bytes:
            _, dropped = self._scores.popitem(last=False)
            self._bytes -= _size(dropped)


def _size(scores: list[Float32Array]) -> int:
    return sum(each.nbytes for each in scores)
