"""Vocabulary: the bytes of tokens, for answers that have to begin with given ones."""

from collections.abc import Callable
from functools import cached_property

from midfill.engine.request import EngineRequest
from midfill.errors import InvalidRequestError
from midfill.tokens.healing import HealingConstraint, TokenTrie


class Vocabulary:
    """What a model's tokens stand for. Looked at only when an answer's beginning is required."""

    def __init__(self, token_bytes: Callable[[int], bytes] | None, size: int) -> None:
        """Describe the tokens 0 to ``size - 1``.

        Args:
            token_bytes: what a token stands for; b"" for ids that stand for no text, unknown ones
                included. None: not known.
            size: the model's, which may be larger or smaller than the tokenizer's.
        """
        self._token_bytes = token_bytes or _unknown
        self._size = size

    @cached_property
    def _trie(self) -> TokenTrie:
        """Built for the first request that needs it: some 0.1 s for 50,000 tokens."""
        return TokenTrie([self._token_bytes(token_id) for token_id in range(self._size)])

    def constraint(self, request: EngineRequest, ends: frozenset[int]) -> HealingConstraint | None:
        """What holds the request's answers to ``begins_with``; None where they are free.

        Tokens that would end the answer (``ends``) may not take part.

        Raises:
            InvalidRequestError: no tokens of the model can write the bytes.
        """
        if request.background or not request.begins_with:
            return None
        forbidden = frozenset(token_id for token_id in ends if self._token_bytes(token_id))
        constraint = HealingConstraint(self._trie, request.begins_with, forbidden)
        if not constraint.possible:
            raise InvalidRequestError(
                "the model has no tokens that would make an answer begin with "
                f"the bytes {request.begins_with!r}",
                param="begins_with",
            )
        return constraint

    def advance(self, constraint: HealingConstraint, token_id: int) -> HealingConstraint | None:
        """Note that an answer goes on with a token; returns what still holds it, None if nothing.

        The constraint is changed.
        """
        constraint.advance(self._token_bytes(token_id))
        return None if constraint.satisfied else constraint


def _unknown(token_id: int) -> bytes:
    raise InvalidRequestError(
        "begins_with needs the bytes of the tokens, which this engine was not given",
        param="begins_with",
    )
