"""On the default model, methods answer better than the same budget spent without their idea.

Needles are numbers hidden in source code, unlike the sentences that heads and gates were found
with. Scores are mean log probabilities of an answer's tokens after the first, which sees the whole
prompt under every method of eviction. Differences are paired, text by text.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import pytest
from default_model import DefaultModel

from benchmarks.pruning import RandomTokens
from midfill.engine.engine import Engine
from midfill.engine.request import EngineSamplingParams
from midfill.methods.evict.cake import Cake
from midfill.methods.evict.compresskv import RetrievalVotes
from midfill.methods.evict.kvmerger import KVMerger
from midfill.methods.evict.razorattention import retrieval_heads
from midfill.methods.evict.streaming_heads import HeadSplit
from midfill.methods.evict.uncomp import GroupedHeads
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.needles import needle_text
from midfill.methods.registry import resolve_method
from midfill.methods.reuse.cacheblend import CacheBlend
from midfill.methods.rows.lazyllm import LazyLLM
from midfill.methods.sparse_prefill.flexprefill import FlexPrefill
from midfill.runners.cpu.runner import CpuRunner
from midfill_lab.bench.methods.nulls import make_null
from midfill_lab.bench.methods.probes import names
from midfill_lab.calibration.razorattention import HeadSearch
from serving import build_engine, request, serve

pytestmark = [
    pytest.mark.slow, pytest.mark.quality, pytest.mark.real_model, pytest.mark.timeout(900),
]  # fmt: skip

TEXTS, TOKENS = 12, 1000
STUDENT = 2.20
"""97.5% quantile of Student's distribution with ``TEXTS`` - 1 degrees of freedom."""


@dataclass(frozen=True)
class Question:
    """A prompt that ends with a question, and the answer's tokens."""

    prompt: list[int]
    answer: list[int]


class Asking:
    """Asks the default model, under any method, questions whose answers are known."""

    def __init__(self, model: DefaultModel, stack: ExitStack) -> None:
        self.model, self.served = model, model.served
        self._methods: dict[str, Method | None] = {"": None}
        slots = TEXTS * TOKENS + 3000
        self._answers = stack.enter_context(model.forced_answers(slots, self._methods))
        tokenizer = model.checkpoint.tokenizer
        self.questions = []
        for number in range(TEXTS):
            rng = random.Random(number)
            (name,), code = names(1, rng), rng.randrange(100_000, 1_000_000)
            asked = tokenizer.encode_continuation(f"\n# The pass code of the {name} is")
            needle = (number % 5 + 0.5) / 5, f"# The pass code of the {name} is {code}.\n"
            text = model.haystacks.hide(number, TOKENS - len(asked), [needle])
            answer = tokenizer.encode_continuation(f" {code}.\n")
            self.questions.append(Question([*text, *asked], answer))

    def make(self, specification: str) -> object:
        """Return a method that is ready for the model."""
        method = resolve_method(specification)
        return method.for_model(self.served) if isinstance(method, ModelSpecific) else method

    def logprobs(self, method: object, question: Question, tenant: str = "") -> np.ndarray:
        """Return the log probabilities [answer's tokens, vocab] under a method."""
        name = self._name(method)
        return self._answers.logprobs(name, question.prompt, question.answer, tenant)

    def scores(self, method: object) -> np.ndarray:
        """Return each answer's mean log probability per token after the first: [texts]."""
        found = []
        for question in self.questions:
            rows = self.logprobs(method, question)
            found.append(rows[np.arange(len(rows)), question.answer][1:].mean())
        return np.array(found)

    def divergences(
        self, method: object, questions: Sequence[Question] | None = None
    ) -> np.ndarray:
        """Return the mean divergence from full KV of the answers' later tokens: [questions]."""
        name = self._name(method)
        asked = self.questions if questions is None else questions
        return np.array([self._answers.divergence(name, one.prompt, one.answer) for one in asked])

    def _name(self, method: object) -> str:
        if method is None:
            return ""
        self._methods[repr(method)] = cast("Method", method)
        return repr(method)


@pytest.fixture(scope="module")
def asking(default_model: DefaultModel) -> Iterator[Asking]:
    with ExitStack() as stack:
        yield Asking(default_model, stack)


