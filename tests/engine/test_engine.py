"""Engine: the answer is the model's, however the work was cut, mixed, cached or interrupted."""

import itertools
import random

import pytest
from toy_engine import engine, prompt, sampling, truth
from toy_runner import ToyRunner

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest
from midfill.runners.forward.logits import log_softmax
from serving import Answer, greedy_alone, request, serve


def mixed_load(count: int, seed: int) -> list[EngineRequest]:
    """Requests of many lengths; every third continues a document that others share."""
    rng = random.Random(seed)
    document = prompt(60, seed)
    requests = []
    for index in range(count):
        head = document[: rng.randrange(10, 60)] if index % 3 == 0 else []
        tokens = head + prompt(rng.randrange(1, 50), seed * 1000 + index)
        requests.append(request(f"r{index}", tokens, sampling(max_tokens=rng.randrange(1, 20))))
    return requests


def expected(requests: list[EngineRequest]) -> dict[tuple[str, int], list[int]]:
    return {(one.request_id, 0): truth(one.token_ids, one.sampling.max_tokens) for one in requests}


def tokens_of(answers: dict[tuple[str, int], Answer]) -> dict[tuple[str, int], list[int]]:
    return {key: answer.tokens for key, answer in answers.items()}


class TestGreedyOutputNeverChanges:
    @pytest.mark.parametrize("budget", [1, 8, 64, 512])
    def test_chunked(self, budget: int) -> None:
        tokens = prompt(70)
        answers = serve(engine(token_budget=budget), [request("a", tokens)])
        assert answers["a", 0].tokens == truth(tokens)
        assert answers["a", 0].finish_reason == "length"

    def test_warm(self) -> None:
        one = engine()
        tokens = prompt(70)
        cold = serve(one, [request("cold", tokens)])["cold", 0]
        computed = one.stats().computed_tokens
        warm = serve(one, [request("warm", tokens)])["warm", 0]
        assert cold.tokens == warm.tokens == truth(tokens)
        assert (cold.cached_tokens, warm.cached_tokens) == (0, 69)
        # The prompt's last token, then eleven decodes.
        assert one.stats().computed_tokens - computed == 12

    def test_continuing_a_generated_answer_computes_only_new_tokens(self) -> None:
        one = engine()
        tokens = prompt(40)
        first = serve(one, [request("a", tokens)])["a", 0]
        longer = tokens + first.tokens + prompt(3, 9)
        second = serve(one, [request("b", longer)])["b", 0]
        assert second.tokens == truth(longer)
        # All but the answer's last token, whose KV was never needed.
        assert second.cached_tokens == 40 + 11

    @pytest.mark.parametrize("budget", [1, 8, 64, 512])
    def test_batched_with_random_arrivals(self, budget: int) -> None:
        requests = mixed_load(30, seed=budget)
        arrivals: dict[int, list[EngineRequest]] = {}
        rng = random.Random(budget)
        for one in requests:
            arrivals.setdefault(rng.randrange(40), []).append(one)
        answers = serve(engine(2048, token_budget=budget), arrivals=arrivals)
        assert tokens_of(answers) == expected(requests)

    @pytest.mark.parametrize("seed", range(4))
    def test_preempted_and_resumed(self, seed: int) -> None:
        requests = mixed_load(20, seed)
        longest = max(len(one.token_ids) + one.sampling.max_tokens for one in requests)
        one = engine(longest + 20, token_budget=32)
        assert tokens_of(serve(one, requests)) == expected(requests)
        assert one.stats().preemptions > 0

    def test_with_cancellations_in_between(self) -> None:
        requests = mixed_load(20, seed=3)
        cancelled = {step: f"r{step}" for step in range(1, 20, 3)}
        answers = serve(engine(220, token_budget=32), requests, cancellations=cancelled)
        truths = expected(requests)
        for key, answer in answers.items():
            if answer.finish_reason == "cancelled":
                assert answer.tokens == truths[key][: len(answer.tokens)]
            else:
                assert answer.tokens == truths[key]
        reasons = [answer.finish_reason for answer in answers.values()]
        assert reasons.count("cancelled") >= 3
        assert reasons.count("length") >= 13


