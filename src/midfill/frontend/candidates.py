"""CandidateSearch: an answer that is the best of several, of which the engine generates one first.

``infill/candidates.py`` says which others are tried and which one is kept. To the engine, a branch
is a request like any other whose first tokens another engine has generated: its prompt is in the
prefix cache, and both run in one batch. What is behind ends at once, in most cases after a few
tokens.

Whoever runs the requests asks for ``follow_up`` after each output, starts the requests that it
names, whose outputs come here as well, and ends those that nobody needs any more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from midfill.engine.request import EngineOutput, EngineRequest, TokenLogprobs
from midfill.errors import GenerationError
from midfill.frontend.answer import AnswerBuilder, AnswerDelta
from midfill.frontend.confidence import ConfidenceCheck, ObservedToken
from midfill.infill.candidates import Alternative, Alternatives, Line, behind, choose
from midfill.infill.confidence import TOP_TOKENS
from midfill.models.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FollowUp:
    """What the engine is to do besides.

    Attributes:
        requests: to start.
        ended: ids of requests to end.
    """

    requests: Sequence[EngineRequest] = ()
    ended: Sequence[str] = ()


MakeAnswer = Callable[[ConfidenceCheck], AnswerBuilder]
MakeCheck = Callable[[], ConfidenceCheck]


@dataclass(slots=True, eq=False)
class _Candidate:
    """One answer.

    Attributes:
        answer, check: turn its outputs into text and log probabilities.
        request_id: of its request; "" until that is made.
        beginning: the first answer's tokens that it begins with, and the alternative after them.
        started: how many of these count as tokens of the answer.
        deltas: what is new in it and nobody has seen.
        is_running: whether the engine may be generating it.
        is_broken_off: whether it reached its maximum length.
        failed: whether the engine can't generate it.
    """

    answer: AnswerBuilder
    check: ConfidenceCheck
    request_id: str = ""
    beginning: list[int] = field(default_factory=list)
    started: int = 0
    deltas: list[AnswerDelta] = field(default_factory=list)
    is_running: bool = True
    is_broken_off: bool = False
    failed: bool = False

    @property
    def line(self) -> Line:
        """How far its first line is."""
        over = self.answer.finished or self.failed
        ended = self.answer.finished and not self.is_broken_off
        complete = not self.failed and (self.check.line_ended or ended)
        shows_nothing = self.answer.finished and not any(each.text.strip() for each in self.deltas)
        return Line(self.check.joint, complete, over, self.check.is_blank or shows_nothing)

    def push(self, output: EngineOutput) -> None:
        """Take an output."""
        delta = self.answer.push(output)
        if output.finish_reason is not None:
            self.is_running = False
        if delta is not None:
            self.deltas.append(delta)
            self.is_broken_off = delta.finish_reason == "length"

    def fail(self) -> None:
        """End it where it is: the engine can't go on with it."""
        self.is_running, self.failed = False, True

    def take(self) -> AnswerDelta | None:
        """Return what is new as one delta; None if nothing is."""
        delta: AnswerDelta | None = None
        for each in self.deltas:
            delta = each if delta is None else each.after(delta)
        self.deltas.clear()
        return delta


