"""LayeredPrefill: interleave prefill with decodes by groups of layers instead of by chunks.

Source: Lee et al., "From Tokens to Layers: Redefining Stall-Free Scheduling for LLM Serving with
Layered Prefill", 2025, arXiv 2510.08055. The layers are split into contiguous groups. In each step
the prompts in flight run through one group, and every decoding sequence through all layers. So a
prompt passes each layer once: its weights are read once for it, and none of its keys again.

What differs: the paper takes as many groups as keep a step's work near that of a chunk of 512
tokens, rounded to a table for up to 16; here the chunk is the token budget, nothing is rounded, and
there are up to as many groups as layers. A prompt that fits the budget would have one group, which
is a chunk, and is planned as one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise

from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import (
    Chunk,
    LayerChunk,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)


@dataclass(frozen=True)
class LayeredPrefill:
    """Prefills by layers; first come, first served.

    Prompts prefill in batches, one at a time: several that arrive together are merged as long as
    they don't exceed ``max_tokens``. A longer prompt runs in passes of that many tokens, each
    through all layers, unless it has to run as a whole. Prompts that fit the token budget together
    run as chunks.

    All slots of a prompt are taken at its admission, as for chunks, but a preemption between two
    layers would lose all that it has computed. So it is prefilled in chunks unless the slots last
    for its prefill and for the tokens that are decoded meanwhile.

    Attributes:
        chunked: plans everything else.
        layers: of the model.
        every_prompt: whether all prompts prefill by layers that may; otherwise only those that
            have to, since a method wants to see all of their rows between two layers.
    """

    chunked: SarathiServe
    layers: int
    every_prompt: bool = True

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError("a model has at least 1 layer")

    @property
    def max_tokens(self) -> int:
        """Maximum tokens in flight: with one layer per step, each step still keeps the budget."""
        return self.chunked.token_budget * self.layers

    def plan(self, state: ScheduleState) -> StepPlan:
        """Return the plan of one step."""
        if not self._concerned(state):
            return self.chunked.plan(state)
        decodes, victims, available = self.chunked.place_decodes(state)
        prefilling = [
            sequence
            for sequence in state.running
            if not sequence.decoding and sequence.sequence_id not in victims
        ]
        plan = StepPlan(tuple(victims), tuple(decodes))
        in_flight = [sequence for sequence in prefilling if sequence.by_layers]
        if in_flight:
            return self._continue(plan, in_flight)
        if prefilling or victims:
            chunked = self.chunked.plan(state)
            return replace(chunked, admit=tuple(self._whole_prompts(state, chunked.admit)))
        return self._admit(state, plan, available)

    def groups(self, tokens: int) -> list[tuple[int, int]]:
        """Return the groups of layers, as even as possible, that so many tokens run through."""
        count = min(self.layers, max(1, -(-tokens // self.chunked.token_budget)))
        return list(pairwise(round(i * self.layers / count) for i in range(count + 1)))

    def _concerned(self, state: ScheduleState) -> bool:
        """Whether a sequence prefills by layers, or might."""
        if any(sequence.by_layers and not sequence.decoding for sequence in state.running):
            return True
        return any(self._by_layers(sequence) for sequence in state.waiting)

    def _by_layers(self, sequence: WaitingSequence) -> bool:
        allowed = self.every_prompt and sequence.prefill == "any"
        return allowed or sequence.prefill == "layers"

    def _continue(self, plan: StepPlan, in_flight: list[RunningSequence]) -> StepPlan:
        """Run the prompts in flight through their next group, or begin their next pass."""
        started = [sequence for sequence in in_flight if sequence.layer_tokens]
        if not started:
            head = in_flight[0]
            tokens = head.remaining if head.whole else min(head.remaining, self.max_tokens)
            return self._with_group(plan, [(head.sequence_id, tokens)], 0)
        first = started[0].next_layer
        batch = [
            (sequence.sequence_id, sequence.layer_tokens)
            for sequence in started
            if sequence.next_layer == first
        ]
        return self._with_group(plan, batch, first)

    def _with_group(self, plan: StepPlan, prompts: list[tuple[int, int]], first: int) -> StepPlan:
        """Return ``plan`` with the group of layers that begins at ``first``, or contains it.

        Args:
            plan: a plan without.
            prompts: (sequence id, tokens of the pass) each.
            first: the first layer.
        """
        groups = self.groups(sum(tokens for _, tokens in prompts))
        end = next(end for _, end in groups if end > first)
        chunks = tuple(
            LayerChunk(sequence_id, tokens, first, end) for sequence_id, tokens in prompts
        )
        return replace(plan, layer_chunks=chunks)

    def _admit(self, state: ScheduleState, plan: StepPlan, available: int) -> StepPlan:
        """Start the prompts at the queue's head: all that fit a step, or some by layers."""
        chunks = self.chunked.admit(state, (), len(plan.decodes), available, len(plan.decodes))
        whole = self._whole_prompts(state, chunks)
        if whole:
            return replace(plan, admit=tuple(whole))
        prompts = self._merge(state, len(plan.decodes), available)
        if prompts:
            admit = tuple(Chunk(sequence_id, 0) for sequence_id, _ in prompts)
            return self._with_group(replace(plan, admit=admit), prompts, 0)
        if not chunks or state.waiting[0].prefill == "layers":
            return plan
        head = chunks[0].sequence_id
        too_large = (head,) if self._by_layers(state.waiting[0]) else ()
        return replace(plan, admit=(chunks[0],), too_large=too_large)

    def _whole_prompts(self, state: ScheduleState, chunks: Iterable[Chunk]) -> list[Chunk]:
        """Return the chunks at the beginning of ``chunks`` that are whole prompts."""
        whole = []
        for chunk, sequence in zip(chunks, state.waiting, strict=False):
            cached = state.cache.cached_prefix(sequence.sequence_id).tokens
            if chunk.tokens < sequence.length - cached or sequence.prefill == "layers":
                break
            whole.append(chunk)
        return whole

    def _merge(self, state: ScheduleState, decodes: int, available: int) -> list[tuple[int, int]]:
        """Return the prompts at the queue's head to prefill together, with their tokens to run."""
        places = max(self.chunked.max_running - len(state.running), 0)
        merged: list[tuple[int, int]] = []
        total = 0
        for sequence in state.waiting[:places]:
            cached = state.cache.cached_prefix(sequence.sequence_id)
            tokens = sequence.length - cached.tokens
            available -= sequence.needs(cached)
            if not self._by_layers(sequence) or (merged and total + tokens > self.max_tokens):
                break
            others = [sequence_id for sequence_id, _ in merged]
            if self.chunked.should_wait(state, sequence, cached.tokens, others):
                break
            spare = decodes * (self._steps(total + tokens) - 1)
            if available < (0 if sequence.prefill == "layers" else spare):
                break
            whole = sequence.prefill == "layers"
            merged.append((sequence.sequence_id, tokens if whole else min(tokens, self.max_tokens)))
            total += tokens
        return merged

    def _steps(self, tokens: int) -> int:
        """Return how many steps so many tokens take."""
        passes, rest = divmod(tokens, self.max_tokens)
        return passes * self.layers + (len(self.groups(rest)) if rest else 0)
