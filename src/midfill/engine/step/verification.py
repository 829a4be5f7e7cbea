"""Verification: sample the next tokens of every answer and accept drafted tokens that match.

Drafts are verified by sampling as if there were none: an answer's next token is sampled from the
logits of its last token, with the next number of its random stream, under its penalties and its
constraint. If the sampled token is the drafted one, the logits that follow it are computed
already, and the next token is sampled at once. So the tokens are those of one step each, greedy or
sampled, whatever was drafted. (Speculative sampling after Leviathan et al. preserves the
distribution only, but accepts more often at high temperatures.)

A prompt's own tokens are scored by the logits before them: one of n tokens has n - 1 scores, from
all its rows but the last. Rows whose KV is cached would have to be computed for their logits again,
so such a prompt reuses only what precedes its first missing score.
"""

from collections.abc import Collection, Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from midfill.arrays import RunnerArray
from midfill.engine.request import EngineOutput, FinishReason
from midfill.engine.sampling.empty_answer import EmptyAnswerCheck
from midfill.engine.sampling.sampler import (
    MAX_ROWS_AT_ONCE,
    SampledToken,
    SampleRow,
    adjust_logits,
    is_greedy,
    sample,
    token_logprobs,
)
from midfill.engine.sampling.vocabulary import Vocabulary
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.step.batching import ScheduledSequence
from midfill.runners.forward.logits import LogitsOps
from midfill.runners.forward.runner import Runner


@dataclass(slots=True)
class Verification:
    """The new tokens of one answer in a step.

    Attributes:
        sequence: the answer; ``verify`` appends the tokens to it.
        row: row of the logits from which the next token is sampled.
        draft: token ids whose logits are the rows that follow the first one.
        first_row: the first row of the answer.
        tokens: the new tokens.
        restarted: whether they begin before the step's own first token, since it was decided
            first whether the answer is empty.
        finish_reason: set when the last of them ends the answer.
        failed: whether the logits after them hold no finite value.
    """

    sequence: Sequence
    row: int
    draft: SequenceOf[int] = ()
    first_row: int = field(init=False)
    restarted: bool = False
    tokens: list[SampledToken] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    failed: bool = False

    def __post_init__(self) -> None:
        self.first_row = self.row

    @property
    def verified_token_ids(self) -> list[int]:
        """The tokens to compare the draft with; none if the draft begins elsewhere."""
        return [] if self.restarted else [token.token_id for token in self.tokens]

    def accept(self, token_id: int) -> bool:
        """Return whether the logits after a token are computed, and move to their row."""
        if not self.draft:
            return False
        place = self.row - self.first_row
        if place >= len(self.draft) or self.draft[place] != token_id:
            return False
        self.row += 1
        return True

    def output(self) -> EngineOutput:
        """Return the new tokens as the request's output."""
        sequence = self.sequence
        is_sent = bool(self.tokens) or self.finish_reason is not None
        logprobs = None
        if sequence.params.logprobs is not None:
            logprobs = [token.logprobs for token in self.tokens if token.logprobs is not None]
        return EngineOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=[token.token_id for token in self.tokens],
            logprobs=logprobs,
            finish_reason=self.finish_reason,
            cached_tokens=sequence.cached_tokens or 0,
            reused_tokens=sequence.reused_tokens,
            empty_probability=sequence.empty_probability,
            prompt_logprobs=sequence.take_prompt_logprobs() if is_sent else None,
            prefill_seconds=sequence.take_prefill_seconds() if is_sent else None,
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
        if entry.sequence.prompt_logprobs is not None:
            row += len(entry.scored_rows)
        if entry.sampled:
            draft = entry.draft.tokens[: entry.drafted].tolist() if entry.drafted else ()
            siblings = [Verification(sibling, row, draft) for sibling in entry.sequence.fork()]
            groups.append((entry, siblings))
            row += 1 + entry.drafted
    return groups


def verify(
    runner: Runner,
    logits: RunnerArray,
    verifications: Iterable[Verification],
    vocabulary: Vocabulary,
) -> None:
    """Sample tokens and append them to their sequences as far as drafts match.

    Args:
        runner: the model.
        logits: [outputs, vocab] float32, what its last step returned.
        verifications: one per answer, without tokens.
        vocabulary: the model's.
    """
    pending = [
        verification
        for verification in verifications
        if verification.sequence.empty_check is None
        or _check_empty(verification, runner, logits, vocabulary)
    ]
    argmax: SequenceOf[int] = ()
    if any(verification.sequence.needs_only_argmax for verification in pending):
        argmax = runner.argmax_tokens(logits)
    while pending:
        sampled = _sample(runner, logits, argmax, pending)
        pending = [
            verification
            for verification, token in zip(pending, sampled, strict=True)
            if _append(verification, token, vocabulary)
            and verification.accept(verification.tokens[-1].token_id)
        ]


def _sample(
    runner: Runner,
    logits: RunnerArray,
    argmax: SequenceOf[int],
    pending: SequenceOf[Verification],
) -> list[SampledToken | None]:
    """Return the next token of each answer; None where its logits hold no finite value."""
    tokens = [_argmax_token(verification, argmax) for verification in pending]
    if all(token is not None for token in tokens):
        return tokens
    others = [place for place, token in enumerate(tokens) if token is None]
    rows = [_sample_row(pending[place].sequence, pending[place].row) for place in others]
    for place, token in zip(others, sample(runner.logits_ops, logits, rows), strict=True):
        tokens[place] = token
    return tokens


