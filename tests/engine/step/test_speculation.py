"""Speculation: fewer steps and the same tokens as without it."""

import random
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_states import CacheFacts
from tiny_checkpoints import VOCAB as TINY_VOCAB
from toy_runner import VOCAB, ToyRunner

from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.engine.scheduling.drafting import AcceptanceRates
from midfill.engine.scheduling.policies.smart_spec import SmartSpec
from midfill.engine.scheduling.scheduler import Chunk, RunningSequence, ScheduleState, StepPlan
from midfill.engine.sequences.sequence import Sequence
from midfill.engine.step.batching import ScheduledSequence
from midfill.engine.step.speculation import DraftCounts, Speculation
from midfill.errors import InvalidRequestError
from midfill.models.checkpoints.opening import open_checkpoint
from midfill.runners.cpu.runner import CpuRunner
from serving import Answers, FixedCost, build_engine, greedy_alone, request, serve

POSITIONS = 0.2  # a small weight, so that answers repeat themselves
TOKENS = [b"", *(bytes([97 + index]) for index in range(26)), b"ab", b"abc", b"bc", b"cd", b"the"]
TOKENS += [b"\xf0\x9f\x99\x82", b" x"] + [b""] * (VOCAB - len(TOKENS) - 2)

TWO_TOKENS = {3: 90.0, 7: 90.0}  # answers of nothing else

VARIANTS: dict[str, dict[str, object]] = {
    "greedy": {},
    "sampled": {"temperature": 0.7, "seed": 5},
    "hot": {"temperature": 1.5, "seed": 6, "top_p": 0.9},
    "top-k": {"temperature": 1.0, "seed": 7, "top_k": 5, "min_p": 0.02, "typical_p": 0.9},
    "penalties": {
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "repetition_penalty": 1.05,
        "temperature": 0.5,
        "seed": 8,
    },
    "greedy penalties": {"frequency_penalty": 0.3, "repetition_penalty": 1.02},
    "bias": {"logit_bias": {3: 2.0, 19: 1.0}},
    "logprobs": {"logprobs": 3},
    "one token": {"max_tokens": 1},
    "two tokens": {"max_tokens": 2},
    "stop token": {"stop_token_ids": (0, 21), "temperature": 0.6, "seed": 9},
    "several": {"n": 3, "temperature": 0.8, "seed": 10},
    "several greedy": {"n": 2},
}


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=length)


def sampling(**fields: object) -> EngineSamplingParams:
    return EngineSamplingParams(
        **({"temperature": 0.0, "max_tokens": 40, "ignore_eos": True} | fields)
    )


def engine(
    drafts: bool,
    slots: int = 1000,
    *,
    row: float = 0.02,
    eos: tuple[int, ...] = (),
    **options: int,
) -> Engine:
    return build_engine(
        ToyRunner(slots, positions=POSITIONS),
        eos,
        **options,
        token_bytes=TOKENS.__getitem__,
        step_cost=FixedCost(row) if drafts else None,
    )


def content(answers: Answers) -> dict[tuple[str, int], tuple[object, ...]]:
    return {
        key: (answer.tokens, answer.logprobs, answer.finish_reason)
        for key, answer in answers.items()
    }


def everything(seed: int = 0) -> list[EngineRequest]:
    return [
        request(name, prompt(15 + index, seed + index), sampling(**fields))
        for index, (name, fields) in enumerate(VARIANTS.items())
    ]


