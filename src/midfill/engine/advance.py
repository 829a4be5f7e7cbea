"""Advance: from a step's logits to the new tokens of every answer.

Drafts are verified by sampling as if there were none: an answer's next token is chosen from the
logits of its last one, with the number that its random stream has next, under its penalties and
constraint. If that token is the one that was drafted, the logits after it are there already and the
next one is chosen at once. So the tokens are those of one step each, greedy or sampled, whatever
was drafted. (Speculative sampling after Leviathan et al. keeps the distribution only, but accepts
more often at high temperatures.)
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from midfill.engine.request import EngineOutput, FinishReason
from midfill.engine.sampler import SampledToken, SampleRow, is_greedy, sample
from midfill.engine.sequence import Sequence
from midfill.engine.vocabulary import Vocabulary


@dataclass
class Advance:
    """What one answer gains in a step.

    Attributes:
        sequence: the answer.
        row: of the logits, of its next token.
        tokens: the new ones.
        finish_reason: if the last of them ends it.
        failed: whether the logits after them hold no finite value.
    """

    sequence: Sequence
    row: int
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failed: bool = False

    def output(self) -> EngineOutput:
        """The new tokens, for whoever asked."""
        sequence = self.sequence
        logprobs = [token.logprobs for token in self.tokens if token.logprobs is not None]
        return EngineOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=[token.token_id for token in self.tokens],
            logprobs=None if sequence.params.logprobs is None else logprobs,
            finish_reason=self.finish_reason,
            cached_tokens=sequence.cached_tokens or 0,
        )


def advance(logits: torch.Tensor, advances: Iterable[Advance], vocabulary: Vocabulary) -> None:
    """Take answers as far as the logits reach.

    Args:
        logits: [outputs, vocab] float32.
        advances: each at its first row. The rows after it are those of the drafted tokens.
        vocabulary: the model's.
    """
    going = list(advances)
    while going:
        chosen = sample(logits, [_sample_row(one) for one in going])
        going = [
            one for one, token in zip(going, chosen, strict=True) if _take(one, token, vocabulary)
        ]


def _sample_row(one: Advance) -> SampleRow:
    sequence = one.sequence
    draw = 0.0 if is_greedy(sequence.params) else sequence.draw()
    return SampleRow(
        one.row, sequence.params, sequence.tokens, sequence.prompt_length, draw, sequence.allowed()
    )


def _take(one: Advance, token: SampledToken | None, vocabulary: Vocabulary) -> bool:
    """Append a token; returns whether the logits after it are there."""
    if token is None:
        one.failed = True
        return False
    sequence = one.sequence
    one.tokens.append(token)
    one.row += 1
    drafted = sequence.append(token.token_id)
    if sequence.constraint is not None:
        sequence.constraint = vocabulary.advance(sequence.constraint, token.token_id)
    if token.token_id in sequence.ends:
        one.finish_reason = "stop"
    elif sequence.length >= sequence.limit:
        one.finish_reason = "length"
    return drafted and one.finish_reason is None
