"""PromptToken: a token of a prompt with its log probability, where it stands in the text."""

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from midfill.engine.request import TokenLogprobs
from midfill.frontend.answer import Candidate
from midfill.models.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of a prompt.

    Attributes:
        token_id: its id.
        text: its text; a part of a character shows as U+FFFD.
        logprob: natural logarithm of its probability; None for the first token, which follows
            nothing.
        top: the most likely tokens at its place, best first.
        offset: where its text starts in the prompt's, in characters.
    """

    token_id: int
    text: str
    logprob: float | None
    top: tuple[Candidate, ...]
    offset: int


def prompt_tokens(
    token_ids: Sequence[int], text: str, scores: Sequence[TokenLogprobs], tokenizer: Tokenizer
) -> tuple[PromptToken, ...]:
    """Return a prompt's tokens with their scores.

    Args:
        token_ids: the prompt.
        text: the text that it was made of; special tokens may be spelled in it.
        scores: of the tokens from the second on.
        tokenizer: the model's.
    """
    reports: list[TokenLogprobs | None] = [None, *scores]
    return tuple(
        PromptToken(
            token_id,
            tokenizer.readable(token_id),
            None if score is None else score.logprob,
            () if score is None else tuple(_candidate(*one, tokenizer) for one in score.top),
            offset,
        )
        for token_id, score, offset in zip(
            token_ids, reports, _offsets(token_ids, text, tokenizer), strict=True
        )
    )


def _candidate(token_id: int, logprob: float, tokenizer: Tokenizer) -> Candidate:
    return Candidate(
        token_id, tokenizer.readable(token_id), tokenizer.token_bytes(token_id), logprob
    )


def _offsets(token_ids: Sequence[int], text: str, tokenizer: Tokenizer) -> Iterator[int]:
    """Yield where each token's text starts."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    offset = 0
    for token_id in token_ids:
        yield offset
        raw = tokenizer.token_bytes(token_id)
        if not raw:
            name = tokenizer.token_text(token_id)
            written = name if text.startswith(name, offset) else ""  # BOS is not written
        elif offset == 0 and raw.startswith(b" ") and not text.startswith(" "):
            written = decoder.decode(raw[1:])  # the blank that SentencePiece puts before a text
        else:
            written = decoder.decode(raw)
        offset += len(written)