class TestTheSameAnswers:
    @pytest.mark.parametrize("name", VARIANTS)
    def test_alone(self, name: str) -> None:
        one = request("a", prompt(20), sampling(**VARIANTS[name]))
        with_drafts, without = engine(True), engine(False)
        assert content(serve(with_drafts, [one])) == content(serve(without, [one]))
        assert with_drafts.stats().generated_tokens == without.stats().generated_tokens
        assert with_drafts.stats().steps <= without.stats().steps

    @pytest.mark.parametrize("row", [0.0, 0.02, 0.3])
    def test_all_together(self, row: float) -> None:
        with_drafts = engine(True, row=row)
        assert content(serve(with_drafts, everything())) == content(
            serve(engine(False), everything())
        )
        assert with_drafts.stats().accepted_tokens > 0

    @pytest.mark.parametrize("budget", [1, 9, 40])
    def test_beside_chunked_prompts(self, budget: int) -> None:
        long = [request(f"long{i}", prompt(150, 50 + i), sampling()) for i in range(3)]
        arrivals = {3: long[:1], 9: long[1:]}
        with_drafts = engine(True, token_budget=budget)
        answers = serve(with_drafts, everything()[:6], arrivals=arrivals)
        assert content(answers) == content(
            serve(engine(False, token_budget=budget), everything()[:6], arrivals=arrivals)
        )

    @pytest.mark.parametrize("slots", [70, 90, 140])
    def test_preempted(self, slots: int) -> None:
        with_drafts = engine(True, slots)
        expected = content(serve(engine(False), everything()))
        answers = content(serve(with_drafts, everything()))
        assert answers == expected
        stats = with_drafts.stats()
        assert stats.preemptions > 0
        assert stats.accepted_tokens > 0

    def test_cancelled_in_the_middle(self) -> None:
        expected = content(serve(engine(False), everything()))
        doomed: Mapping[int, str | tuple[str, int]] = {
            2: "greedy",
            3: ("several", 1),
            5: "penalties",
            6: "logprobs",
        }
        answers = serve(engine(True), everything(), cancellations=doomed)
        ended = {key for key, one in answers.items() if one.finish_reason == "cancelled"}
        assert ended == {("greedy", 0), ("several", 1), ("penalties", 0), ("logprobs", 0)}
        for key, answer in answers.items():
            tokens, _, reason = expected[key]
            assert isinstance(tokens, list)
            if key in ended:
                assert answer.tokens == tokens[: len(answer.tokens)]
            else:
                assert (answer.tokens, answer.finish_reason) == (tokens, reason)

    @settings(max_examples=40, deadline=None)
    @given(
        st.lists(st.integers(1, 4), min_size=1, max_size=30),
        st.integers(1, 30),
        st.sampled_from([0.0, 0.5, 1.0]),
        st.sampled_from([(), (0,), (19, 21)]),
    )
    def test_any_prompt(
        self, tokens: list[int], max_tokens: int, temperature: float, ends: tuple[int, ...]
    ) -> None:
        params = sampling(
            max_tokens=max_tokens, temperature=temperature, seed=1, ignore_eos=False, logprobs=1
        )
        one = [request("a", tokens, params)]
        assert content(serve(engine(True, eos=ends, row=0.0), one)) == content(
            serve(engine(False, eos=ends), one)
        )

    @pytest.mark.parametrize("required", [b"th", b"abcd", b"zabc", b"\xf0\x9f", b" "])
    @pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3, "n": 2}])
    def test_healed(self, required: bytes, fields: dict[str, object]) -> None:
        one = EngineRequest(
            request_id="a",
            token_ids=prompt(20),
            sampling=sampling(logprobs=2, **fields),
            begins_with=required,
        )
        with_drafts = engine(True, row=0.0)
        answers = serve(with_drafts, [one])
        assert content(answers) == content(serve(engine(False), [one]))
        assert with_drafts.stats().draft_tokens > 0

    def test_continuing_from_the_cache(self) -> None:
        # The KV that drafts left in the cache is that of a pass without them.
        with_drafts = engine(True, row=0.0)
        for number, length in enumerate((10, 25, 30, 55)):
            first = serve(with_drafts, [request(f"a{number}", prompt(length), sampling())])
            tokens = prompt(length) + first[f"a{number}", 0].tokens
            for end in (len(tokens) - 7, len(tokens)):
                longer = request(f"b{number}{end}", tokens[:end], sampling(max_tokens=5))
                answer = serve(with_drafts, [longer])[longer.request_id, 0]
                assert answer.cached_tokens == end - 1
                assert answer.tokens == greedy_alone(
                    ToyRunner(256, positions=POSITIONS), tokens[:end], 5
                )


class TestFewerSteps:
    def test_a_repetitive_answer(self) -> None:
        one = [request("a", prompt(20), sampling(max_tokens=60, logit_bias=TWO_TOKENS))]
        with_drafts, without = engine(True), engine(False)
        assert content(serve(with_drafts, one)) == content(serve(without, one))
        stats = with_drafts.stats()
        assert without.stats().steps == 60
        assert stats.steps < 30
        assert stats.steps + stats.accepted_tokens == 60
        assert stats.accepted_tokens <= stats.draft_tokens
        assert stats.drafts < stats.steps
        # Every row is a prompt's, a sampled token's or a drafted one's.
        assert stats.computed_tokens == 20 + (stats.steps - 1) + stats.draft_tokens

    def test_none_where_rows_cost_as_much_as_steps(self) -> None:
        costly = engine(True, row=1.0)
        serve(costly, everything())
        assert costly.stats().draft_tokens == 0

    def test_forced_tokens_need_no_steps_of_their_own(self) -> None:
        # Three bytes of a character that one token has, and a "y" and a "z" after it that each
        # only one token can write, in one step with the prompt.
        one = EngineRequest(
            request_id="a",
            token_ids=prompt(20),
            sampling=sampling(max_tokens=4),
            begins_with=b"\xf0\x9f\x99\x82yz",
        )
        steps = []
        for drafts in (True, False):
            running = engine(drafts, row=0.3)
            answer = serve(running, [one])["a", 0]
            assert b"".join(map(TOKENS.__getitem__, answer.tokens[:3])) == one.begins_with
            steps.append(running.stats().steps)
        assert steps == [1, 4]

    def test_counters_stay_at_zero_without(self) -> None:
        without = engine(False)
        serve(without, everything())
        stats = without.stats()
        assert (stats.drafts, stats.draft_tokens, stats.accepted_tokens) == (0, 0, 0)


