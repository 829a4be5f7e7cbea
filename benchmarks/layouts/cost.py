"""The cost of a prompt: its tokens that a prefix cache does not hold.

The cache modelled here is the engine's radix cache at token granularity before any eviction: a
prompt's cost is its length less the longest prefix that it shares with ANY earlier prompt of the
session (and the tokens generated after it). It is at least one, since the last token always has to
be computed. All layouts are counted by this one rule.
"""

import bisect
import re
from collections.abc import Callable, Sequence

from midfill.infill.common_affixes import common_prefix
from midfill.infill.formats import Sentinel
from midfill.infill.layout import Segment

Tokenize = Callable[[str], list[int]]

# About 3.5 characters per token of source code, as in the vocabularies of code models: a line break
# with its indentation, part of a word or number with the space before it, one or two symbols.
_PIECE = re.compile(r"\n+[ \t]*|[ ]?[^\W\d_]{1,8}|[ ]?\d{1,3}|[ ]?[^\w\s]{1,2}|\s+|_|.", re.DOTALL)


class PieceTokenizer:
    """A stand-in for a model's tokenizer, so that edits can be counted without a model.

    As in a real one, pieces depend on the characters around them.
    """

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def __call__(self, text: str) -> list[int]:
        """Return the ids of a text's pieces, numbered from 0 in order of first appearance."""
        ids = self._ids
        return [ids.setdefault(piece, len(ids)) for piece in self.pieces(text)]

    @staticmethod
    def pieces(text: str) -> list[str]:
        """Split a text into pieces."""
        return _PIECE.findall(text)


class PromptEncoder:
    """Encodes prompts as strings of one character per token, which are fast to compare.

    Args:
        tokenize: text to ids; called per segment, once for segments that don't change.
    """

    def __init__(self, tokenize: Tokenize) -> None:
        self._tokenize = tokenize
        self._seen: dict[str, str] = {}
        self._sentinels: dict[int, str] = {}

    def __call__(self, segments: Sequence[Segment]) -> str:
        """Encode a prompt."""
        return "".join(
            self._sentinels.setdefault(segment.token_id, chr(1 + len(self._sentinels)))
            if isinstance(segment, Sentinel)
            else self.text(segment.text)
            for segment in segments
        )

    def text(self, text: str) -> str:
        """Encode a text segment."""
        found = self._seen.get(text)
        if found is None:
            if len(self._seen) >= 64:
                self._seen.pop(next(iter(self._seen)))
            # Above the surrogates; characters below them are sentinels.
            found = "".join([chr(0xE000 + token) for token in self._tokenize(text)])
            self._seen[text] = found
        return found


class PrefixCache:
    """Finds the longest match with any earlier prompt, a neighbour in sorted order."""

    def __init__(self) -> None:
        self._prompts: list[str] = []

    def match(self, prompt: str) -> int:
        """Return how many of a prompt's tokens are cached, at most all but the last."""
        where = bisect.bisect_left(self._prompts, prompt)
        shared = max(
            (common_prefix(near, prompt) for near in self._prompts[max(0, where - 1) : where + 1]),
            default=0,
        )
        return min(shared, len(prompt) - 1)

    def add(self, prompt: str) -> None:
        """Add all tokens of a prompt."""
        bisect.insort(self._prompts, prompt)


def count_computed(prompts: Sequence[str], generated: Sequence[str] | None = None) -> list[int]:
    """Return the tokens that each prompt has to compute, with one cache for all.

    Args:
        prompts: in order, from one ``PromptEncoder``.
        generated: the same prompts with the tokens the model generated appended.
    """
    cache = PrefixCache()
    computed = []
    for number, prompt in enumerate(prompts):
        computed.append(len(prompt) - cache.match(prompt))
        cache.add(generated[number] if generated is not None else prompt)
    return computed
