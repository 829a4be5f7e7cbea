"""Background requests: prompts computed while the engine is idle, at nobody's cost."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import pytest
import torch
from serving import background, check_idle, greedy_alone, request, serve
from toy_runner import VOCAB, ToyRunner

from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.policies.idle_prefill import IdlePrefill
from midfill.engine.policies.sarathi_serve import SarathiServe
from midfill.engine.request import EngineOutput
from midfill.engine.scheduler import (
    Chunk,
    RunningSequence,
    ScheduleState,
    StepPlan,
    WaitingSequence,
)
from midfill.errors import InvalidRequestError
from midfill.forward.batch import ForwardBatch
from midfill.kv.radix_cache import CachedPrefix


@dataclass(frozen=True)
class Cache:
    """A cache view of given facts."""

    cached: dict[int, CachedPrefix] = field(default_factory=dict)

    def cached_prefix(self, sequence_id: int) -> CachedPrefix:
        return self.cached.get(sequence_id, CachedPrefix(0, 0))

    def common_prefix(self, first: int, second: int) -> int:
        return 0

    def released_by(self, victims: Sequence[int]) -> int:
        return 0


class TestThePolicy:
    POLICY = IdlePrefill(SarathiServe(token_budget=32), chunk=10, most_waiting=3)

    def plan(
        self,
        background: Sequence[tuple[int, int]],
        running: tuple[RunningSequence, ...] = (),
        waiting: tuple[WaitingSequence, ...] = (),
        available: int = 1000,
        cache: Cache | None = None,
    ) -> StepPlan:
        queue = tuple(WaitingSequence(*one) for one in background)
        return self.POLICY.plan(
            ScheduleState(running, waiting, available, cache or Cache(), background=queue)
        )

    def test_when_idle_the_oldest_runs_a_chunk(self) -> None:
        assert self.plan([(1, 50), (2, 50)]) == StepPlan(background=(Chunk(1, 10),))

    def test_what_is_cached_needs_no_chunk(self) -> None:
        cache = Cache({1: CachedPrefix(45, 45)})
        assert self.plan([(1, 50)], cache=cache) == StepPlan(background=(Chunk(1, 5),))

    def test_whatever_else_there_is_goes_first(self) -> None:
        running = (RunningSequence(0, 20, 19, True),)
        assert self.plan([(1, 50)], running) == StepPlan(decodes=(0,))
        waiting = (WaitingSequence(0, 20),)
        assert self.plan([(1, 50)], waiting=waiting) == StepPlan(admit=(Chunk(0, 20),))
        # Even if it can't move.
        assert self.plan([(1, 50)], waiting=waiting, available=5) == StepPlan()

    def test_the_oldest_are_dropped_when_there_are_too_many(self) -> None:
        five = [(number, 50) for number in range(1, 6)]
        assert self.plan(five) == StepPlan(drop=(1, 2), background=(Chunk(3, 10),))
        running = (RunningSequence(0, 20, 19, True),)
        assert self.plan(five, running) == StepPlan(drop=(1, 2), decodes=(0,))

    def test_prompts_that_do_not_fit_as_a_whole_are_dropped(self) -> None:
        cache = Cache({1: CachedPrefix(40, 40), 2: CachedPrefix(40, 10)})
        made = self.plan([(1, 50), (2, 50)], available=49, cache=cache)
        assert made == StepPlan(drop=(1,), background=(Chunk(2, 10),))
        assert self.plan([(1, 50)], available=50, cache=cache).drop == ()

    def test_sizes_that_make_no_sense_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least"):
            IdlePrefill(SarathiServe(), chunk=0)


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


def engine(slots: int = 512, **options: int) -> Engine:
    return Engine(ToyRunner(slots), (), EngineOptions(**({"background_chunk": 16} | options)))


def steps(one: Engine, count: int) -> list[EngineOutput]:
    return [output for _ in range(count) for output in one.step()]


class TestAnIdleEngine:
    def test_computes_every_token_of_the_prompt_and_generates_none(self) -> None:
        one = engine()
        answer = serve(one, [background("b", prompt(100))])["b", 0]
        assert (answer.tokens, answer.finish_reason) == ([], "stop")
        stats = one.stats()
        assert stats.slots_cached == stats.computed_tokens == stats.background_tokens == 100
        assert stats.generated_tokens == stats.prompt_tokens == stats.cached_tokens == 0
        assert [batch.rows for batch in one._runner.batches] == [16] * 6 + [4]
        assert all(len(batch.logit_rows) == 0 for batch in one._runner.batches)

    def test_a_request_that_follows_finds_it_and_says_what_it_would_say(self) -> None:
        one = engine()
        tokens = prompt(100)
        serve(one, [background("b", tokens)])
        computed = one.stats().computed_tokens
        answer = serve(one, [request("a", [*tokens, 7, 8])])["a", 0]
        assert answer.cached_tokens == 100
        assert one.stats().computed_tokens - computed == 2 + 11
        assert answer.tokens == greedy_alone(ToyRunner(256), [*tokens, 7, 8], 12)

    def test_only_its_own_tenant_finds_it(self) -> None:
        one = engine()
        serve(one, [background("b", prompt(50), tenant="ann")])
        assert serve(one, [request("a", prompt(50), tenant="bob")])["a", 0].cached_tokens == 0
        assert serve(one, [request("a", prompt(50), tenant="ann")])["a", 0].cached_tokens == 49

    def test_computes_only_what_is_not_cached(self) -> None:
        one = engine()
        tokens = prompt(60)
        serve(one, [request("a", tokens)])
        answer = serve(one, [background("b", tokens + prompt(20, 1))])["b", 0]
        assert answer.cached_tokens >= 60
        assert one.stats().background_tokens <= 20

    def test_requires_nothing_of_an_answer_that_there_will_not_be(self) -> None:
        answerless = msgspec.structs.replace(background("b", prompt(20)), begins_with=b"never")
        assert serve(engine(), [answerless])["b", 0].finish_reason == "stop"

    def test_takes_one_prompt_after_the_other(self) -> None:
        one = engine()
        for name in "abc":
            one.add(background(name, prompt(40, ord(name))))
        assert [output.request_id for output in steps(one, 9)] == ["a", "b", "c"]
        check_idle(one)

    def test_holds_no_slot_between_two_steps(self) -> None:
        one = engine()
        one.add(background("b", prompt(100)))
        for count in range(1, 7):
            one.step()
            stats = one.stats()
            assert (stats.running, stats.waiting, stats.background) == (0, 0, 1)
            assert stats.slots_cached == 16 * count
            assert stats.slots_free == 512 - 16 * count
            assert one.has_work()


class TestARealRequest:
    def test_gets_its_first_token_in_as_many_steps_as_without(self) -> None:
        def first_output(one: Engine) -> int:
            one.add(request("a", prompt(60, 1)))
            return next(n for n in range(100) if one.step())

        alone = first_output(engine(token_budget=16))
        one = engine(token_budget=16)
        one.add(background("b", prompt(100)))
        one.step()
        assert first_output(one) == alone

    def test_stops_the_background_until_it_is_done(self) -> None:
        one = engine()
        one.add(background("b", prompt(100)))
        steps(one, 2)
        one.add(request("a", prompt(60, 1)))
        answered = steps(one, 12)
        assert [output.token_ids for output in answered] == [
            [token] for token in greedy_alone(ToyRunner(256), prompt(60, 1), 12)
        ]
        assert (one.stats().background, one.stats().background_tokens) == (1, 32)
        # It goes on where it was.
        assert [output.finish_reason for output in steps(one, 5)] == ["stop"]
        assert one.stats().background_tokens == 100

    def test_finds_what_was_computed_so_far(self) -> None:
        one = engine()
        one.add(background("b", prompt(100)))
        steps(one, 3)
        assert serve(one, [request("a", prompt(100))])["a", 0].cached_tokens == 48

    def test_may_evict_it_and_it_is_computed_again(self) -> None:
        one = engine(slots=100)
        one.add(background("b", prompt(60)))
        steps(one, 2)
        one.add(request("a", prompt(80, 1)))
        answers = serve(one)
        assert answers["a", 0].tokens == greedy_alone(ToyRunner(256), prompt(80, 1), 12)
        assert one.stats().preemptions == 0
        assert one.stats().background_tokens > 60
        assert serve(one, [request("c", prompt(60))])["c", 0].cached_tokens == 59


class FailingRunner(ToyRunner):
    """Raises in its second pass, when the KV is written already."""

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        logits = super().forward(batch)
        if len(self.batches) == 2:
            raise RuntimeError("no memory")
        return logits


class TestItsEnd:
    def test_prompts_larger_than_the_pool_are_dropped_before_anything_is_evicted(self) -> None:
        one = engine(slots=80)
        serve(one, [request("a", prompt(40))])
        cached = one.stats().slots_cached
        answers = serve(one, [background("large", prompt(81)), background("fits", prompt(9, 2))])
        assert answers["large", 0].finish_reason == "cancelled"
        assert answers["fits", 0].finish_reason == "stop"
        assert one.stats().slots_cached == cached + 9
        assert one.stats().evicted_tokens == 0

    def test_prompts_beyond_the_context_are_refused(self) -> None:
        with pytest.raises(InvalidRequestError, match="at most 200"):
            engine().add(background("b", prompt(200)))

    def test_the_oldest_go_when_there_are_too_many_even_while_others_run(self) -> None:
        one = engine(max_background=3)
        one.add(request("a", prompt(20)))
        for name in "bcdef":
            one.add(background(name, prompt(20, ord(name))))
        outputs = one.step()
        dropped = [output.request_id for output in outputs if output.finish_reason == "cancelled"]
        assert dropped == ["b", "c"]
        assert one.stats().background == 3
        assert [answer.finish_reason for answer in serve(one).values()].count("stop") == 3

    def test_it_can_be_cancelled_waiting_or_halfway(self) -> None:
        one = engine()
        one.add(background("b", prompt(100)))
        one.add(background("c", prompt(50, 1)))
        steps(one, 2)
        one.cancel("b")
        one.cancel("c")
        check_idle(one)
        ended = [(output.request_id, output.finish_reason) for output in one.step()]
        assert ended == [("b", "cancelled"), ("c", "cancelled")]
        assert not one.has_work()
        assert one.stats().slots_cached == 32

    def test_a_pass_that_fails_ends_it_with_an_error_and_loses_no_slot(self) -> None:
        one = Engine(FailingRunner(512), (), EngineOptions(background_chunk=16))
        answer = serve(one, [background("b", prompt(60))])["b", 0]
        assert (answer.finish_reason, answer.error) == ("error", "the model failed: no memory")
        assert one.stats().slots_cached == 16

    def test_its_id_is_taken_until_then(self) -> None:
        one = engine()
        one.add(background("b", prompt(20)))
        with pytest.raises(InvalidRequestError, match="in flight"):
            one.add(request("b", [1]))
        serve(one)
        serve(one, [request("b", [1])])