class TestPredictions:
    PROMPT = prompt(20)

    def run(self, prediction: list[int], **fields: object) -> tuple[list[int], int]:
        """Return an answer's tokens and the steps that it took."""
        asked = EngineRequest(
            request_id="a",
            token_ids=self.PROMPT,
            sampling=sampling(**fields),
            prediction=prediction,
        )
        running = engine(True, eos=(0,))
        return serve(running, [asked])["a", 0].tokens, running.stats().steps

    def test_a_right_one_takes_a_step_or_two(self) -> None:
        answer, steps = self.run([], max_tokens=40)
        assert steps > 10
        assert self.run(answer[:12], max_tokens=12) == (answer[:12], 1)
        assert self.run(answer, max_tokens=40) == (answer, 2)

    def test_a_wrong_one_changes_no_answer(self) -> None:
        answer, steps = self.run([], max_tokens=40)
        wrong = [(token + 1) % VOCAB for token in answer]
        found, taken = self.run(wrong, max_tokens=40)
        assert found == answer
        assert taken <= steps + 2

    def test_after_a_wrong_token_what_follows_is_found_again(self) -> None:
        answer, steps = self.run([], max_tokens=40)
        wrong = [*answer[:10], (answer[10] + 1) % VOCAB, *answer[10:]]
        found, taken = self.run(wrong, max_tokens=40)
        assert found == answer
        assert taken < steps

    def test_sampled_answers_stay_the_same(self) -> None:
        fields = {"temperature": 0.7, "seed": 5, "max_tokens": 40}
        answer, _ = self.run([], **fields)
        assert self.run(answer, **fields) == (answer, 2)

    def test_unknown_tokens_are_refused(self) -> None:
        for wrong in (-1, VOCAB):
            with pytest.raises(InvalidRequestError, match="prediction holds a token id"):
                self.run([wrong])

    @pytest.mark.parametrize("begins_with", [b"th", b"abcd"])
    def test_one_that_the_constraint_rules_out_is_not_drafted(self, begins_with: bytes) -> None:
        asked = EngineRequest(
            request_id="a",
            token_ids=self.PROMPT,
            sampling=sampling(max_tokens=8),
            begins_with=begins_with,
        )
        expected = serve(engine(False), [asked])["a", 0].tokens
        for prediction in (expected, [TOKENS.index(b"z")] * 8):
            guessed = msgspec.structs.replace(asked, prediction=prediction)
            assert serve(engine(True), [guessed])["a", 0].tokens == expected


class TestSlots:
    def test_drafts_never_preempt(self) -> None:
        for slots in range(62, 90, 3):
            requests = [request(f"r{i}", prompt(15, i), sampling(max_tokens=16)) for i in range(2)]
            with_drafts = engine(True, slots, row=0.0)
            answers = serve(with_drafts, requests)
            assert all(len(answer.tokens) == 16 for answer in answers.values())
            assert with_drafts.stats().preemptions == 0

    def test_slots_of_rejected_tokens_are_freed_after_each_step(self) -> None:
        with_drafts = engine(True, 200, row=0.0)
        queues = with_drafts._queues

        def check(_: Engine) -> None:
            for sequence in queues.running:
                assert sequence.kv is not None
                assert sequence.kv.reserved == sequence.computed == sequence.length - 1

        serve(with_drafts, [request("a", prompt(30), sampling())], after_step=check)
        stats = with_drafts.stats()
        assert stats.draft_tokens > stats.accepted_tokens > 0
        # The prompt and the answer but its last token; nothing that was rejected.
        assert stats.slots_cached == 30 + 39

    def test_rows_stay_within_the_budget(self) -> None:
        with_drafts = engine(True, row=0.0, token_budget=11)
        serve(with_drafts, everything()[:8])
        batches = with_drafts._runner.batches
        assert max(batch.rows for batch in batches) == 11


