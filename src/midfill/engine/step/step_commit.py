"""StepCommit: takes over what a step has computed and sampled."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

from midfill.engine.kv_transfer.warm_cache import KvTraffic
from midfill.engine.request import EngineOutput, FinishReason
from midfill.engine.sequences.request_queues import RequestQueues
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.step.batching import ScheduledSequence
from midfill.engine.step.counters import EngineCounters, TenantCounters
from midfill.engine.step.plan_execution import PlanExecution, method_failure
from midfill.engine.step.verification import Verification


class StepCommit:
    """Counts computed tokens, caches their KV, has methods decide about it, and ends answers.

    Args:
        queues: the engine's sequences.
        execution: preempts sequences.
        kv_traffic: is told of prompts whose KV is there.
        counters, tenants: count what was done.
        on_finish: called with each sequence whose answer has ended, and why, once it has released
            its slots.
    """

    def __init__(
        self,
        queues: RequestQueues,
        execution: PlanExecution,
        kv_traffic: KvTraffic,
        counters: EngineCounters,
        tenants: TenantCounters,
        on_finish: Callable[[Sequence, FinishReason], None],
    ) -> None:
        self._on_finish = on_finish
        self._queues = queues
        self._execution = execution
        self._kv_traffic = kv_traffic
        self._counters = counters
        self._tenants = tenants

    def commit(
        self, scheduled: Iterable[ScheduledSequence], groups: Iterable[SequenceOf[Verification]]
    ) -> list[EngineOutput]:
        """Take over a step; return the outputs.

        Args:
            scheduled: what has run.
            groups: the answers that were sampled for, siblings together.
        """
        outputs: list[EngineOutput] = []
        for entry in scheduled:
            if entry.completes:
                outputs += self._commit_computed(entry)
        for group in groups:
            outputs += self._commit_sampled(group)
        return outputs

    def _commit_computed(self, entry: ScheduledSequence) -> list[EngineOutput]:
        """Count the computed tokens; hand KV of chunks that sample nothing to the prefix cache."""
        sequence = entry.sequence
        sequence.layer_rows = None
        sequence.computed += entry.tokens
        if not sequence.method.is_null:
            sequence.computed = sequence.method.committed(sequence)
        sequence.held.state_tokens = sequence.computed
        if sequence.background:
            self._counters.background_tokens += entry.tokens
            finished = sequence.computed == sequence.length
            self._queues.release(sequence)
            return self._queues.end(sequence, "stop") if finished else []
        if not entry.sampled:
            sequence.held.cache_prefix(sequence.cache_keys(sequence.computed))
            if sequence.computed in sequence.snapshots:
                sequence.held.keep_snapshot()
            if not sequence.method.is_null:
                return self._decide_prefilling(sequence)
        return []

    def _decide_prefilling(self, sequence: Sequence) -> list[EngineOutput]:
        """Have a method decide about what was computed, where there is more to compute after it.

        That is so where tokens of the prompt come after the compressed ones, and after preemption,
        when the answer has begun before.
        """
        outputs: list[EngineOutput] = []
        if self._decide(sequence, outputs):
            self._execution.hold_ahead(sequence, fits=True)
        return outputs

    def _decide(self, sequence: Sequence, outputs: list[EngineOutput]) -> bool:
        """Have a sequence's method decide, if it has come to a point; return whether it goes on.

        Without room for what stays, it is preempted. If the method fails, the sequence ends, and
        its last outputs are added to ``outputs``.
        """
        method = sequence.method
        try:
            fits = method.decide(sequence)
        except Exception as error:
            outputs += self._queues.fail([sequence], method_failure(sequence, error))
            return False
        self._counters.computed_tokens += method.take_extra_rows()
        if not fits:
            self._execution.preempt(sequence)
        return fits

    def _commit_sampled(self, group: SequenceOf[Verification]) -> list[EngineOutput]:
        """Take over the sampled tokens of sibling answers, which fork here; return the outputs."""
        first = group[0].sequence
        if first.decoding and first.method.is_null and len(group) == 1 and not group[0].failed:
            output = self._commit_answer(group[0])  # mostly: an answer goes on
            return [output] if output.token_ids or output.finish_reason is not None else []
        if any(answer.failed for answer in group):
            # KV that led to such logits must not be found by others, so it is discarded.
            outputs = [group[0].output()] if len(group) == 1 and group[0].tokens else []
            return outputs + self._queues.fail([first], "the model's logits hold no finite value")
        if not first.decoding:
            # An answer that started again may have other tokens than those that were computed.
            computed = min(first.computed, first.length - 1)
            first.held.cache_prefix(first.cache_keys(computed))
            self._kv_traffic.note(first)
        fits, failure = True, ""
        if not first.decoding:  # where siblings fork, they share what stays
            try:
                fits = first.method.decide(first)
            except Exception as error:
                failure = method_failure(first, error)
                if len(group) > 1:
                    return self._queues.fail([first], failure)
        if len(group) > 1:
            self._queues.start_siblings([answer.sequence for answer in group])
        outputs = [self._commit_answer(answer) for answer in group]
        for answer in group:
            sequence = answer.sequence
            if answer.finish_reason is not None or sequence.kv is None:
                continue
            if failure:  # the token that was sampled before counts, as it does while decoding
                outputs += self._queues.fail([sequence], failure)
            elif fits:
                self._decide(sequence, outputs)
            else:
                self._execution.preempt(sequence)
        return [
            output for output in outputs if output.token_ids or output.finish_reason is not None
        ]

    def _commit_answer(self, verification: Verification) -> EngineOutput:
        """Free the slots of rejected tokens, finish the answer if it ended, return its output."""
        sequence = verification.sequence
        sequence.decoding = True
        self._counters.generated_tokens += len(verification.tokens)
        self._tenants.record_tokens(sequence, len(verification.tokens))
        self._queues.waiting.charge(sequence.tenant, len(verification.tokens))
        if sequence.kv is not None:
            sequence.computed = sequence.length - 1
            sequence.kv.truncate(sequence.computed)
            sequence.method.rolled_back(sequence.computed)
        if verification.finish_reason is not None:
            self._queues.finish(sequence)
            self._on_finish(sequence, verification.finish_reason)
        elif sequence.kv is not None and sequence.kv.state_is_ahead:
            self._execution.preempt(sequence)  # a state can't forget; it starts from a snapshot
        return verification.output()
