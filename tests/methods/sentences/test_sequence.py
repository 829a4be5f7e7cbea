"""SentenceReader in the engine: as computed by hand, whatever is parked, preempted or beside it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from made_methods import small_method
from tiny_checkpoints import VOCAB

from midfill.engine.engine import Engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.errors import InvalidRequestError
from midfill.kv.ragged import RaggedIndex, cells_of_slots
from midfill.methods.evict.method import SequenceKeys
from midfill.methods.method import CombinedMethod
from midfill.methods.sentences.method import ChosenSentences, EndTokens, FixedPages
from midfill.methods.sentences.selection import SentenceRule, retained_keys
from midfill.methods.sentences.sequence import SentenceReads
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.attention import AttentionPlan
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.runner import Runner
from serving import FixedCost, build_engine, request, serve, torch_runner

ANSWER = 75
PARAMS = EngineSamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
RULE = SentenceRule(budget=40, retained=80, start=4, recent=12, window=16, kernel=3)
ENDS = EndTokens(np.arange(VOCAB) % 7 == 0)
METHOD = ChosenSentences(RULE, ENDS)


@pytest.fixture(scope="module")
def cpu(llama: Checkpoint) -> Iterator[CpuRunner]:
    runner = CpuRunner.load(llama, slots=600, threads=1, weights="f32", kv_cache_dtype="f32")
    yield runner
    runner.close()


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(1, VOCAB, length).tolist())


def ask(engine: Engine, tokens: tuple[int, ...], **fields: Any) -> list[int]:
    return serve(engine, [request("r", tokens, PARAMS, **fields)])["r", 0].tokens


@dataclass
class Hand:
    """A greedy answer by loops: token i lies in slot i and stays there, nothing is parked.

    Attributes:
        tokens: of the answer.
        read: [heads] of each row after the prompt, the positions that it read.
        numbers: [heads, n], the positions that were retained of the prompt.
    """

    tokens: list[int]
    read: list[list[list[int]]]
    numbers: np.ndarray

    @classmethod
    def compute(
        cls,
        runner: Runner,
        tokens: tuple[int, ...],
        exact: int,
        method: ChosenSentences,
        count: int,
    ) -> "Hand":
        config, rule = runner.config, method.rule
        heads, group = config.layers * config.kv_heads, config.query_heads // config.kv_heads
        text = list(tokens)

        def run(first: int, slots: np.ndarray, plan: AttentionPlan, seen: int) -> tuple[int, Any]:
            rows = np.arange(first, len(text) if first else exact, dtype=np.int32)
            rows = rows[:1] if first else rows
            ends = [np.array([0, len(array)], np.int32) for array in (rows, slots)]
            batch = ForwardBatch(
                np.array(text, np.int32)[rows], rows, rows, ends[0], ends[1],
                slots.astype(np.int32), rows[-1:] - first, attention=(plan,),
                observed_rows=np.arange(len(rows) - seen, len(rows), dtype=np.int32),
            )  # fmt: skip
            found = int(runner.forward(batch)[0].argmax())
            queries = runner.observed_queries(batch)
            shape = (config.layers, seen, config.kv_heads, group, config.head_dim)
            return found, (queries, queries.reshape(shape).sum(axis=3))

        @cache
        def key(head: int, position: int) -> np.ndarray:
            return runner.cells.read_keys(np.array([head * runner.slots + position], np.int32))[0]

        window = min(rule.window, exact)
        following, (queries, summed) = run(0, np.arange(exact), AttentionPlan(), window)
        cells = cells_of_slots(np.arange(exact, dtype=np.int32), heads, runner.slots)
        numbers = retained_keys(SequenceKeys(config, list(cells), runner.cells), queries, rule)
        found = summed.mean(axis=1).reshape(heads, -1)
        held = [own.tolist() for own in numbers]
        starts = [0, *(i + 1 for i in range(exact - 1) if method.ends(np.array([text[i]]), i)[0])]
        sentences = [
            [set(own) & set(range(a, b)) for a, b in zip(starts, [*starts[1:], exact], strict=True)]
            for own in held
        ]
        if exact == len(tokens):
            text.append(following)
        current: list[np.ndarray] = []
        begun, read = exact, []
        for position in range(exact, len(tokens) + count - 1):
            ends = bool(method.ends(np.array([text[position]]), position)[0])
            is_first = ends or len(current) < rule.warmup
            if not is_first:
                found = np.sum(current, axis=0) / len(current)
            rows = []
            for head in range(heads):
                held[head].append(position)
                own = held[head]
                if len(own) <= rule.budget or (is_first and rule.reads_all):
                    rows.append(list(own))
                    continue
                sure = own[: rule.start] + own[-rule.recent :]
                means = [
                    np.mean([key(head, p) for p in sorted(each)], axis=0) if each else None
                    for each in sentences[head]
                ]
                scores = [
                    0.0 if mean is None else float(mean @ found[head].astype(np.float64))
                    for mean in means
                ]
                chosen: list[int] = []
                for number in sorted(range(len(scores)), key=lambda i: -scores[i]):
                    chosen += [p for p in sorted(sentences[head][number]) if p not in sure]
                rows.append(sorted(sure + chosen[: rule.budget - len(sure)]))
            read.append(rows)
            listed = [head * runner.slots + p for head in range(heads) for p in rows[head][:-1]]
            indptr = np.cumsum([0, *(len(row) - 1 for row in rows)]).astype(np.int32)
            plan = AttentionPlan(RaggedIndex(np.array(listed, np.int32), indptr))
            following, (_, summed) = run(position, np.array([position]), plan, 1)
            current.append(summed[:, 0].reshape(heads, -1))
            if ends:
                for each in sentences:
                    each.append(set(range(begun, position + 1)))
                current, begun = [], position + 1
            if position + 1 == len(text):
                text.append(following)
        return cls(text[len(tokens) : len(tokens) + count], read, numbers)


def check_by_hand(
    runner: Runner, tokens: tuple[int, ...], method: ChosenSentences, exact: int, count: int
) -> tuple[Hand, SentenceReads]:
    """Compare an answer with the one by loops: its tokens, what it reads and what it moves."""
    hand = Hand.compute(runner, tokens, exact, method, count)
    engine = build_engine(runner, token_budget=50, method=method)
    params = EngineSamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    asked = request("r", tokens, params, compress_after=exact)
    assert serve(engine, [asked])["r", 0].tokens == hand.tokens
    reads = engine._methods.sentence_reads
    counts = [len(row) for rows in hand.read for row in rows]
    assert reads.pairs == runner.config.query_heads // runner.config.kv_heads * sum(counts)
    assert reads.rows == len(hand.read)
    assert method.rule.reads_all or max(counts) <= method.rule.budget
    # At most the difference between one row's keys and the next one's is moved, and what leaves
    # the sequence's slots meanwhile.
    before = [set[int]()] * len(hand.read[0])
    difference = 0
    for rows in hand.read:
        difference += sum(len(set(row) - old) for row, old in zip(rows, before, strict=True))
        before = [set(row) for row in rows]
    assert 0 < reads.fetched <= min(difference, reads.listed) + 32 * len(before)
    return hand, reads


@pytest.mark.parametrize(
    ("length", "method", "exact"),
    [
        (150, replace(METHOD, rule=replace(RULE, warmup=2)), 150),
        (150, replace(METHOD, rule=replace(RULE, reads_all=True)), 150),
        (150, METHOD, 120),
        (60, METHOD, 60),
        (20, METHOD, 20),
        (150, replace(METHOD, ends=FixedPages(8)), 150),
        (150, replace(METHOD, ends=EndTokens(np.zeros(VOCAB, bool))), 150),
        (150, replace(METHOD, ends=EndTokens(np.ones(VOCAB, bool))), 150),
    ],
    ids=["warm-up", "all", "question", "short", "tiny", "pages", "no end", "only ends"],
)
def test_answers_are_those_computed_by_hand(
    cpu: CpuRunner, length: int, method: ChosenSentences, exact: int
) -> None:
    """A question after what is retained, no end of a sentence and nothing else among them."""
    check_by_hand(cpu, prompt(length, length), method, exact, 40)


def test_sentences_of_the_answer_are_read_once_they_are_far(cpu: CpuRunner) -> None:
    hand, reads = check_by_hand(cpu, prompt(150), METHOD, 150, ANSWER)
    assert reads.fetched < reads.listed / 3, "mostly, the next row reads the same"
    assert any(
        150 <= position < 150 + number - RULE.recent
        for number, rows in enumerate(hand.read, 1)
        for row in rows
        for position in row
    )


def test_torch_gives_the_answer_that_is_computed_by_hand_with_it(llama: Checkpoint) -> None:
    check_by_hand(torch_runner(llama, slots=300), prompt(120), METHOD, 110, 25)


class Poisoning:
    """A runner in whose pool every cell that no row reads holds NaN."""

    def __init__(self, runner: CpuRunner) -> None:
        self._runner = runner
        self.poisoned = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        plans = [plan for _, plan in batch.plans() if plan.cells is not None]
        if plans:
            [cells] = [plan.cells.cells for plan in plans if plan.cells is not None]
            heads = self._runner.config.layers * self._runner.config.kv_heads
            slots = cells_of_slots(batch.kv_slots, heads, self._runner.slots)
            unread = np.ones(heads * self._runner.slots, bool)
            unread[cells] = unread[slots] = False
            others = np.flatnonzero(unread).astype(np.int32)
            # Copies that the next rows want again lie in the pool: they come back afterwards.
            kept = self._runner.cells.take(others)
            nan = np.full((len(others), self._runner.config.head_dim), np.nan, np.float32)
            self._runner.cells.write(others, nan, nan)
            self.poisoned += len(others)
            logits = self._runner.forward(batch)
            self._runner.cells.put(others, kept)
            return logits
        return self._runner.forward(batch)


def test_keys_that_are_not_chosen_are_not_read(cpu: CpuRunner) -> None:
    expected = ask(build_engine(cpu, method=METHOD), prompt(150))
    poisoning = Poisoning(cpu)
    found = ask(build_engine(poisoning, method=METHOD), prompt(150))  # type: ignore[arg-type]
    assert found == expected
    assert poisoning.poisoned > 0


def owned(engine: Engine) -> int:
    return sum(each.kv.owned for each in engine._queues.running if each.kv is not None)


def test_the_pool_holds_as_much_however_long_prompt_and_answer_are(cpu: CpuRunner) -> None:
    most = []
    for length in (100, 300):
        engine = build_engine(cpu, token_budget=512, method=METHOD)
        held: list[int] = []
        engine.add(request("r", prompt(length), PARAMS))
        while engine.has_work():
            engine.step()
            held.append(owned(engine))
        most.append(max(held[2:]))
        width = sum(cpu.cells.layout.widths) * cpu.config.layers * cpu.config.kv_heads
        kept = engine.take_parked_bytes() / width
        assert RULE.retained < kept <= RULE.retained + ANSWER
    assert most == [RULE.budget + 31] * 2


def test_what_is_read_is_constant_where_dense_attention_grows(cpu: CpuRunner) -> None:
    heads = cpu.config.layers * cpu.config.query_heads
    for length in (100, 200, 400):
        engine = build_engine(cpu, method=METHOD)
        ask(engine, prompt(length))
        reads = engine._methods.sentence_reads
        assert reads.pairs / reads.rows / heads == RULE.budget
        assert reads.causal / reads.rows / heads > length
        assert reads.choices == reads.rows == ANSWER - 1


def preempting_at(*steps: int) -> Callable[[Engine], None]:
    passed = iter(range(10_000))

    def preempt(engine: Engine) -> None:
        if next(passed) in steps:
            for sequence in reversed(list(engine._queues.running)):
                engine._execution.preempt(sequence)

    return preempt


@pytest.mark.parametrize("steps", [(1, 3), (30, 60), (70,)])
def test_preemption_and_company_change_nothing(cpu: CpuRunner, steps: tuple[int, ...]) -> None:
    prompts = [prompt(length, length) for length in (37, 90, 150)]
    expected = [ask(build_engine(cpu, method=METHOD), tokens) for tokens in prompts]
    requests = [request(str(i), tokens, PARAMS) for i, tokens in enumerate(prompts)]
    engine = build_engine(cpu, method=METHOD, token_budget=70, step_cost=FixedCost(0.0))
    found = serve(engine, requests, after_step=preempting_at(*steps))
    assert [found[str(i), 0].tokens for i in range(3)] == expected
    assert engine.stats().preemptions > 0


def test_prompts_may_run_layer_by_layer(cpu: CpuRunner) -> None:
    """With rows of a question after them, and answers that are computed again."""
    asked = [
        request(str(length), prompt(length, length), PARAMS, compress_after=length - 7)
        for length in (90, 150)
    ]
    expected = [
        serve(build_engine(cpu, method=METHOD), [one])[one.request_id, 0].tokens for one in asked
    ]
    engine = build_engine(cpu, method=METHOD, token_budget=30, by_layers=True)
    found = serve(engine, asked, after_step=preempting_at(40))
    assert [found[one.request_id, 0].tokens for one in asked] == expected


def test_a_pool_that_is_short_preempts_and_all_are_answered(llama: Checkpoint) -> None:
    runner = CpuRunner.load(llama, slots=260, threads=1, weights="f32", kv_cache_dtype="f32")
    try:
        prompts = [prompt(120, seed) for seed in range(3)]
        expected = [ask(build_engine(runner, method=METHOD), tokens) for tokens in prompts]
        requests = [request(str(i), tokens, PARAMS) for i, tokens in enumerate(prompts)]
        found = serve(build_engine(runner, method=METHOD), requests)
        assert [found[str(i), 0].tokens for i in range(3)] == expected
    finally:
        runner.close()


@pytest.mark.parametrize("threshold", [1e-9, 1.0])
def test_answers_that_are_checked_for_emptiness_are_the_same_preempted(
    cpu: CpuRunner, threshold: float
) -> None:
    """Tokens of the check are taken back, and with them what was known of their sentence."""
    end = ask(build_engine(cpu, method=METHOD), prompt(120))[50]
    pieces = [b"", *(bytes([97 + token % 5]) for token in range(1, VOCAB))]
    params = EngineSamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=False)
    asked = EngineRequest(
        request_id="r",
        token_ids=list(prompt(120)),
        sampling=params,
        begins_with=b"abcab",
        empty_threshold=threshold,
    )

    def answer(*steps: int) -> list[int]:
        engine = build_engine(cpu, (end,), method=METHOD, token_bytes=pieces.__getitem__)
        return serve(engine, [asked], after_step=preempting_at(*steps))["r", 0].tokens

    expected = answer()
    for step in (1, 3, 6, 20, 50):
        assert answer(step) == expected


@pytest.mark.parametrize("dtype", ["f16", "i8"])
def test_parked_keys_keep_their_bits_in_any_pool(llama: Checkpoint, dtype: Any) -> None:
    """With a budget of everything: they leave the pool and come back, and rows see the same."""
    runner = CpuRunner.load(llama, slots=600, threads=1, weights="f32", kv_cache_dtype=dtype)
    try:
        whole = replace(METHOD, rule=replace(RULE, budget=300, retained=300))
        dense = ask(build_engine(runner), prompt(150))
        engine = build_engine(runner, method=whole)
        assert ask(engine, prompt(150)) == dense
        assert engine._methods.sentence_reads.fetched > 0
    finally:
        runner.close()


@pytest.mark.parametrize("other", ["snapkv", "flexprefill"])
def test_other_methods_can_t_stand_beside_it(cpu: CpuRunner, other: str) -> None:
    pair = [(name, small_method(name, cpu.config)) for name in ("sentencekv", other)]
    both = CombinedMethod(tuple(pair))
    with pytest.raises(InvalidRequestError, match="can't stand together"):
        build_engine(cpu, methods={"": None})._methods.check(both)