def check_better(better: np.ndarray, worse: np.ndarray, student: float = STUDENT) -> None:
    """Check that the mean difference of pairs is above 0 with all of its 95% interval."""
    difference = better - worse
    radius = student * difference.std(ddof=1) / np.sqrt(len(difference))
    assert difference.mean() > radius, f"{difference.mean():.3f} ± {radius:.3f}"


def shuffled(split: HeadSplit, seed: int) -> HeadSplit:
    """As many heads that keep all keys, at random."""
    order = np.random.default_rng(seed).permutation(len(split.retrieval))
    return replace(split, retrieval=tuple(split.retrieval[place] for place in order))


def split_of(asking: Asking, specification: str) -> HeadSplit:
    split = asking.make(specification)
    assert isinstance(split, HeadSplit)
    return split


def test_razorattentions_heads_find_more_than_as_many_at_random(asking: Asking) -> None:
    split = split_of(asking, "razorattention:recent=64,share=0")
    check_better(asking.scores(split), asking.scores(shuffled(split, seed=0)))


def test_duoattentions_gates_find_more_than_random_ones_and_these_more_than_none(
    asking: Asking,
) -> None:
    split = split_of(asking, "duoattention:sinks=4,recent=64")
    random_gates = np.mean([asking.scores(shuffled(split, seed)) for seed in range(2)], axis=0)
    check_better(asking.scores(split), random_gates)
    none = replace(split, retrieval=(False,) * len(split.retrieval))
    check_better(random_gates, asking.scores(none))


class EqualBudgets(Cake):
    """Scores as CAKE does, and gives all layers the same."""

    def preference(self, weights: np.ndarray) -> float:
        return 1.0


def test_cake_finds_more_than_equal_budgets_and_these_more_than_a_window(
    asking: Asking,
) -> None:
    equal = asking.scores(EqualBudgets(budget=64))
    check_better(asking.scores(Cake(budget=64)), equal)
    check_better(equal, asking.scores(asking.make("streamingllm:budget=64")))


def test_compresskvs_heads_and_budgets_find_more_than_all_heads_and_equal_ones(
    asking: Asking,
) -> None:
    votes = asking.make("compresskv:budget=64")
    assert isinstance(votes, RetrievalVotes)
    layers, heads = asking.served.config.layers, asking.served.config.query_heads
    plain = replace(votes, heads=(tuple(range(heads)),) * layers, errors=(1.0,) * layers)
    found = asking.scores(plain)
    check_better(asking.scores(votes), found)
    check_better(found, asking.scores(asking.make("streamingllm:budget=64")))


def test_what_stays_at_four_bits_is_worth_as_much_and_more_than_half_as_much_exact(
    asking: Asking,
) -> None:
    """SnapKV's 512 tokens take 48 KiB per head with KIVI, 128 without; 256 take 64."""
    quantized = asking.scores(asking.make("snapkv:budget=512+kivi:bits=4,residual=32"))
    exact, half = (asking.scores(asking.make(f"snapkv:budget={n}")) for n in (512, 256))
    assert np.abs(quantized - exact).mean() < 0.1
    check_better(quantized, half)


def test_uncomps_grouping_is_no_worse_than_reversed(asking: Asking) -> None:
    grouped = asking.make("uncomp:budget=64")
    assert isinstance(grouped, GroupedHeads)
    reverse = replace(grouped, high=tuple(not high for high in grouped.high))
    assert asking.scores(grouped).mean() > asking.scores(reverse).mean()


def test_kvmerger_is_nearer_to_dense_than_fixed_windows_random_tokens_and_h2o(
    asking: Asking,
) -> None:
    specification = "kvmerger:budget=0.5"
    merged, windows, random_ones, heavy_hitters = (
        asking.divergences(method)
        for method in (
            asking.make(specification),
            *(
                make_null(specification, title, asking.served)
                for title in ("fixed windows", "at random", "accumulated score")
            ),
        )
    )
    check_better(heavy_hitters, merged)
    # Twelve texts are too few for the intervals of these.
    assert min(windows.mean(), random_ones.mean()) > merged.mean()


def entries_per_layer(runner: CpuRunner, method: KVMerger, tokens: Sequence[int]) -> np.ndarray:
    """Return which share of a prompt's tokens each layer keeps as entries: [layers]."""
    engine = build_engine(runner, method=method)
    params = EngineSamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    counts = []

    def record(one: Engine) -> None:
        for sequence in one._queues.running:
            if sequence.kv is not None and sequence.kv.prefix is not None:
                counts.append(np.diff(sequence.kv.prefix.index.indptr))

    serve(engine, [request("r", list(tokens), params)], after_step=record)
    shares: np.ndarray = counts[0].reshape(runner.config.layers, -1).mean(axis=1)
    return shares / len(tokens)


