"""LServe and HiP on the default model: KL from full KV, and needles, beside nulls; -s shows them.

Texts are source files of installed libraries, whose next tokens are known, and the same with a
number hidden in them. Differences are paired, text by text.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import cast

import numpy as np
import pytest
from default_model import DefaultModel

from midfill.engine.request import EngineSamplingParams
from midfill.methods.calibration_store import load_tables
from midfill.methods.evict.duoattention import NAME, VERSION, retrieval_heads
from midfill.methods.method import Method, ModelSpecific
from midfill.methods.registry import resolve_method
from midfill.methods.sparse_decode.lserve import SplitPages
from midfill.methods.sparse_decode.sequence import DecodeReads
from midfill_lab.bench.methods.nulls import make_null
from midfill_lab.bench.methods.probes import names
from serving import build_engine, request, serve

pytestmark = [
    pytest.mark.slow, pytest.mark.quality, pytest.mark.real_model, pytest.mark.timeout(900),
]  # fmt: skip

TEXTS, ANSWER = 8, 33
TOKENS, LONGER = 1200, 2000
"""Tokens of the texts that LServe and HiP read."""
STUDENT = 2.365
"""97.5% quantile of Student's distribution with ``TEXTS`` - 1 degrees of freedom."""
Asked = tuple[list[int], list[int]]
"""A text, and the known tokens after it."""
PAGES, SPLIT = "lserve:budget=192,static=0", "lserve:budget=1280,sinks=64,recent=128"
TREE = "hip:k=128,window=64"


class Asking:
    """Asks the default model for known tokens, under any method.

    Args:
        model: the default model.
        stack: closes it.
        tokens: per text.

    Attributes:
        code: beginnings of texts and what follows.
        needles: texts with a number hidden in them, a question, and the answer.
    """

    def __init__(self, model: DefaultModel, stack: ExitStack, tokens: int) -> None:
        self.model, haystacks = model, model.haystacks
        texts = [haystacks.hide(number, tokens + 64, []) for number in range(TEXTS)]
        self.code = [(text[:tokens], text[tokens : tokens + ANSWER]) for text in texts]
        encode = model.checkpoint.tokenizer.encode_continuation
        self.needles = []
        for number in range(TEXTS):
            rng = random.Random(number)
            (name,), code = names(1, rng), rng.randrange(100_000, 1_000_000)
            question = encode(f"\n# The pass code of the {name} is")
            needle = (number % 5 + 0.5) / 6, f"# The pass code of the {name} is {code}.\n"
            text = haystacks.hide(number, tokens - len(question), [needle])
            self.needles.append(([*text, *question], encode(f" {code}.\n")))
        self._methods: dict[str, Method | None] = {"": None}
        slots = 2 * TEXTS * (tokens + 200)
        self._answers = stack.enter_context(model.forced_answers(slots, self._methods))

    def make(self, specification: str, null: str = "") -> Method:
        """Return a method or one of its nulls."""
        if null:
            return cast("Method", make_null(specification, null, self.model.served))
        method = resolve_method(specification)
        assert isinstance(method, ModelSpecific)
        return method.for_model(self.model.served)

    def divergences(self, name: str, method: Method, kind: str = "code") -> np.ndarray:
        """Return each text's mean divergence from full KV; prints their mean and its interval."""
        self._methods["m"] = method
        asked: list[Asked] = getattr(self, kind)
        found = np.array([self._answers.divergence("m", *one) for one in asked])
        print(f"\n{kind:8} {name:48} KL {found.mean():.4f} ±{radius(found):.4f}", end="")
        print(f"  {' '.join(f'{one:.3f}' for one in found)}", end="", flush=True)
        return found

    def reads(self) -> DecodeReads:
        """Return what was read until now."""
        return replace(self._answers.engine._methods.decode_reads)

    def scores(self, name: str, method: Method | None) -> np.ndarray:
        """Return the mean log probability of each needle's tokens after the first; prints them."""
        self._methods["m"] = method
        found = []
        for prompt, answer in self.needles:
            rows = self._answers.logprobs("m", prompt, answer)
            found.append(rows[np.arange(len(rows)), answer][1:].mean())
        scores = np.array(found)
        print(f"\nneedles  {name:48} {scores.mean():.3f} ±{radius(scores):.3f}", end="", flush=True)
        return scores


def radius(numbers: np.ndarray) -> float:
    """Return the half width of the 95% interval of a mean."""
    return float(STUDENT * numbers.std(ddof=1) / np.sqrt(len(numbers)))


