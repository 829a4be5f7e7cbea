"""Sequence: the state of one answer while it is generated."""

import copy
import time
from collections.abc import Collection

import numpy as np

from midfill.arrays import Int32Array
from midfill.engine.request import (
    EngineOutput,
    EngineRequest,
    EngineSamplingParams,
    FinishReason,
    TokenLogprobs,
)
from midfill.engine.sampling.empty_answer import EmptyAnswerCheck
from midfill.engine.sampling.sampler import RandomStream, needs_only_argmax
from midfill.engine.scheduling.drafting import Calibration
from midfill.engine.scheduling.scheduler import NO_HINTS, Hints
from midfill.kv.radix_cache import CacheRoot, MethodRoot
from midfill.kv.sequence_kv import SequenceKV
from midfill.methods.sequence_method import NO_METHOD, Prefill, SequenceMethod
from midfill.models.tokens.healing import HealingConstraint
from midfill.runners.forward.layer_rows import LayerRows


class Sequence:
    """The mutable state of one answer; only the engine changes it.

    A request for n answers starts as one sequence that stands for all of them, so the prompt is
    computed once. It forks when the first token is sampled.

    Attributes:
        request_id: the request's id.
        tenant: whose prefix cache is used.
        method: what published methods do to it.
        params: the request's sampling parameters.
        sequence_id: unique; ids grow in order of arrival.
        answer_indices: indices of the request's answers that the sequence stands for.
        prompt_length: tokens in the prompt.
        length: tokens so far, prompt and generated.
        max_length: length at which generation ends.
        computed: number of leading tokens whose KV is computed and held.
        decoding: whether a token has been sampled since the last admission.
        cached_tokens: prompt tokens found in the cache at the first admission; None before it.
        admitted: time of the first admission (``time.perf_counter``); None before it, once an
            output has told it, and for all answers of a request but the first.
        reused_tokens: of how many prompt tokens KV was copied from elsewhere, and kept.
        loaded_variant: names the tree of KV that a lossy codec has coded, where its own is; ""
            where it is exact.
        kv: the sequence's slots; None while it waits.
        by_layers: whether its tokens are prefilled by layers since the last admission.
        layer_rows: tokens that have gone through some layers only.
        interrupted: whether it was preempted between two layers, which lost what was computed; it
            is prefilled in chunks from then on.
        head_tokens: see ``EngineRequest``.
        snapshots: after how many tokens a prefill stops, so that a copy of its state is kept there;
            empty in models without states.
        background: whether the prompt is only to be cached; such a sequence holds slots during a
            step only.
        constraint: what the next tokens have to spell; None if they are free.
        empty_check: decides whether the answer is empty; None where that is decided or not asked.
        empty_probability: what the check found.
        not_empty: whether end tokens are impossible next, since the answer has no text yet and the
            check has decided that it will.
        checked_tokens: how many tokens the check has followed, once it has decided.
        stop_token_ids: token ids that end generation, the model's end tokens included.
        prompt_logprobs: of the prompt's tokens, from ``score_from`` on, as far as they are
            computed; None if they are not asked for, or were sent.
        score_from: number of the first token that is scored.
        prediction: likely tokens of the answer, [n] int32.
        calibration: how well drafts for this sequence do.
        needs_only_argmax: whether its tokens are those of the largest logits, where it is not
            restricted to others.
        random_stream: the random numbers that its tokens are sampled with.
        arrived: when its request arrived, on the engine's clock.
        hints: what its client says of it, as policies see it.
    """

    __slots__ = (
        "_tokens",
        "admitted",
        "answer_indices",
        "arrived",
        "background",
        "by_layers",
        "cached_tokens",
        "calibration",
        "checked_tokens",
        "computed",
        "constraint",
        "decoding",
        "empty_check",
        "empty_probability",
        "head_tokens",
        "hints",
        "interrupted",
        "kv",
        "layer_rows",
        "length",
        "loaded_variant",
        "max_length",
        "method",
        "needs_only_argmax",
        "not_empty",
        "params",
        "prediction",
        "prompt_length",
        "prompt_logprobs",
        "random_stream",
        "request_id",
        "reused_tokens",
        "score_from",
        "sequence_id",
        "snapshots",
        "stop_token_ids",
        "tenant",
    )

    def __init__(
        self,
        request: EngineRequest,
        sequence_id: int,
        max_length: int,
        eos_token_ids: frozenset[int] = frozenset(),
        arrived: float = 0.0,
        hints: Hints = NO_HINTS,
    ) -> None:
        """Create the sequence of a request.

        Args:
            request: a valid request.
            sequence_id: the first of ``sampling.n`` consecutive ids that the answers will have.
            max_length: maximum number of tokens that the context and the KV pool allow.
            eos_token_ids: the model's end tokens.
            arrived: when the request arrived, on the engine's clock.
            hints: what its client says of it, as policies see it.
        """
        self.request_id = request.request_id
        self.tenant = request.tenant
        self.method: SequenceMethod = NO_METHOD
        self.params: EngineSamplingParams = request.sampling
        self.needs_only_argmax = needs_only_argmax(request.sampling)
        self.sequence_id = sequence_id
        self.answer_indices = tuple(range(request.sampling.n))
        self.prompt_length = self.length = len(request.token_ids)
        self.background = request.background
        max_tokens = 0 if request.background else request.sampling.max_tokens
        self.max_length = min(self.prompt_length + max_tokens, max_length)
        self.computed = 0
        self.decoding = False
        self.cached_tokens: int | None = None
        self.admitted: float | None = None
        self.reused_tokens = 0
        self.loaded_variant = ""
        self.kv: SequenceKV | None = None
        self.by_layers = False
        self.layer_rows: LayerRows | None = None
        self.interrupted = False
        self.head_tokens = request.head_tokens
        self.snapshots: tuple[int, ...] = ()
        self.constraint: HealingConstraint | None = None
        self.empty_check: EmptyAnswerCheck | None = None
        self.empty_probability: float | None = None
        self.not_empty = False
        self.checked_tokens = 0
        end_tokens = frozenset() if request.sampling.ignore_eos else eos_token_ids
        self.stop_token_ids = end_tokens.union(request.sampling.stop_token_ids)
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        if request.sampling.prompt_logprobs is not None and not request.background:
            self.prompt_logprobs = []
        self.score_from = request.score_from
        self.arrived = arrived
        self.hints = hints
        self.prediction: Int32Array = np.array(request.prediction, np.int32)
        self.calibration = Calibration()
        self.random_stream = RandomStream(request.sampling.seed)
        # Allocated once for the whole answer; the operating system backs it with memory as it
        # fills.
        self._tokens: Int32Array = np.empty(self.max_length, dtype=np.int32)
        self._tokens[: self.length] = request.token_ids

    @property
    def tokens(self) -> Int32Array:
        """[length] int32, a view."""
        return self._tokens[: self.length]

    @property
    def held(self) -> SequenceKV:
        """Its KV; only for a sequence that holds slots."""
        assert self.kv is not None
        return self.kv

    @property
    def cache_root(self) -> CacheRoot:
        """The prefix cache's tree that it shares: the tenant's own, or one of its method."""
        if self.loaded_variant:
            return MethodRoot(self.tenant, self.loaded_variant)
        return self.method.root(self.tenant)

    def cache_keys(self, computed: int) -> Int32Array:
        """Return what the prefix cache knows the first ``computed`` tokens by, a view: [n] int32.

        There may be fewer than tokens, since a method may keep the KV of some to itself.
        """
        return self.method.cache_keys(self._tokens[:computed])

    @property
    def matchable_tokens(self) -> Int32Array:
        """[n] int32, a view: the leading tokens whose KV may come from the prefix cache, as it
        knows them (``cache_keys``).

        The last one has to run, since its logits are needed, and so have those whose logits score
        the prompt and are missing. (A background prompt needs no logits; there one more row does no
        harm.)
        """
        limit = self.method.reusable(self, self.length - 1)
        next_scored = self.next_scored
        if next_scored is not None:
            limit = min(limit, next_scored - 1)
        return self.cache_keys(limit)

    @property
    def barrier(self) -> int:
        """Number of tokens that a step must not go beyond."""
        barrier = self.method.barrier(self)
        if self.snapshots:
            return next((end for end in self.snapshots if end > self.computed), self.max_length)
        return self.max_length if barrier is None else barrier

    @property
    def may_be_empty(self) -> bool:
        """Whether it is yet to be decided if the answer is empty."""
        return self.empty_check is not None

    @property
    def next_scored(self) -> int | None:
        """Number of the prompt's next token that is to be scored; None if there is none."""
        if self.prompt_logprobs is None:
            return None
        number = self.score_from + len(self.prompt_logprobs)
        return number if number < self.prompt_length else None

    @property
    def prefill(self) -> Prefill:
        """How its tokens may be computed, see ``scheduler.WaitingSequence``."""
        mode = self.method.prefill(self)
        return "chunks" if mode == "any" and (self.background or self.interrupted) else mode

    @property
    def index(self) -> int:
        """Index of the answer, or of the first answer that the sequence stands for."""
        return self.answer_indices[0]

    def token_at(self, position: int) -> int:
        """Return one of its tokens."""
        return int(self._tokens[position])

    def predicted_tokens(self, count: int) -> Int32Array:
        """Return the next tokens of ``prediction``: at most [count] int32, a view.

        There are none if the answer so far is not as predicted.
        """
        answer = self._tokens[self.prompt_length : self.length]
        known = len(answer)
        if known >= len(self.prediction) or not np.array_equal(self.prediction[:known], answer):
            return self.prediction[:0]
        return self.prediction[known : known + count]

    def uncomputed_tokens(self, count: int) -> Int32Array:
        """[count] int32, a view: the first ``count`` tokens whose KV is not computed yet."""
        return self._tokens[self.computed : self.computed + count]

    def forget_kv(self) -> None:
        """Forget what was computed: the sequence holds no KV any more."""
        self.interrupted = self.interrupted or self.layer_rows is not None
        self.kv = self.layer_rows = None
        self.by_layers = False
        self.computed = 0
        self.method.restart()

    def append(self, token_id: int) -> None:
        """Add a generated token."""
        self._tokens[self.length] = token_id
        self.length += 1

    def drop(self, count: int) -> None:
        """Take back the last ``count`` tokens."""
        self.length -= count

    @property
    def end_token_ids(self) -> Int32Array:
        """[n] int32, ascending: ``stop_token_ids``."""
        return np.array(sorted(self.stop_token_ids), dtype=np.int32)

    def check_empty(self, threshold: float, required: int) -> None:
        """Have it decided first whether the answer is empty.

        There is no check if nothing ends the answer, or if there is no room to spell what it has to
        begin with and end there.

        Args:
            threshold: see ``EngineRequest.empty_threshold``.
            required: number of bytes that the answer has to begin with.
        """
        room = self.max_length - self.prompt_length
        if threshold > 0.0 and self.stop_token_ids and room > required:
            self.empty_check = EmptyAnswerCheck(threshold, self.end_token_ids, self.constraint)

    def allowed_token_ids(self) -> Int32Array | None:
        """[n] int32, ascending: the ids that the next token may have; None if any."""
        ids = None if self.constraint is None else self.constraint.allowed()
        return None if ids is None else np.sort(np.array(ids, dtype=np.int32))

    def fork(self) -> list["Sequence"]:
        """Return one sequence per answer, this one first; the others are new and hold no KV.

        This sequence is not changed: the caller has to cut its ``answer_indices`` to the first one
        when the others start.
        """
        siblings = [self]
        for offset, index in enumerate(self.answer_indices[1:], 1):
            sibling = copy.copy(self)
            sibling._tokens = np.empty_like(self._tokens)
            sibling._tokens[: self.length] = self.tokens
            sibling.sequence_id += offset
            sibling.answer_indices = (index,)
            sibling.calibration = Calibration()
            sibling.random_stream = self.random_stream.of_answer(index)
            sibling.method = self.method.fork()
            sibling.forget_kv()
            sibling.prompt_logprobs = None  # the first one reports them
            sibling.admitted = None
            sibling.constraint = copy.copy(self.constraint)
            sibling.empty_check = self.empty_check and self.empty_check.fork()
            siblings.append(sibling)
        return siblings

    def take_prompt_logprobs(self) -> list[TokenLogprobs] | None:
        """Return the prompt's scores, the first time that an output is sent; None afterwards."""
        taken, self.prompt_logprobs = self.prompt_logprobs, None
        return taken

    def take_prefill_seconds(self) -> float | None:
        """Return the time since the first admission, the first time; None afterwards."""
        admitted, self.admitted = self.admitted, None
        return None if admitted is None else time.perf_counter() - admitted

    def final_outputs(
        self,
        reason: FinishReason,
        error: str | None = None,
        indices: Collection[int] | None = None,
    ) -> list[EngineOutput]:
        """Return the last outputs of the answers ``indices``; None means all of the sequence's."""
        return [
            EngineOutput(
                request_id=self.request_id,
                index=index,
                token_ids=[],
                finish_reason=reason,
                cached_tokens=self.cached_tokens or 0,
                reused_tokens=self.reused_tokens,
                error=error,
            )
            for index in (self.answer_indices if indices is None else indices)
        ]