def test_how_much_a_layer_merges_is_the_models_more_than_the_texts(asking: Asking) -> None:
    method = KVMerger(epsilon=0.75)
    texts = [one.prompt[at : at + 400] for one in asking.questions[:10] for at in (0, 500)]
    with asking.model.runner(1000) as runner:
        shares = np.stack([entries_per_layer(runner, method, text) for text in texts])[:, 2:-1]
    variation = shares.std(axis=0, ddof=1) / shares.mean(axis=0)
    assert variation.mean() < 0.1, f"{variation.mean():.3f}"
    assert shares.mean(axis=0).std() > 2 * shares.std(axis=0).mean(), "layers differ more"


def test_lazyllm_is_further_from_dense_without_its_cache_of_hidden_rows(
    asking: Asking,
) -> None:
    """Answers of six words, each of which needs another place of the prompt."""
    tokenizer, questions = asking.model.checkpoint.tokenizer, []
    for number in range(TEXTS):
        text = needle_text(tokenizer, 600, 6, 3 * number, seed=1)
        questions.append(Question(text.token_ids.tolist(), text.answer.tolist()))
    revived, left = (
        asking.divergences(LazyLLM(keep="0.5", revive=each), questions) for each in (1, 0)
    )
    check_better(left, revived)


def test_tokens_that_lazyllm_chooses_are_nearer_to_dense_than_random_ones(
    asking: Asking,
) -> None:
    lazy, questions = LazyLLM(keep="0.7"), asking.questions[:6]
    chosen, random_ones = (
        asking.divergences(method, questions) for method in (lazy, RandomTokens(lazy))
    )
    check_better(random_ones, chosen, student=2.57)


def test_the_more_tokens_are_computed_again_the_nearer_is_the_answer(asking: Asking) -> None:
    """Two texts that are cached behind other text, in one prompt; the first token's divergence."""
    ratios = (0.0, 0.15, 0.5)
    found: list[list[float]] = []
    for number, question in enumerate(asking.questions[:3]):
        begin, one, other = np.split(np.array(question.prompt), [100, 500])
        texts = [one.tolist(), other[:-30].tolist()]
        asked = Question([*begin[::-1].tolist(), *texts[1], *texts[0], *other[-30:].tolist()], [1])
        exact = asking.logprobs(None, asked, "exact")
        for text in texts:
            asking.logprobs(None, Question([*begin[:50].tolist(), *text], [1]), f"{number}")
        rows = [asking.logprobs(CacheBlend(ratio=each), asked, f"{number}") for each in ratios]
        found.append([float((np.exp(exact) * (exact - each)).sum()) for each in rows])
    none, some, half = np.mean(found, axis=0)
    assert half < some < none


def test_two_seeds_of_razorattentions_search_choose_nearly_the_same_heads(
    default_model: DefaultModel,
) -> None:
    checkpoint = default_model.checkpoint
    chosen = []
    for seed in range(2):
        work = HeadSearch(tokens=150, draws=1, seed=seed).open(checkpoint, lambda *_: None)
        tables = work.step(0, work.start())
        work.close()
        chosen.append(retrieval_heads(tables, checkpoint.config, 0.14, 0.01))
    one, other = chosen
    assert (one & other).sum() >= 0.7 * (one | other).sum()


def test_a_repeated_text_needs_fewer_blocks_than_random_words(default_model: DefaultModel) -> None:
    rng, text = random.Random(0), default_model.haystacks.hide(0, 1000, [])
    words = rng.choices(text, k=2048)
    params = EngineSamplingParams(temperature=0.0, max_tokens=1)
    with default_model.runner(3000) as runner:
        shares = []
        for prompt in (words[:256] * 8, words):
            method = FlexPrefill(gamma=0.9, least=64, chunk=512, dense=512)
            engine = build_engine(runner, method=method)
            serve(engine, [request("r", prompt, params)])
            shares.append(engine.stats().listed_pairs / engine.stats().causal_pairs)
    assert shares[0] < shares[1]