def is_below(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether one is below the other, by the 95% interval of the mean difference."""
    return bool((other - one).mean() > radius(other - one))


@pytest.fixture(scope="module")
def asking(default_model: DefaultModel) -> Iterator[Asking]:
    with ExitStack() as stack:
        yield Asking(default_model, stack, TOKENS)


@pytest.fixture(scope="module")
def asking_longer(default_model: DefaultModel) -> Iterator[Asking]:
    with ExitStack() as stack:
        yield Asking(default_model, stack, LONGER)


NULLS = ("pages at random", "recent pages", "summaries of whole pages")


def test_pages_chosen_by_the_query_find_needles_that_others_miss(asking: Asking) -> None:
    """Whether they are ranked by summaries of 16 or of 64 keys; these two aren't told apart."""
    own = asking.scores(PAGES, asking.make(PAGES))
    nulls = {null: asking.scores(null, asking.make(PAGES, null)) for null in NULLS}
    assert is_below(nulls["pages at random"], own)
    assert is_below(nulls["recent pages"], own)
    assert is_below(nulls["recent pages"], nulls["summaries of whole pages"])


def test_pages_chosen_by_the_query_are_nearer_to_full_kv(asking: Asking) -> None:
    null = "pages at random"
    own = asking.divergences(PAGES, asking.make(PAGES))
    assert is_below(own, asking.divergences(null, asking.make(PAGES, null)))


def test_calibrated_heads_lose_less_than_others(asking: Asking) -> None:
    """With room for all pages, so that what heads drop is all that is lost."""
    split = asking.make(SPLIT)
    assert isinstance(split, SplitPages)
    gates = load_tables(NAME, VERSION, asking.model.served)["gates"]
    inverted = replace(split, retrieval=tuple(retrieval_heads(-gates, 0.5).tolist()))
    rng = np.random.default_rng(0)
    own = asking.divergences("calibrated", split, "needles")
    drawn = [
        asking.divergences(
            "random heads",
            replace(split, retrieval=tuple(rng.permutation(split.retrieval).tolist())),
            "needles",
        )
        for _ in range(2)
    ]
    assert is_below(own, np.mean(drawn, axis=0))
    assert is_below(own, asking.divergences("inverted", inverted, "needles"))


def test_choosing_at_every_token_gives_mostly_the_same_text(default_model: DefaultModel) -> None:
    """An interval of 4 makes a quarter of the choices, and answers questions alike.

    Where text merely goes on, answers part sooner: tokens that are as likely are many.
    """
    encode = default_model.checkpoint.tokenizer.encode_continuation
    prompts = []
    for number in range(6):
        (name,) = names(1, random.Random(number))
        question = encode(f"\n# The pass code of the {name} is")
        needle = 0.5, f"# The pass code of the {name} is {731_042 + 7_919 * number}.\n"
        prompts.append([*default_model.haystacks.hide(number, 700, [needle]), *question])
    params = EngineSamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    answers, choices = [], []
    with default_model.runner(6000) as runner:
        for interval in (1, 4):
            method = resolve_method(f"lserve:budget=512,static=0,interval={interval}")
            assert isinstance(method, ModelSpecific)
            engine = build_engine(runner, method=method.for_model(default_model.served))
            asked = [request(str(at), tokens, params) for at, tokens in enumerate(prompts)]
            found = serve(engine, asked)
            answers.append([found[str(at), 0].tokens for at in range(len(prompts))])
            choices.append(engine._methods.decode_reads.choices)
    same = sum(one == other for one, other in zip(*answers, strict=True))
    print(f"\n{same} of {len(prompts)} answers are the same; choices {choices}", end="")
    assert same > len(prompts) // 2
    assert choices[0] == 8 * len(prompts)
    assert choices[1] <= 3 * len(prompts)


def test_tree_searches_find_needles_that_sinks_and_window_miss(asking_longer: Asking) -> None:
    """As many keys are read of each; "recent blocks" are a longer window."""
    asking = asking_longer
    own = asking.scores(TREE, asking.make(TREE))
    for null in ("recent blocks", "blocks at random"):
        assert is_below(asking.scores(null, asking.make(TREE, null)), own)


def test_tree_searches_are_nearer_to_full_kv_than_random_blocks(asking_longer: Asking) -> None:
    """And nearer still where they search at every token, which is eight times as often.

    By the logarithms of divergences, which differ tenfold from text to text. Where text merely goes
    on, sinks with a longer window are not told apart from a search.
    """
    asking, found, searches = asking_longer, [], []
    for refresh in (1, 8):
        before = asking.reads()
        method = asking.make(f"{TREE},refresh={refresh}")
        found.append(np.log(asking.divergences(f"refresh {refresh}", method)))
        searches.append(asking.reads().choices - before.choices)
    assert searches == [TEXTS * (ANSWER - 1), TEXTS * -(-(ANSWER - 1) // 8)]
    assert is_below(found[0], found[1])
    null = "blocks at random"
    assert is_below(found[1], np.log(asking.divergences(null, asking.make(TREE, null))))