class CandidateSearch:
    """All candidates for one answer that isn't streamed; in the place of an ``AnswerBuilder``.

    Args:
        count: maximum number of candidates, the first answer included.
        tokenizer: the model's.
        make_check: returns a check that withholds nothing.
        make_answer: returns an answer with such a check.
        least: withhold the answer that is kept if it is less sure; None doesn't report either.
    """

    def __init__(
        self,
        count: int,
        tokenizer: Tokenizer,
        make_check: MakeCheck,
        make_answer: MakeAnswer,
        least: float | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._make_check, self._make_answer = make_check, make_answer
        self._least, self._reports = least or 0.0, least is not None
        self._alternatives = Alternatives(count - 1)
        self._noted = 0  # tokens of the first answer that ``_alternatives`` knows
        self._candidates = [self._candidate()]
        self._kept: _Candidate | None = None
        self._is_withheld = False
        self._started: list[_Candidate] = []  # their requests are still to be made

    @property
    def index(self) -> int:
        """Index of the answer."""
        return self._candidates[0].answer.index

    @property
    def finished(self) -> bool:
        """Whether the last delta was returned."""
        kept = self._kept
        return self._is_withheld or (kept is not None and kept.answer.finished and not kept.deltas)

    @property
    def tokens(self) -> int:
        """How many tokens were generated for all candidates."""
        return sum(max(each.answer.tokens - each.started, 0) for each in self._candidates)

    @property
    def mean_logprob(self) -> float:
        """See ``AnswerBuilder``."""
        return (self._kept or self._candidates[0]).answer.mean_logprob

    def owns(self, output: EngineOutput) -> bool:
        """Whether an output is of another candidate than the first."""
        return any(each.request_id == output.request_id for each in self._candidates[1:])

    def push(self, output: EngineOutput) -> AnswerDelta | None:
        """Take an output of any candidate; return what is new in the one that is kept, if known.

        Raises:
            GenerationError: the engine failed on the first answer.
        """
        if self.finished:
            return None
        candidate = self._of(output)
        if not candidate.is_running:
            return None
        try:
            candidate.push(output)
        except GenerationError:
            candidate.fail()
            if candidate is self._candidates[0] or candidate is self._kept:
                raise
        if candidate is self._candidates[0]:
            self._branch_off()
        return self._advance()

    def abandon(self, reason: str) -> AnswerDelta:
        """End the answer where it is; see ``AnswerBuilder``."""
        self._is_withheld = True
        return (self._kept or self._candidates[0]).answer.abandon(reason)

    def follow_up(self, request: EngineRequest) -> FollowUp:
        """Return what the engine is to do after an output.

        Args:
            request: the first answer's.
        """
        self._candidates[0].request_id = request.request_id
        started, self._started = self._started, []
        for number, candidate in enumerate(self._candidates):
            candidate.request_id = candidate.request_id or f"{request.request_id}/{number}"
        ended = [each for each in self._candidates if each.is_running and self._is_needless(each)]
        for candidate in ended:
            candidate.is_running = False
        branches = [
            msgspec.structs.replace(request, request_id=each.request_id, answered=each.beginning)
            for each in started
            if each.is_running
        ]
        return FollowUp(branches, [each.request_id for each in ended if each not in started])

    def refuse(self, requests: Sequence[EngineRequest]) -> AnswerDelta | None:
        """Go on without requests that the engine won't take; return what is new, as ``push``."""
        refused = {request.request_id for request in requests}
        for candidate in self._candidates:
            if candidate.request_id in refused:
                candidate.fail()
        return self._advance()

    def _candidate(self) -> _Candidate:
        check = self._make_check()
        return _Candidate(self._make_answer(check), check)

    def _of(self, output: EngineOutput) -> _Candidate:
        others = self._candidates[1:]
        return next(
            (each for each in others if each.request_id == output.request_id), self._candidates[0]
        )

    def _branch_off(self) -> None:
        """Start the branches that are worth trying after the first answer's new tokens."""
        first = self._candidates[0]
        if self._kept is not None or (first.answer.finished and first.line.blank):
            return
        for token in first.check.observed[self._noted :]:
            others = None
            if token.is_free:
                others = [
                    (other, logprob)
                    for other, logprob in token.logprobs.top[:TOP_TOKENS]
                    if other != token.token_id and self._tokenizer.token_bytes(other)
                ]
            self._alternatives.push(token.logprob, others)
        self._noted = len(first.check.observed)
        for alternative in self._alternatives.take():
            branch = self._branch(first.check.observed, alternative)
            self._candidates.append(branch)
            self._started.append(branch)

    def _branch(self, tokens: Sequence[ObservedToken], alternative: Alternative) -> _Candidate:
        """Return the branch with an alternative to one of the first answer's tokens."""
        *before, replaced = tokens[: alternative.place + 1]
        branch = self._candidate()
        branch.beginning = [*(token.token_id for token in before), alternative.token_id]
        branch.push(
            EngineOutput(
                request_id="",
                index=self.index,
                token_ids=branch.beginning,
                logprobs=[
                    *(token.logprobs for token in before),
                    TokenLogprobs(alternative.logprob, replaced.logprobs.top),
                ],
            )
        )
        branch.started = branch.answer.tokens
        return branch

    def _advance(self) -> AnswerDelta | None:
        """Keep a candidate as soon as it is known to be the best; return what is new in it."""
        if self._kept is None:
            number = choose([each.line for each in self._candidates])
            if number is None:
                return None
            self._kept = self._candidates[number]
            self._is_withheld = self._is_unsure(self._kept)
        kept = self._kept
        delta = kept.take()
        if self._is_withheld:
            token_ids = () if delta is None else delta.token_ids
            delta = kept.answer.abandon("stop")
            delta = replace(delta, token_ids=token_ids + delta.token_ids)
            return replace(delta, confidence=kept.check.confidence())
        return delta if delta is None or self._reports else replace(delta, confidence=None)

    def _is_unsure(self, candidate: _Candidate) -> bool:
        found = candidate.check.confidence()
        estimate = None if found is None else found.estimate
        return estimate is not None and estimate < self._least

    def _is_needless(self, candidate: _Candidate) -> bool:
        """Whether nothing that the engine generates for a candidate will be shown."""
        if self.finished or candidate.answer.finished:
            return True
        if self._kept is not None:
            return candidate is not self._kept
        lines = [each.line for each in self._candidates]
        return self._candidates.index(candidate) in behind(lines)
