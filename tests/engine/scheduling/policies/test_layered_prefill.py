"""LayeredPrefill as a pure function: plans for states, without a model."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_states import CacheFacts, decoding, prefilling

from midfill.engine.scheduling.policies.layered_prefill import LayeredPrefill
from midfill.engine.scheduling.policies.sarathi_serve import SarathiServe
from midfill.engine.scheduling.scheduler import (
    Chunk,
    LayerChunk,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.kv.radix_cache import CachedPrefix

LAYERS = 30


def policy(budget: int = 100, *, every_prompt: bool = True, layers: int = LAYERS) -> LayeredPrefill:
    return LayeredPrefill(SarathiServe(budget, max_running=8), layers, every_prompt)


def plan(
    made_by: LayeredPrefill,
    running: Sequence[RunningSequence] = (),
    waiting: Sequence[WaitingSequence] = (),
    available: int = 100_000,
    cache: CacheFacts | None = None,
) -> StepPlan:
    return made_by.plan(
        ScheduleState(tuple(running), tuple(waiting), available, cache or CacheFacts())
    )


def in_flight(sequence_id: int, tokens: int, next_layer: int, length: int = 0) -> RunningSequence:
    return RunningSequence(sequence_id, length or tokens, 0, False, True, False, tokens, next_layer)


class TestGroups:
    @given(st.integers(1, 100_000), st.integers(1, 40), st.integers(1, 600))
    def test_cover_the_layers_evenly_within_a_step_of_the_budget(
        self, tokens: int, layers: int, budget: int
    ) -> None:
        groups = policy(budget, layers=layers).groups(tokens)
        assert [first for first, _ in groups] == [0, *(end for _, end in groups[:-1])]
        assert groups[-1][1] == layers
        sizes = [end - first for first, end in groups]
        assert max(sizes) - min(sizes) <= 1
        # One layer is the least that a step can run.
        if tokens <= budget * layers:
            assert max(sizes) * tokens < budget * layers + tokens

    def test_a_layer_is_the_smallest_group(self) -> None:
        assert len(policy(1).groups(10**6)) == LAYERS

    def test_a_model_without_layers_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at least 1"):
            policy(layers=0)


class TestInFlight:
    def test_a_prompt_takes_one_group_in_each_step_beside_all_decodes(self) -> None:
        running = [decoding(1), decoding(2)]
        made = plan(policy(), running, [WaitingSequence(3, 400)])
        chunks = [made.layer_chunks]
        assert made.admit == (Chunk(3, 0),)
        while chunks[-1][0].end < LAYERS:
            made = plan(policy(), [*running, in_flight(3, 400, chunks[-1][0].end)])
            assert made.decodes == (1, 2)
            assert made.admit == made.chunks == ()
            chunks.append(made.layer_chunks)
        groups = policy().groups(400)
        assert chunks == [(LayerChunk(3, 400, first, end),) for first, end in groups]

    def test_nothing_else_is_admitted_meanwhile(self) -> None:
        made = plan(policy(), [in_flight(1, 400, 7)], [WaitingSequence(2, 5)])
        assert made.admit == ()

    def test_the_next_pass_of_a_long_prompt_begins_with_the_first_layer(self) -> None:
        long = 100 * LAYERS + 150
        made = plan(policy(), waiting=[WaitingSequence(1, long)])
        assert made.layer_chunks == (LayerChunk(1, 100 * LAYERS, 0, 1),)
        done = RunningSequence(1, long, 100 * LAYERS, False, True)
        assert plan(policy(), [done]).layer_chunks == (LayerChunk(1, 150, 0, 15),)

    def test_a_prompt_cancelled_beside_it_leaves_it_in_its_groups(self) -> None:
        """The rest of the batch is smaller, so fewer steps will do."""
        made = plan(policy(), [in_flight(2, 150, 9)])
        assert made.layer_chunks == (LayerChunk(2, 150, 9, 15),)


class TestAdmission:
    def test_prompts_that_fit_a_step_are_chunks(self) -> None:
        made = plan(policy(), waiting=[WaitingSequence(1, 60), WaitingSequence(2, 40)])
        assert made == StepPlan(admit=(Chunk(1, 60), Chunk(2, 40)))

    def test_a_long_prompt_after_a_short_one_waits_for_the_next_step(self) -> None:
        made = plan(policy(), waiting=[WaitingSequence(1, 60), WaitingSequence(2, 300)])
        assert made == StepPlan(admit=(Chunk(1, 60),))

    def test_prompts_that_wait_together_are_merged(self) -> None:
        waiting = [WaitingSequence(1, 300), WaitingSequence(2, 40), WaitingSequence(3, 100)]
        made = plan(policy(), waiting=waiting)
        assert made.admit == (Chunk(1, 0), Chunk(2, 0), Chunk(3, 0))
        end = policy().groups(440)[0][1]
        assert made.layer_chunks == tuple(
            LayerChunk(*one, 0, end) for one in ((1, 300), (2, 40), (3, 100))
        )

    def test_no_more_are_merged_than_fit_a_pass(self) -> None:
        waiting = [WaitingSequence(1, 100 * LAYERS - 20), WaitingSequence(2, 40)]
        assert plan(policy(), waiting=waiting).admit == (Chunk(1, 0),)

    def test_a_prompt_that_shares_a_prefix_with_one_in_flight_waits(self) -> None:
        waiting = [WaitingSequence(1, 300), WaitingSequence(2, 300)]
        cache = CacheFacts(common={(2, 1): 200})
        assert plan(policy(), waiting=waiting, cache=cache).admit == (Chunk(1, 0),)

    def test_cached_tokens_do_not_count(self) -> None:
        cache = CacheFacts(cached={1: CachedPrefix(350, 0), 2: CachedPrefix(100, 0)})
        waiting = [WaitingSequence(1, 360), WaitingSequence(2, 360)]
        made = plan(policy(), waiting=waiting[:1], cache=cache)
        assert made == StepPlan(admit=(Chunk(1, 10),))
        made = plan(policy(), waiting=waiting[1:], cache=cache)
        assert made.layer_chunks == (LayerChunk(2, 260, 0, 10),)

    def test_by_default_only_prompts_that_have_to_prefill_by_layers_do(self) -> None:
        usual = policy(every_prompt=False)
        assert plan(usual, waiting=[WaitingSequence(1, 400)]).admit == (Chunk(1, 100),)
        whole = WaitingSequence(1, 50, "layers")
        assert plan(usual, waiting=[whole]).layer_chunks == (LayerChunk(1, 50, 0, LAYERS),)

    def test_one_that_has_to_waits_for_the_chunks_before_it(self) -> None:
        usual = policy(every_prompt=False)
        waiting = [WaitingSequence(2, 50, "layers"), WaitingSequence(3, 5)]
        made = plan(usual, [prefilling(1, 120, 60)], waiting)
        assert made == StepPlan(chunks=(Chunk(1, 60),))
        made = plan(usual, [], [WaitingSequence(1, 20), *waiting])
        assert made == StepPlan(admit=(Chunk(1, 20),))

    def test_one_that_was_interrupted_between_layers_prefills_in_chunks(self) -> None:
        made = plan(policy(), waiting=[WaitingSequence(1, 400, "chunks")])
        assert made == StepPlan(admit=(Chunk(1, 100),))


class TestScarceSlots:
    def test_chunks_unless_the_slots_last_for_the_decodes_of_all_its_steps(self) -> None:
        running = [decoding(1), decoding(2)]
        waiting = [WaitingSequence(3, 400), WaitingSequence(4, 400)]
        # Four steps: two decodes take their slots in this one, and in three more.
        enough = 2 + 400 + 2 * 3
        assert plan(policy(), running, waiting, enough).admit == (Chunk(3, 0),)
        made = plan(policy(), running, waiting, enough - 1)
        assert made.admit == (Chunk(3, 98),)
        assert made.too_large == (3,)

    def test_a_prompt_that_does_not_fit_waits(self) -> None:
        assert plan(policy(), waiting=[WaitingSequence(1, 400)], available=399) == StepPlan()

    def test_one_that_has_to_is_never_cut_into_chunks(self) -> None:
        waiting = [WaitingSequence(3, 400, "layers")]
        made = plan(policy(), [decoding(1)], waiting, 401)
        assert [chunk.sequence_id for chunk in made.layer_chunks] == [3]

    def test_a_preempted_prompt_is_left_out_of_the_batch(self) -> None:
        running = [decoding(1), in_flight(2, 400, 8), in_flight(3, 300, 8)]
        made = plan(policy(), running, available=0, cache=CacheFacts(held={3: 300}))
        assert made.preempt == (3,)
        assert [chunk.sequence_id for chunk in made.layer_chunks] == [2]
