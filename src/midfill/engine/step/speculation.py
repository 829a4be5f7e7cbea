"""Speculation: propose drafts, have a policy choose among them, learn from how they do.

A draft is only a guess at what the sampler will choose, so it never changes an answer; see
``engine.step.verification`` for how it is verified (after Leviathan et al., "Fast Inference from
Transformers via Speculative Decoding", ICML 2023).
"""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np

from midfill.engine.scheduling.drafting import (
    CERTAIN,
    PREDICTED,
    SPELLED,
    AcceptanceRates,
    Draft,
    prompt_lookup,
)
from midfill.engine.scheduling.policies.smart_spec import SmartSpec
from midfill.engine.scheduling.scheduler import (
    ScheduleState,
    StepPlan,
    sampled_sequences,
)
from midfill.engine.scheduling.step_cost import StepCost
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.step.batching import ScheduledSequence

_MAX_DRAFT_TOKENS = 16
_MAX_PREDICTED_TOKENS = 48  # of a prediction, which is right to its end more often


@dataclass
class DraftCounts:
    """Counters since the engine's start.

    Attributes:
        drafts: drafts that were verified.
        tokens: their tokens.
        accepted: tokens of them that were right, as were all before them.
    """

    drafts: int = 0
    tokens: int = 0
    accepted: int = 0


class Speculation:
    """Proposes drafts, has a policy choose among them, and learns how often they are right.

    Attributes:
        counts: how many drafts were verified and accepted.
    """

    def __init__(self, policy: SmartSpec, rates: AcceptanceRates, step_cost: StepCost) -> None:
        """Speculate.

        Args:
            policy: chooses how many tokens of each draft run.
            rates: how often drafts are right; updated after every step.
            step_cost: how long steps take; updated after every step.
        """
        self.counts = DraftCounts()
        self._policy = policy
        self._rates = rates
        self._step_cost = step_cost

    def plan(
        self, state: ScheduleState, plan: StepPlan, sequences: Mapping[int, Sequence]
    ) -> tuple[StepPlan, dict[int, Draft]]:
        """Propose drafts for the sequences that ``plan`` samples, and have the policy choose.

        Args:
            state: what ``plan`` was made from.
            plan: a plan without drafts.
            sequences: the engine's, by id.

        Returns:
            (plan, drafts): the plan with the chosen drafts, and by sequence id all that were
            proposed.
        """
        max_tokens = self._policy.max_draft_tokens(state, plan)
        if max_tokens < 1:
            return plan, {}
        drafts, probabilities = {}, {}
        starting = {chunk.sequence_id: chunk.tokens for chunk in plan.admit}
        for sequence_id in sampled_sequences(state, plan):
            sequence = sequences[sequence_id]
            # Siblings that have not forked yet share the row that a draft would follow, and what
            # follows a point of compression is computed over fewer keys.
            if not sequence.method.allows_draft(starting.get(sequence_id, 0)):
                continue
            if len(sequence.answer_indices) == 1 and sequence.barrier > sequence.length:
                draft = drafts[sequence_id] = propose_draft(sequence)
                probabilities[sequence_id] = self._rates.acceptance_probabilities(
                    draft.evidence, sequence.calibration.factor
                )
        if not drafts:
            return plan, drafts
        step_seconds = self._step_cost.seconds
        plan = self._policy.add_drafts(state, plan, probabilities, step_seconds, max_tokens)
        return plan, drafts

    def record_step(self, rows: int, keys: float, seconds: float) -> None:
        """Learn from the time that a step took.

        Args:
            rows: tokens that went through the model.
            keys: that a row attended to, on average.
            seconds: forward pass and sampling.
        """
        self._step_cost.observe(rows, keys, seconds)

    def record_verification(self, scheduled: ScheduledSequence, token_ids: SequenceOf[int]) -> None:
        """Learn from the comparison of a proposed draft with the tokens that were sampled.

        Drafts that did not run count too, so rates stay known while no draft is worth running.

        Args:
            scheduled: the sequence with its draft.
            token_ids: the sequence's new tokens.
        """
        draft, calibration = scheduled.draft, scheduled.sequence.calibration
        accepted = 0
        for kind, guess, token_id in zip(
            draft.evidence, draft.tokens.tolist(), token_ids, strict=False
        ):
            if kind != CERTAIN:
                calibration.observe(self._rates.rate(kind), guess == token_id)
                self._rates.observe(kind, guess == token_id)
            if guess != token_id:
                break
            accepted += 1
        if scheduled.drafted and token_ids:
            self.counts.drafts += 1
            self.counts.tokens += scheduled.drafted
            self.counts.accepted += min(accepted, scheduled.drafted)


def propose_draft(sequence: Sequence) -> Draft:
    """Return likely next tokens of ``sequence``, up to one that would end the answer.

    As long as the answer is as predicted, the rest of the prediction. Otherwise first the tokens
    that its constraint makes known or likely, then what followed the sequence's end where it
    occurred before, in the prediction, too.
    """
    room = min(sequence.max_length - sequence.length - 1, sequence.barrier - sequence.length)
    draft = _predicted(sequence, min(room, _MAX_PREDICTED_TOKENS))
    if draft is None:
        draft = _found(sequence, min(room, _MAX_DRAFT_TOKENS))
    for place, token_id in enumerate(draft.tokens.tolist()):
        if token_id in sequence.stop_token_ids:
            return Draft(draft.tokens[: place + 1], draft.evidence[: place + 1])
    return draft


def _predicted(sequence: Sequence, room: int) -> Draft | None:
    """Return the next predicted tokens; None if there are none, or the first is impossible."""
    if not len(sequence.prediction):
        return None
    tokens = sequence.predicted_tokens(max(room, 0))
    allowed = sequence.allowed_token_ids() if len(tokens) else None
    if not len(tokens) or (allowed is not None and tokens[0] not in allowed):
        return None
    return Draft(tokens, (PREDICTED,) * len(tokens))


def _found(sequence: Sequence, room: int) -> Draft:
    """Return what the constraint spells, and what followed such tokens before."""
    check = sequence.empty_check
    constraint = sequence.constraint if check is None else check.constraint
    spelled = [] if constraint is None else constraint.spelling()[:room]
    known = np.array([token_id for token_id, _ in spelled], dtype=np.int32)
    tokens = sequence.tokens
    if len(known) or len(sequence.prediction):
        tokens = np.concatenate((sequence.prediction, tokens, known))
    found = prompt_lookup(tokens, room - len(spelled))
    evidence = tuple(CERTAIN if certain else SPELLED for _, certain in spelled)
    return Draft(np.concatenate((known, found.tokens)), evidence + found.evidence)
