"""Token boundaries: whether a text can be cut without changing its tokens."""

from functools import lru_cache

from midfill.infill.cut_places import KeepsTokens
from midfill.models.tokens.tokenizer import Tokenizer

_CACHED = 1024  # pairs of texts, a few hundred characters each


def keeps_tokens_of(tokenizer: Tokenizer) -> KeepsTokens:
    """Return a model's ``KeepsTokens``; it remembers recent answers and is thread-safe."""

    @lru_cache(_CACHED)
    def keeps_tokens(before: str, after: str) -> bool:
        encode = tokenizer.encode_continuation
        return encode(before) + encode(after) == encode(before + after)

    return keeps_tokens
