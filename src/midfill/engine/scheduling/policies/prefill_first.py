"""PrefillFirst: whole prompts before any decode, the order that Sarathi-Serve was written against.

Source: vLLM's scheduler before chunked prefill (Kwon et al., SOSP 2023, arXiv 2309.06180, section
4.5), which Agrawal et al., OSDI 2024, arXiv 2403.02310, section 3.2, call prefill-prioritising. A
baseline: time to first token is short, and every running answer stalls for as long as prompts take.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import Chunk, ScheduleState, StepPlan


@dataclass(frozen=True)
class WholePrompts(SarathiServe):
    """What policies share that never cut a prompt into chunks.

    Attributes:
        prefill_tokens: maximum prompt tokens per step; a longer prompt runs by itself.
            ``token_budget`` and ``ScheduleState.max_rows`` bound nothing.
    """

    prefill_tokens: int = 2048

    fixed_options: ClassVar[frozenset[str]] = frozenset({"gap", "short_share"})

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prefill_tokens < 1:
            raise ValueError("prefill_tokens must be at least 1")

    def whole_chunks(self, state: ScheduleState) -> tuple[Chunk, ...]:
        """Return what is left of prompts that have started: a method may have had them stop."""
        return tuple(
            Chunk(each.sequence_id, each.atomic_tokens or each.remaining)
            for each in state.running
            if not each.decoding
        )

    def admit_whole(self, state: ScheduleState, available: int, decodes: int) -> tuple[Chunk, ...]:
        """Return the prompts at the queue's head that run as a whole in one step.

        Args:
            state: the state.
            available: slots that are left.
            decodes: how many sequences decode. They are left a slot each, so that what is admitted
                is not preempted at once.
        """
        whole = replace(self, token_budget=self.prefill_tokens, short_share=0.0)
        unlimited = replace(state, max_rows=None)
        admitted: list[Chunk] = []
        started = [each.sequence_id for each in state.running if not each.decoding]
        for chunk, sequence in zip(
            SarathiServe.admit(whole, unlimited, started, 0, available - decodes, 0),
            state.waiting,
            strict=False,
        ):
            cached = state.cache.cached_prefix(sequence.sequence_id).tokens
            tokens = sequence.atomic_tokens or sequence.length - cached
            if chunk.tokens < tokens and admitted:
                break
            admitted.append(Chunk(sequence.sequence_id, tokens))
        return tuple(admitted)


@dataclass(frozen=True)
class PrefillFirst(WholePrompts):
    """Runs prompts alone as long as any fits, and decodes otherwise; first come, first served."""

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        chunks = self.whole_chunks(state)
        if chunks:
            return StepPlan(chunks=chunks)
        admit = self.admit_whole(state, state.available_slots, len(state.running))
        if admit:
            return StepPlan(admit=admit)
        decodes, victims, _ = self.place_decodes(state)
        return StepPlan(tuple(victims), tuple(decodes))
