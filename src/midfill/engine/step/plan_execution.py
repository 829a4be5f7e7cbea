"""PlanExecution: applies a step's plan before the forward pass: preemptions, admissions, slots."""

import logging
import time
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

from midfill.engine.request import EngineOutput
from midfill.engine.scheduling.scheduler import Chunk, StepPlan
from midfill.engine.sequences.request_queues import RequestQueues
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.step.counters import EngineCounters, TenantCounters

_log = logging.getLogger(__name__)


class PlanExecution:
    """Applies plans to an engine's queues.

    Args:
        layers: of the model.
        queues: the engine's sequences.
        counters, tenants: count what is done.
    """

    def __init__(
        self,
        layers: int,
        queues: RequestQueues,
        counters: EngineCounters,
        tenants: TenantCounters,
    ) -> None:
        self._layers = layers
        self._queues = queues
        self._counters = counters
        self._tenants = tenants

    def preempt(self, sequence: Sequence) -> None:
        """Put a running sequence back into the queue."""
        self._counters.preemptions += 1
        sequence.method = sequence.method.after_preemption()
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
        self._counters.record_too_large(
            sequences[sequence_id].request_id for sequence_id in plan.too_large
        )
        for chunk in plan.background:
            self._queues.match_prefix(sequences[chunk.sequence_id])
        # Likewise for snapshots, which give their places to the states of sequences.
        for sequence in (*admitted, *(sequences[chunk.sequence_id] for chunk in plan.background)):
            sequence.held.start_state()
        slots = pool.allocate(len(plan.decodes)).tolist()
        for sequence_id, slot in zip(plan.decodes, slots, strict=True):
            sequences[sequence_id].held.append(slot)
        for sequence in admitted:
            slots = sequence.method.slots_needed(sequence.length)
            needed = sequence.length - sequence.computed if slots is None else slots
            sequence.held.reserve(needed)
        for chunk in plan.background:
            sequence = sequences[chunk.sequence_id]
            sequence.held.reserve(min(chunk.tokens, sequence.length - sequence.computed))
        for chunk in plan.drafts:
            sequences[chunk.sequence_id].held.reserve(chunk.tokens)
        outputs: list[EngineOutput] = []
        for sequence in admitted:  # once nothing is evicted any more in this step
            if not sequence.method.is_null:
                try:
                    self._start_method(sequence)
                except Exception as error:
                    outputs += self._queues.fail([sequence], method_failure(sequence, error))
        return outputs

    def _start_method(self, sequence: Sequence) -> None:
        """Have a sequence's method act on its admission."""
        admitted = sequence.method.admitted(sequence)
        sequence.computed = admitted.computed
        if sequence.admitted is not None:  # for the first time
            sequence.cached_tokens = (sequence.cached_tokens or 0) + admitted.copied
            self._counters.cached_tokens += admitted.copied

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

    def run_method_chunks(self, plan: StepPlan, outputs: list[EngineOutput]) -> StepPlan:
        """Run the chunks that methods compute by themselves; return the plan with what they leave.

        If one fails, the sequence's last outputs are added to ``outputs``.
        """
        if not (plan.chunks or plan.admit or plan.background):
            return plan  # mostly: only decodes run

        def left(chunks: SequenceOf[Chunk]) -> tuple[Chunk, ...]:
            return tuple(
                chunk._replace(tokens=self._run_method_chunk(chunk, outputs)) for chunk in chunks
            )

        return replace(
            plan, chunks=left(plan.chunks), admit=left(plan.admit), background=left(plan.background)
        )

    def _run_method_chunk(self, chunk: Chunk, outputs: list[EngineOutput]) -> int:
        """Run a chunk if a method computes it; return how many of its tokens are left."""
        sequence = self._queues.sequences.get(chunk.sequence_id)
        if sequence is None:
            return 0  # it has failed
        if sequence.method.is_null:
            return chunk.tokens
        started = time.perf_counter()
        try:
            ran = sequence.method.run_chunk(sequence, chunk.tokens)
        except Exception as error:
            outputs += self._queues.fail([sequence], method_failure(sequence, error))
            return 0
        if ran is None:
            return chunk.tokens
        if ran.computed != sequence.computed:
            sequence.computed, sequence.reused_tokens = ran.computed, ran.reused
            self._counters.reused_tokens += ran.reused
        self._counters.computed_tokens += -(-ran.row_layers // self._layers)
        self._counters.forward_seconds += time.perf_counter() - started
        if ran.fits is not None:
            self.hold_ahead(sequence, fits=ran.fits)
        return ran.left

    def hold_ahead(self, sequence: Sequence, *, fits: bool) -> None:
        """Go on after a decision about a prompt's KV, or preempt the sequence.

        It holds slots for all its tokens then, or for as many as its method runs next.

        Args:
            sequence: has more to compute.
            fits: whether there was room for what stays.
        """
        kv, pool = sequence.held, self._queues.pool
        missing = max(sequence.method.slots_ahead(sequence) - kv.reserved, 0) if fits else 0
        if fits and pool.available >= missing:
            kv.reserve(missing)
        else:
            self.preempt(sequence)


def method_failure(sequence: Sequence, error: Exception) -> str:
    """Log that a sequence's method has failed; return the message for its clients."""
    title = sequence.method.title
    _log.exception("%s failed", title)
    return f"{title} failed: {error}"
