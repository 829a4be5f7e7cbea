"""PlanExecution: applies a step's plan before the forward pass: preemptions, admissions, slots."""

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from midfill.engine.parallel_contexts import ContextPlaces
from midfill.engine.request import EngineOutput
from midfill.engine.scheduling.scheduler import Chunk, StepPlan
from midfill.engine.sequences.request_queues import RequestQueues
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.sequences.tenant_stats import TenantCounters
from midfill.engine.step.blending import Blending
from midfill.engine.step.counters import EngineCounters
from midfill.kv.sequence_kv import SequenceKV

_log = logging.getLogger(__name__)


class PlanExecution:
    """Applies plans to an engine's queues.

    Args:
        layers: of the model.
        queues: the engine's sequences.
        blending: prefills with KV from elsewhere.
        contexts: where files are cached that are computed apart from each other.
        counters, tenants: count what is done.
    """

    def __init__(
        self,
        layers: int,
        queues: RequestQueues,
        blending: Blending,
        contexts: ContextPlaces,
        counters: EngineCounters,
        tenants: TenantCounters,
    ) -> None:
        self._layers = layers
        self._queues = queues
        self._blending = blending
        self._counters = counters
        self._tenants = tenants
        self._contexts = contexts

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue."""
        self._counters.preemptions += 1
        sequence.reuse = None  # computed in full from now on: that progress is kept
        self._queues.preempt(sequence)

    def apply(self, plan: StepPlan) -> list[EngineOutput]:
        """Preempt and admit sequences, and allocate slots for everything that runs.

        Returns:
            The last outputs of sequences that couldn't be started.
        """
        sequences, pool = self._queues.sequences, self._queues.pool
        for sequence_id in plan.preempt:
            self.preempt(sequences[sequence_id])
        # Lock cached prefixes before any slot is allocated: allocation may evict.
        admitted = [sequences[chunk.sequence_id] for chunk in plan.admit]
        for sequence, chunk in zip(admitted, plan.admit, strict=True):
            self._admit(sequence, by_layers=chunk.tokens == 0)
        self._counters.record_too_large(sequences[one].request_id for one in plan.too_large)
        for chunk in plan.background:
            self._queues.match_prefix(sequences[chunk.sequence_id])
        slots = pool.allocate(len(plan.decodes)).tolist()
        for sequence_id, slot in zip(plan.decodes, slots, strict=True):
            _held(sequences[sequence_id]).append(slot)
        for sequence in admitted:
            slots = sequence.slots_needed
            needed = sequence.length - sequence.computed if slots is None else slots
            _held(sequence).reserve(needed)
        for chunk in plan.background:
            sequence = sequences[chunk.sequence_id]
            _held(sequence).reserve(min(chunk.tokens, sequence.length - sequence.computed))
        for chunk in plan.drafts:
            _held(sequences[chunk.sequence_id]).reserve(chunk.tokens)
        outputs: list[EngineOutput] = []
        for sequence in admitted:  # once nothing is evicted any more in this step
            if sequence.parallel is not None:
                self._copy_contexts(sequence)
            if sequence.reuse is not None:
                try:
                    self._blending.start(sequence)
                    if sequence.blend is not None:
                        self._queues.start_branch(sequence)
                except Exception as error:
                    outputs += self._queues.fail([sequence], _blend_failure(error))
        return outputs

    def _copy_contexts(self, sequence: Sequence) -> None:
        """Copy the KV of files that are cached elsewhere."""
        assert sequence.parallel is not None
        copied = self._contexts.copy(
            sequence.parallel, sequence.cache_root, sequence.tokens, _held(sequence),
            sequence.computed,
        )  # fmt: skip
        sequence.computed = sequence.parallel.skip(sequence.computed)
        if sequence.admitted is not None:  # for the first time
            sequence.cached_tokens = (sequence.cached_tokens or 0) + copied
            self._counters.cached_tokens += copied

    def commit_contexts(self, sequence: Sequence) -> None:
        """Note where a sequence's files are, and go on after those whose KV was copied."""
        contexts = sequence.parallel
        assert contexts is not None
        if sequence.computed <= contexts.end:
            sequence.computed = contexts.skip(sequence.computed)
        if not sequence.decoding:
            self._contexts.record(contexts, sequence.cache_root, sequence.tokens, sequence.computed)

    def _admit(self, sequence: Sequence, *, by_layers: bool) -> None:
        is_new = sequence.cached_tokens is None
        self._queues.admit(sequence)
        sequence.by_layers = by_layers
        self._counters.layered_prompts += by_layers
        if is_new:
            sequence.admitted = time.perf_counter()
            if sequence.length > sequence.prompt_length:
                return  # another engine has begun the answer, and counted its prompt
            self._counters.prompt_tokens += sequence.prompt_length
            if sequence.loaded_variant:
                self._counters.reused_tokens += sequence.reused_tokens
            else:
                self._counters.cached_tokens += sequence.computed
            self._tenants.record_admission(sequence)
            tokens = sequence.prompt_length - sequence.computed
            self._queues.waiting.charge(sequence.tenant, tokens)

    def blend(self, plan: StepPlan, outputs: list[EngineOutput]) -> StepPlan:
        """Run the chunks of prefills that are blended; return the plan with what they leave.

        If one fails, the sequence's last outputs are added to ``outputs``.
        """
        if not (plan.chunks or plan.admit or plan.background):
            return plan  # mostly: only decodes run

        def left(chunks: SequenceOf[Chunk]) -> tuple[Chunk, ...]:
            return tuple(
                chunk._replace(tokens=self._blend_chunk(chunk, outputs)) for chunk in chunks
            )

        return replace(
            plan, chunks=left(plan.chunks), admit=left(plan.admit), background=left(plan.background)
        )

    def _blend_chunk(self, chunk: Chunk, outputs: list[EngineOutput]) -> int:
        """Run a chunk of a prefill if it is blended; return how many of its tokens are left."""
        sequence = self._queues.sequences.get(chunk.sequence_id)
        if sequence is None:
            return 0  # it has failed
        if sequence.blend is None:
            return chunk.tokens
        started, before = time.perf_counter(), self._blending.computed_row_layers
        try:
            left = self._blending.advance(sequence, chunk.tokens)
            self._counters.reused_tokens += 0 if sequence.blend else sequence.reused_tokens
        except Exception as error:
            outputs += self._queues.fail([sequence], _blend_failure(error))
            return 0
        row_layers = self._blending.computed_row_layers - before
        self._counters.computed_tokens += -(-row_layers // self._layers)
        self._counters.forward_seconds += time.perf_counter() - started
        return left


def _blend_failure(error: Exception) -> str:
    _log.exception("a blended prefill failed")
    return f"the method of reuse failed: {error}"


def _held(sequence: Sequence) -> SequenceKV:
    """Return the KV of a sequence that holds slots."""
    assert sequence.kv is not None
    return sequence.kv
