"""Prompt scores: the log probabilities of a prompt's own tokens.

The logits after a token belong to the next one, so a prompt of n tokens has n - 1 scores, from all
its rows but the last. Rows whose KV is cached would have to be computed for their logits again, so
such a prompt reuses only what precedes its first missing score.
"""

from collections.abc import Collection

from midfill.arrays import RunnerArray
from midfill.engine.sampling.sampler import MAX_ROWS_AT_ONCE, token_logprobs
from midfill.engine.step.batching import ScheduledSequence
from midfill.runners.forward.logits import LogitsOps


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
