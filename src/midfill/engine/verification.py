"""Verification: sample the next tokens of every answer and accept drafted tokens that match.

Drafts are verified by sampling as if there were none: an answer's next token is sampled from the
logits of its last token, with the next number of its random stream, under its penalties and its
constraint. If the sampled token is the drafted one, the logits that follow it are computed
already, and the next token is sampled at once. So the tokens are those of one step each, greedy or
sampled, whatever was drafted. (Speculative sampling after Leviathan et al. preserves the
distribution only, but accepts more often at high temperatures.)
"""

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import torch

from midfill.engine.batching import ScheduledSequence
from midfill.engine.request import EngineOutput, FinishReason
from midfill.engine.sampler import SampledToken, SampleRow, is_greedy, sample
from midfill.engine.sequence import Sequence
from midfill.engine.vocabulary import Vocabulary


@dataclass
class Verification:
    """The new tokens of one answer in a step.

    Attributes:
        sequence: the answer; ``verify`` appends the tokens to it.
        row: row of the logits from which the next token is sampled.
        draft: token ids whose logits are the rows that follow.
        tokens: the new tokens.
        finish_reason: set when the last of them ends the answer.
        failed: whether the logits after them hold no finite value.
    """

    sequence: Sequence
    row: int
    draft: SequenceOf[int] = ()
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failed: bool = False

    def output(self) -> EngineOutput:
        """Return the new tokens as the request's output."""
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


def sibling_groups(
    scheduled: SequenceOf[ScheduledSequence],
) -> list[tuple[ScheduledSequence, list[Verification]]]:
    """Return the answers to sample for, grouped by scheduled sequence.

    The answers of one prompt share a row of logits, from which they fork.
    """
    groups = []
    draft: SequenceOf[int]
    row = 0
    for entry in scheduled:
        if entry.sampled:
            draft = entry.draft.tokens[: entry.drafted].tolist() if entry.drafted else ()
            groups.append((entry, [Verification(one, row, draft) for one in entry.sequence.fork()]))
            row += 1 + entry.drafted
    return groups


def verify(
    logits: torch.Tensor, verifications: Iterable[Verification], vocabulary: Vocabulary
) -> None:
    """Sample tokens and append them to their sequences as far as drafts match.

    Args:
        logits: [outputs, vocab] float32.
        verifications: one per answer, without tokens.
        vocabulary: the model's.
    """
    pending = list(verifications)
    while pending:
        sampled = sample(logits, [_sample_row(one) for one in pending])
        pending = [
            one
            for one, token in zip(pending, sampled, strict=True)
            if _append(one, token, vocabulary)
        ]


def _sample_row(one: Verification) -> SampleRow:
    sequence = one.sequence
    draw = 0.0 if is_greedy(sequence.params) else sequence.draw()
    return SampleRow(
        one.row,
        sequence.params,
        sequence.tokens,
        sequence.prompt_length,
        draw,
        sequence.allowed_token_ids(),
    )


def _append(one: Verification, token: SampledToken | None, vocabulary: Vocabulary) -> bool:
    """Append a sampled token; return whether the logits that follow it are computed."""
    if token is None:
        one.failed = True
        return False
    sequence = one.sequence
    position = len(one.tokens)
    accepted = position < len(one.draft) and one.draft[position] == token.token_id
    one.tokens.append(token)
    one.row += 1
    sequence.append(token.token_id)
    if sequence.constraint is not None:
        sequence.constraint = vocabulary.advance(sequence.constraint, token.token_id)
    if token.token_id in sequence.stop_token_ids:
        one.finish_reason = "stop"
    elif sequence.length >= sequence.max_length:
        one.finish_reason = "length"
    return accepted and one.finish_reason is None
