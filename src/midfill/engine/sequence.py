"""Sequence: one answer in the making; its tokens, its KV and how far it has come."""

import copy
import secrets
from collections.abc import Collection

import numpy as np

from midfill.engine.acceptance import Calibration
from midfill.engine.drafting import Draft
from midfill.engine.request import EngineOutput, EngineRequest, FinishReason, SamplingParams
from midfill.forward.batch import Int32Array
from midfill.kv.sequence_kv import SequenceKV
from midfill.tokens.healing import HealingConstraint


class Sequence:
    """The mutable state of one answer. The engine alone changes it.

    A request for n answers starts as one sequence that stands for all of them; they part when the
    prompt is done, so the prompt is computed once.

    Attributes:
        request_id, tenant, params: the request's.
        sequence_id: unique; grows in order of arrival.
        answers: which of the request's answers it still stands for.
        prompt_length: tokens of the prompt.
        length: tokens so far, prompt and generated.
        limit: the length at which it ends.
        computed: tokens whose KV has been computed (and is still held).
        decoding: whether it has sampled a token since it was admitted last.
        cached_tokens: prompt tokens found cached when first admitted; None before that.
        kv: its slots; None while it waits.
        background: whether its prompt is only to be cached; it holds slots during a pass alone.
        constraint: what its next tokens have to spell; None when they are free.
        ends: token ids that end it.
        draft: guesses at its next tokens, until it advances.
        drafted: how many of them run in this step.
        calibration: how well its drafts do.
    """

    __slots__ = (
        "_generator",
        "_tokens",
        "answers",
        "background",
        "cached_tokens",
        "calibration",
        "computed",
        "constraint",
        "decoding",
        "draft",
        "drafted",
        "ends",
        "kv",
        "length",
        "limit",
        "params",
        "prompt_length",
        "request_id",
        "seed",
        "sequence_id",
        "tenant",
    )

    def __init__(
        self,
        request: EngineRequest,
        sequence_id: int,
        longest: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        """Start from a request.

        Args:
            request: what is asked.
            sequence_id: the first of as many as it has answers.
            longest: tokens that the context and the pool allow in all.
            eos_token_ids: the model's own end tokens.
        """
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.params: SamplingParams = request.sampling
        self.sequence_id = sequence_id
        self.answers = tuple(range(request.sampling.n))
        self.prompt_length = self.length = len(request.token_ids)
        self.background = request.background
        room = 0 if request.background else request.sampling.max_tokens
        self.limit = min(self.prompt_length + room, longest)
        self.computed = 0
        self.decoding = False
        self.cached_tokens: int | None = None
        self.kv: SequenceKV | None = None
        self.constraint: HealingConstraint | None = None
        own = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self.ends = own.union(request.sampling.stop_token_ids)
        self.draft: Draft | None = None
        self.drafted = 0
        self.calibration = Calibration()
        seed = request.sampling.seed
        self.seed = secrets.randbits(64) if seed is None else seed
        self._generator: np.random.Generator | None = None
        # Set aside for the whole answer; the operating system backs it with memory as it fills.
        self._tokens: Int32Array = np.empty(self.limit, dtype=np.int32)
        self._tokens[: self.length] = request.token_ids

    @property
    def tokens(self) -> Int32Array:
        """[length] int32, a view."""
        return self._tokens[: self.length]

    @property
    def computed_tokens(self) -> Int32Array:
        """[computed] int32, a view: the tokens whose KV is there."""
        return self._tokens[: self.computed]

    @property
    def index(self) -> int:
        """Which of the request's answers it is, or the first of those it stands for."""
        return self.answers[0]

    def run_draft(self, count: int) -> None:
        """Let the first ``count`` tokens of the draft run in the next step."""
        assert self.draft is not None
        self._tokens[self.length : self.length + count] = self.draft.tokens[:count]
        self.drafted = count

    def rows(self, count: int) -> Int32Array:
        """[count] int32, a view: what runs after the computed tokens, drafted ones included."""
        return self._tokens[self.computed : self.computed + count]

    def append(self, token_id: int) -> bool:
        """Add a generated token; returns whether it was drafted, so that what follows it ran too.

        If it was not, what was drafted after it is void.
        """
        agrees = self.drafted > 0 and int(self._tokens[self.length]) == token_id
        self.drafted = self.drafted - 1 if agrees else 0
        self._tokens[self.length] = token_id
        self.length += 1
        return agrees

    def allowed(self) -> Int32Array | None:
        """[n] int32, ascending: the ids its next token may have; None if any."""
        ids = None if self.constraint is None else self.constraint.allowed()
        return None if ids is None else np.sort(np.array(ids, dtype=np.int32))

    def draw(self) -> float:
        """The next number in [0, 1) of this answer's own random stream.

        It depends on the seed, the answer's index and how many were drawn before, on nothing else.
        """
        if self._generator is None:
            key = np.array([self.seed % 2**64, self.index], dtype=np.uint64)
            self._generator = np.random.Generator(np.random.Philox(key=key))
        return self._generator.random()

    def part(self) -> list["Sequence"]:
        """The answers this sequence stands for, itself first; the others are new and hold no KV.

        This one is not changed: cut ``answers`` to its own when the others take over.
        """
        siblings = [self]
        for offset, index in enumerate(self.answers[1:], 1):
            twin = copy.copy(self)
            twin._tokens = np.empty_like(self._tokens)
            twin._tokens[: self.length] = self.tokens
            twin.sequence_id += offset
            twin.answers = (index,)
            twin.calibration = Calibration()
            twin.kv = None
            twin.computed = 0
            twin.constraint = copy.copy(self.constraint)
            siblings.append(twin)
        return siblings

    def endings(
        self,
        reason: FinishReason,
        error: str | None = None,
        answers: Collection[int] | None = None,
    ) -> list[EngineOutput]:
        """The last outputs of all answers it stands for, or of some."""
        return [
            EngineOutput(
                request_id=self.request_id,
                index=index,
                token_ids=[],
                finish_reason=reason,
                cached_tokens=self.cached_tokens or 0,
                error=error,
            )
            for index in (self.answers if answers is None else answers)
        ]
