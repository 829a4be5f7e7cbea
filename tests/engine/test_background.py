"""Background requests: prompts that are computed while the engine is idle, at no cost to others."""

import msgspec
import numpy as np
import pytest
from toy_engine import prompt
from toy_runner import ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineOutput
from midfill.errors import InvalidRequestError
from midfill.runners.forward.batch import ForwardBatch
from serving import background, build_engine, check_idle, greedy_alone, request, serve


def engine(slots: int = 512, **options: int) -> Engine:
    return build_engine(ToyRunner(slots), (), **({"background_chunk": 16} | options))


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

    def test_a_later_request_finds_it_and_answers_the_same(self) -> None:
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

    def test_ignores_begins_with_as_there_is_no_answer(self) -> None:
        answerless = msgspec.structs.replace(background("b", prompt(20)), begins_with=b"never")
        assert serve(engine(), [answerless])["b", 0].finish_reason == "stop"

    def test_computes_one_prompt_after_the_other(self) -> None:
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
        # It continues where it was.
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
    """Raises in its second pass, after the KV was written."""

    def forward(self, batch: ForwardBatch) -> np.ndarray:
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

    def test_the_oldest_are_dropped_when_there_are_too_many_even_while_others_run(self) -> None:
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
        one = build_engine(FailingRunner(512), (), background_chunk=16)
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