class TestPrefixCache:
    def test_two_prompts_arriving_together_compute_their_common_part_once(self) -> None:
        shared = prompt(90)
        one = engine()
        answers = serve(
            one,
            [
                request("a", [*shared, 1], sampling(max_tokens=1)),
                request("b", [*shared, 2, 3], sampling(max_tokens=1)),
            ],
        )
        assert answers["b", 0].cached_tokens == 90
        assert one.stats().computed_tokens == 91 + 2
        assert answers["b", 0].tokens == truth([*shared, 2, 3], 1)

    def test_tenants_do_not_share(self) -> None:
        one = engine()
        tokens = prompt(50)
        serve(one, [request("a", tokens, tenant="ann")])
        other = serve(one, [request("b", tokens, tenant="bob")])["b", 0]
        assert other.cached_tokens == 0
        again = serve(one, [request("c", tokens, tenant="ann")])["c", 0]
        assert again.cached_tokens == 49
        assert other.tokens == again.tokens == truth(tokens)

    def test_tenants_do_not_wait_for_each_other(self) -> None:
        one = engine()
        one.add(request("a", prompt(50), tenant="ann"))
        one.add(request("b", prompt(50), tenant="bob"))
        assert [output.request_id for output in one.step()] == ["a", "b"]

    def test_a_full_cache_evicts(self) -> None:
        one = engine(100)
        for seed in range(8):
            tokens = prompt(60, seed)
            assert serve(one, [request("a", tokens)])["a", 0].tokens == truth(tokens)
        assert one.stats().evicted_tokens > 300

    def test_a_prompt_cancelled_halfway_leaves_what_it_computed(self) -> None:
        one = engine(token_budget=16)
        tokens = prompt(100)
        one.add(request("a", tokens))
        one.step()
        one.step()
        one.cancel("a")
        stats = one.stats()
        assert (stats.slots_cached, stats.slots_free) == (32, 480)
        answer = serve(one, [request("b", tokens)])["b", 0]
        assert answer.cached_tokens == 32
        assert answer.tokens == truth(tokens)

    def test_a_one_token_prompt_runs(self) -> None:
        one = engine()
        for name in ("cold", "warm"):
            answer = serve(one, [request(name, [5])])[name, 0]
            assert answer.tokens == truth([5])
            assert answer.cached_tokens == 0

    def test_counters_show_what_the_cache_saved(self) -> None:
        one = engine()
        serve(one, [request("a", prompt(50))])
        serve(one, [request("b", prompt(50))])
        stats = one.stats()
        assert (stats.prompt_tokens, stats.cached_tokens) == (100, 49)
        assert stats.generated_tokens == 24
        assert stats.computed_tokens == 50 + 11 + 1 + 11
        assert stats.forward_seconds > 0
        assert stats.sampling_seconds > 0
        assert stats.busy_seconds >= stats.forward_seconds + stats.sampling_seconds


