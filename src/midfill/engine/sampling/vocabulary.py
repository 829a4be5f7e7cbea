"""Vocabulary: the bytes of tokens, for answers that have to begin with given bytes."""

from collections.abc import Callable
from functools import cached_property

from midfill.engine.request import EngineRequest
from midfill.errors import InvalidRequestError
from midfill.models.tokens.healing import HealingConstraint, TokenTrie


class Vocabulary:
    """The text of a model's tokens; only needed for requests with ``begins_with``."""

    def __init__(self, token_bytes: Callable[[int], bytes] | None, size: int) -> None:
        """Describe the tokens 0 to ``size - 1``.

        Args:
            token_bytes: returns a token's bytes; b"" for ids without text, unknown ids included.
                None if tokens are not known: then requests with ``begins_with`` are refused.
            size: the model's vocabulary size, which may differ from the tokenizer's.
        """
        self._token_bytes = token_bytes or _unknown
        self._size = size

    @cached_property
    def _trie(self) -> TokenTrie:
        """Built by the first request that needs it, if nobody has called ``prepare``."""
        return TokenTrie([self._token_bytes(token_id) for token_id in range(self._size)])

    def prepare(self) -> None:
        """Sort the tokens now, which takes about 0.1 s for 50,000, and not amid a request."""
        _ = self._trie

    def constraint(
        self, request: EngineRequest, stop_token_ids: frozenset[int]
    ) -> HealingConstraint | None:
        """Return the constraint that makes answers begin with ``begins_with``; None without one.

        Tokens of ``stop_token_ids`` are not allowed while it holds: they would end the answer.

        Raises:
            InvalidRequestError: no tokens of the model can write the bytes.
        """
        if request.background or not request.begins_with:
            return None
        forbidden = frozenset(
            token_id for token_id in stop_token_ids if self._token_bytes(token_id)
        )
        constraint = HealingConstraint(self._trie, request.begins_with, forbidden)
        if not constraint.possible:
            raise InvalidRequestError(
                "the model has no tokens that would make an answer begin with "
                f"the bytes {request.begins_with!r}",
                param="begins_with",
            )
        return constraint

    def advance(self, constraint: HealingConstraint, token_id: int) -> HealingConstraint | None:
        """Advance ``constraint`` in place by a sampled token; return None once it is satisfied."""
        constraint.advance_by(token_id)
        return None if constraint.satisfied else constraint


def _unknown(token_id: int) -> bytes:
    raise InvalidRequestError(
        "begins_with needs the bytes of the tokens, which this engine was not given",
        param="begins_with",
    )