def _argmax_token(verification: Verification, argmax: SequenceOf[int]) -> SampledToken | None:
    """Return an answer's next token if it is that of the largest logit; None: to be sampled."""
    sequence = verification.sequence
    if not sequence.needs_only_argmax or sequence.not_empty or sequence.constraint is not None:
        return None
    token_id = argmax[verification.row]
    return SampledToken(token_id, None) if token_id >= 0 else None


def _check_empty(
    verification: Verification, runner: Runner, logits: RunnerArray, vocabulary: Vocabulary
) -> bool:
    """Decide whether an answer is empty, as far as the step's logits suffice for it.

    Once it is decided, the tokens are taken from the logits that the check has seen.

    Returns:
        Whether the next token is to be sampled from the logits at ``verification.row``.
    """
    sequence, check, ops = (
        verification.sequence,
        verification.sequence.empty_check,
        runner.logits_ops,
    )
    assert check is not None
    verification.restarted = bool(check.tokens)
    while True:
        row = SampleRow(0, sequence.params, sequence.tokens, sequence.prompt_length, 0.0)
        kept = ops.copy(logits[verification.row])
        token_id = check.observe(kept, ops.to_numpy(adjust_logits(ops, kept, row)))
        if token_id is None:
            break
        sequence.append(token_id)
        if not verification.accept(token_id):
            return False
    sequence.drop(len(check.tokens))
    sequence.checked_tokens = len(check.tokens)
    sequence.empty_check, sequence.empty_probability = None, check.probability
    sequence.not_empty = not check.is_empty
    for row_logits, expected in zip(check.rows, _expected(check), strict=True):
        spec = _sample_row(sequence, 0, None if sequence.not_empty else expected)
        (token,) = sample(ops, row_logits[None], [spec])
        if not _append(verification, token, vocabulary):
            return False
        if verification.tokens[-1].token_id != expected:
            return row_logits is check.rows[-1] and verification.accept(
                verification.tokens[-1].token_id
            )
    return False


def _expected(check: EmptyAnswerCheck) -> list[int | None]:
    """Return the tokens whose logits, or end, follow each of a check's rows."""
    return [*check.tokens, check.end_token if check.is_empty else None]


def _sample_row(sequence: Sequence, row: int, only: int | None = None) -> SampleRow:
    """Return how an answer's next token is sampled; as ``only``, if that is given."""
    allowed = sequence.allowed_token_ids() if only is None else np.array([only], dtype=np.int32)
    return SampleRow(
        row,
        sequence.params,
        sequence.tokens,
        sequence.prompt_length,
        0.0 if only is not None or is_greedy(sequence.params) else sequence.random_stream.draw(),
        allowed,
        sequence.end_token_ids if sequence.not_empty and allowed is None else None,
    )


def append_token(sequence: Sequence, token_id: int, vocabulary: Vocabulary) -> None:
    """Append a sampled token, and advance what its answer has to begin with."""
    constraint = sequence.constraint
    sequence.append(token_id)
    if constraint is None:
        sequence.not_empty = False
    else:
        sequence.constraint = vocabulary.advance(constraint, token_id)
        sequence.not_empty = sequence.not_empty and not constraint.exceeded


def _append(verification: Verification, token: SampledToken | None, vocabulary: Vocabulary) -> bool:
    """Append a sampled token; return whether the answer goes on."""
    if token is None:
        verification.failed = True
        return False
    sequence = verification.sequence
    verification.tokens.append(token)
    append_token(sequence, token.token_id, vocabulary)
    if token.token_id in sequence.stop_token_ids:
        verification.finish_reason = "stop"
    elif sequence.length >= sequence.max_length:
        verification.finish_reason = "length"
    return verification.finish_reason is None


def record_scores(
    ops: LogitsOps, logits: RunnerArray, scheduled: Collection[ScheduledSequence]
) -> None:
    """Append the scores that a step has computed to the sequences that want them.

    Args:
        ops: of the runner that computed the logits.
        logits: [outputs, vocab] float32, in the order of ``build_batch``.
        scheduled: the step.
    """
    if all(entry.sequence.prompt_logprobs is None for entry in scheduled):
        return
    row = 0
    for entry in scheduled:
        scored, outputs, sequence = entry.scored_rows, entry.outputs, entry.sequence
        if scored:
            assert sequence.prompt_logprobs is not None
            first = sequence.computed + scored.start + 1
            token_ids = sequence.tokens[first : first + len(scored)].tolist()
            wanted = sequence.params.prompt_logprobs or 0
            for at in range(0, len(scored), MAX_ROWS_AT_ONCE):
                some = token_ids[at : at + MAX_ROWS_AT_ONCE]
                found = logits[row + at : row + at + len(some)]
                rows = [ops.mask_nonfinite(vector) for vector in found]
                sequence.prompt_logprobs += token_logprobs(ops, rows, some, [wanted] * len(some))
        row += outputs