class TestSeveralAnswers:
    def test_they_share_the_prompts_kv(self) -> None:
        one = engine()
        tokens = prompt(80)
        answers = serve(one, [request("a", tokens, sampling(n=4, temperature=1.0, seed=1))])
        assert sorted(answers) == [("a", index) for index in range(4)]
        # The prompt once, and eleven decodes per answer.
        assert one.stats().computed_tokens == 80 + 4 * 11
        assert len({tuple(answer.tokens) for answer in answers.values()}) > 1

    def test_greedy_answers_are_all_the_models(self) -> None:
        tokens = prompt(30)
        answers = serve(engine(), [request("a", tokens, sampling(n=3))])
        assert [answer.tokens for answer in answers.values()] == [truth(tokens)] * 3

    def test_more_answers_than_max_running_take_turns(self) -> None:
        tokens = prompt(30)
        one = engine(max_running=3)
        answers = serve(one, [request("a", tokens, sampling(n=8)), request("b", prompt(9, 1))])
        assert [answers["a", index].tokens for index in range(8)] == [truth(tokens)] * 8
        assert answers["b", 0].tokens == truth(prompt(9, 1))
        assert max(batch.requests for batch in one._runner.batches) == 3

    def test_waiting_siblings_run_before_later_requests(self) -> None:
        one = engine(max_running=1)
        one.add(request("a", prompt(30), sampling(n=4, max_tokens=3)))
        one.add(request("b", [1, 2]))
        ended: list[tuple[str, int]] = []
        while one.has_work():
            ended += [(out.request_id, out.index) for out in one.step() if out.finish_reason]
        assert ended == [("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0)]

    def test_more_answers_than_fit_are_preempted_and_finish(self) -> None:
        tokens = prompt(30)
        one = engine(slots=60)
        answers = serve(one, [request("a", tokens, sampling(n=6))])
        assert [answers["a", index].tokens for index in range(6)] == [truth(tokens)] * 6
        assert one.stats().preemptions > 0

    def test_a_seeded_answer_does_not_depend_on_n(self) -> None:
        tokens = prompt(20)
        hot = {"temperature": 1.5, "seed": 11}
        one = serve(engine(), [request("a", tokens, sampling(n=1, **hot))])
        many = serve(engine(), [request("a", tokens, sampling(n=5, **hot))])
        assert one["a", 0].tokens == many["a", 0].tokens


class TestPreemption:
    def test_the_latest_arrival_is_preempted_and_resumes_before_later_ones(self) -> None:
        one = engine(slots=33)
        for name, token in (("a", 1), ("b", 2), ("c", 3)):
            one.add(request(name, [token], sampling(max_tokens=13)))
        for _ in range(11):  # eleven tokens each fill the pool
            one.step()
        one.add(request("d", [4]))
        one.step()
        assert [sequence.request_id for sequence in one._queues.waiting] == ["c", "d"]
        ended: list[str] = []
        while one.has_work():
            ended += [output.request_id for output in one.step() if output.finish_reason]
        assert ended == ["a", "b", "c", "d"]
        assert one.stats().preemptions == 1

    def test_resuming_counts_neither_prompt_nor_cached_tokens_again(self) -> None:
        one = engine(slots=70)
        requests = [request(f"r{index}", prompt(20, index)) for index in range(4)]
        answers = serve(one, requests)
        stats = one.stats()
        assert stats.preemptions > 0
        assert (stats.prompt_tokens, stats.cached_tokens) == (80, 0)
        assert [answer.cached_tokens for answer in answers.values()] == [0] * 4
        assert stats.generated_tokens == 4 * 12


HOT = {"temperature": 1.3, "top_p": 0.95, "max_tokens": 16}


class TestSeededSampling:
    def seeded(self, count: int) -> list[EngineRequest]:
        return [
            request(f"r{index}", prompt(20 + index, index), sampling(seed=index, **HOT))
            for index in range(count)
        ]

    def test_the_same_alone_batched_chunked_and_preempted(self) -> None:
        requests = self.seeded(10)
        alone = {}
        for one in requests:
            alone |= tokens_of(serve(engine(), [one]))
        batched = engine(token_budget=16)
        assert tokens_of(serve(batched, requests)) == alone
        crowded = engine(slots=70)
        assert tokens_of(serve(crowded, requests)) == alone
        assert crowded.stats().preemptions > 0

    def test_without_a_seed_answers_differ(self) -> None:
        hot = sampling(**HOT)
        answers = serve(engine(), [request(f"r{i}", prompt(9), hot) for i in range(4)])
        assert len({tuple(answer.tokens) for answer in answers.values()}) > 1


class TestTheStepLog:
    """The invariants of Sarathi-Serve, checked on the batches that ran."""

    def run(self, budget: int, slots: int = 2048) -> tuple[Engine, list[EngineRequest]]:
        one = engine(slots, token_budget=budget)
        requests = mixed_load(25, seed=7)
        serve(one, requests)
        return one, requests

    @pytest.mark.parametrize("budget", [1, 8, 64])
    def test_rows_stay_within_the_budget_or_are_all_decodes(self, budget: int) -> None:
        one, _ = self.run(budget)
        for batch in one._runner.batches:
            assert batch.rows <= budget or batch.rows == batch.requests

    def test_no_running_decode_ever_waits_for_a_prefill(self) -> None:
        one = engine(token_budget=24)
        first = sampling(max_tokens=40)
        for index in range(4):
            one.add(request(f"d{index}", prompt(5, index), first))
        one.step()
        one.step()
        one.add(request("long", prompt(150, 9)))
        for _ in itertools.repeat(None, 12):
            names = [output.request_id for output in one.step()]
            assert [name for name in names if name != "long"] == ["d0", "d1", "d2", "d3"]
        serve(one)

    def test_first_answers_come_in_order_of_arrival(self) -> None:
        one = engine(token_budget=16, max_running=6)
        for index in range(15):
            one.add(request(f"r{index}", prompt(10 + 3 * index % 7, index)))
        seen: list[str] = []
        while one.has_work():
            seen += [out.request_id for out in one.step() if out.request_id not in seen]
        assert seen == [f"r{index}" for index in range(15)]


def test_logprobs_are_the_models_own() -> None:
    tokens = prompt(30)
    odd = sampling(temperature=0.7, seed=3, logprobs=5, max_tokens=6, logit_bias={4: 9.0})
    answer = serve(engine(), [request("a", tokens, odd)])["a", 0]
    history = list(tokens)
    for token, reported in zip(answer.tokens, answer.logprobs, strict=True):
        runner = ToyRunner(256)
        greedy_alone(runner, history, 1)
        logits = runner.forward(runner.batches[0])[0]
        truth_row = log_softmax(logits)
        assert reported.logprob == pytest.approx(truth_row[token].item(), abs=1e-5)
        ids = (-truth_row).argsort()[:5]
        values = truth_row[ids]
        assert [token_id for token_id, _ in reported.top] == ids.tolist()
        assert [value for _, value in reported.top] == pytest.approx(values.tolist(), abs=1e-5)
        history.append(token)