class TestPlanning:
    """Proposing and choosing, without an engine."""

    STATE = ScheduleState((RunningSequence(0, 6, 5, True),), (), 100, CacheFacts())
    PLAN = StepPlan(decodes=(0,))

    def setup_method(self) -> None:
        self.sequence = Sequence(request("a", [4, 5, 6, 7, 4, 5], sampling()), 0, 100)
        self.rates = AcceptanceRates()

    def speculation(self, budget: int = 64) -> Speculation:
        return Speculation(SmartSpec(budget), self.rates, FixedCost(0.0))

    def test_what_followed_the_last_tokens_is_proposed_and_some_of_it_runs(self) -> None:
        plan, drafts = self.speculation(budget=3).plan(self.STATE, self.PLAN, {0: self.sequence})
        assert drafts[0].tokens[:4].tolist() == [6, 7, 4, 5]
        assert plan == StepPlan(decodes=(0,), drafts=(Chunk(0, 2),))

    def test_planning_changes_nothing(self) -> None:
        one = self.speculation()
        first, drafts = one.plan(self.STATE, self.PLAN, {0: self.sequence})
        again, same = one.plan(self.STATE, self.PLAN, {0: self.sequence})
        assert again == first
        assert same[0].tokens.tolist() == drafts[0].tokens.tolist()
        assert self.sequence.tokens.tolist() == [4, 5, 6, 7, 4, 5]
        assert one.counts == DraftCounts()

    def test_nothing_is_proposed_without_room(self) -> None:
        one = self.speculation(budget=1)
        assert one.plan(self.STATE, self.PLAN, {0: self.sequence}) == (self.PLAN, {})

    def test_nothing_is_proposed_for_several_answers_at_once(self) -> None:
        several = Sequence(request("a", [4, 5, 6, 7, 4, 5], sampling(n=2)), 0, 100)
        assert self.speculation().plan(self.STATE, self.PLAN, {0: several}) == (self.PLAN, {})

    @pytest.mark.parametrize("drafted", [0, 3])
    def test_drafts_teach_rates_whether_they_ran_or_not(self, drafted: int) -> None:
        one = self.speculation()
        _, drafts = one.plan(self.STATE, self.PLAN, {0: self.sequence})
        kinds = drafts[0].evidence[:2]
        before = [self.rates.rate(kind) for kind in kinds]
        scheduled = ScheduledSequence(self.sequence, 1, True, drafts[0], drafted)
        one.record_verification(scheduled, [6, 30])  # right, wrong
        after = [self.rates.rate(kind) for kind in kinds]
        assert after[0] > before[0]
        assert after[1] < before[1]
        assert one.counts == (DraftCounts(1, 3, 1) if drafted else DraftCounts())


class SpoilingRunner(ToyRunner):
    """Returns NaN for the last row of the steps that run a draft of two tokens or more."""

    spoiled = 0

    def forward(self, batch: object) -> np.ndarray:
        logits = super().forward(batch)
        if len(logits) > 2:
            self.spoiled += 1
            logits[-1] = np.nan
        return logits


def test_logits_without_a_finite_value_after_a_draft_fail_after_the_tokens_before_them() -> None:
    runner = SpoilingRunner(400, positions=POSITIONS)
    one = build_engine(runner, (), step_cost=FixedCost(0.0))
    truth = greedy_alone(ToyRunner(256, positions=POSITIONS), prompt(20), 40)
    answer = serve(one, [request("a", prompt(20), sampling())])["a", 0]
    assert runner.spoiled
    assert answer.tokens == truth[: len(answer.tokens)]
    if answer.finish_reason == "error":
        assert answer.error == "the model's logits hold no finite value"
    else:
        assert len(answer.tokens) == 40


def tiny_load(copies: int) -> Iterable[EngineRequest]:
    rng = random.Random(4)
    phrase = rng.choices(range(1, TINY_VOCAB), k=12)
    for index, fields in enumerate(VARIANTS.values()):
        tokens = phrase * copies + rng.choices(range(1, TINY_VOCAB), k=index) + phrase[: 1 + index]
        yield request(f"r{index}", tokens, sampling(**fields))


def test_on_the_cpu_kernels(tiny_folder: Path) -> None:
    checkpoint = open_checkpoint(tiny_folder)
    runner = CpuRunner.load(checkpoint, slots=900, threads=1)
    requests = list(tiny_load(3))
    without = build_engine(runner, checkpoint.tokenizer.eos_token_ids)
    with_drafts = build_engine(runner, checkpoint.tokenizer.eos_token_ids, step_cost=FixedCost(0.0))
    # Bit for bit, log probabilities included.
    assert content(serve(with_drafts, requests)) == content(serve(without, requests))
    before = with_drafts.stats()
    assert before.accepted_tokens > 0
    params = sampling(logit_bias=TWO_TOKENS, temperature=0.5, seed=3, logprobs=1)
    biased = [request("biased", requests[0].token_ids, params)]
    assert content(serve(with_drafts, biased)) == content(serve(without, biased))
    assert with_drafts.stats().steps - before.steps < 30


@pytest.mark.parametrize("speculation", [True, False])
def test_it_is_an_option_of_a_loaded_model(tiny_folder: Path, speculation: bool) -> None:
    options = ModelOptions(threads=1, kv_memory=4 * 2**20, speculation=speculation)
    one, _, _ = load_engine(open_checkpoint(tiny_folder), options)
    assert (one._speculation is not None) == speculation
    serve(one, tiny_load(2))
