"""SentenceKV on the default model: needles, a second question, and KL from full KV; -s shows them.

Texts are source files of installed libraries, with a number hidden in them, and the same files with
what follows, whose tokens are known. Differences are paired, text by text.
"""

import random
from collections.abc import Iterator
from contextlib import ExitStack
from typing import cast

import numpy as np
import pytest
from default_model import DefaultModel

from midfill.methods.method import Method, ModelSpecific
from midfill.methods.registry import resolve_method
from midfill_lab.bench.methods.nulls import make_null
from midfill_lab.bench.methods.probes import names

pytestmark = [
    pytest.mark.slow, pytest.mark.quality, pytest.mark.real_model, pytest.mark.timeout(900),
]  # fmt: skip

TEXTS, TOKENS, ANSWER = 10, 800, 25
STUDENT = 2.262
"""97.5% quantile of Student's distribution with ``TEXTS`` - 1 degrees of freedom."""
OWN, OTHER = "sentencekv:budget=96,keep=4,unit=line", "snapkv:budget=96,kernel=7"


class Asking:
    """Asks the default model for known tokens, under any method.

    Attributes:
        needles: texts with two numbers hidden in them, the questions about them, and the answers.
        code: beginnings of texts, and what follows.
    """

    def __init__(self, model: DefaultModel, stack: ExitStack) -> None:
        self.model = model
        encode = model.checkpoint.tokenizer.encode_continuation
        self.needles = []
        for number in range(TEXTS):
            rng = random.Random(number)
            # Worded differently: what the first question looks for isn't the other's answer.
            stems = [
                stem.format(name)
                for stem, name in zip(
                    ("The pass code of the {} is", "Parcels for the {} go to gate"),
                    names(2, rng),
                    strict=True,
                )
            ]
            codes = [rng.randrange(1000, 10_000) for _ in stems]
            depths = (number + 0.5) / TEXTS, ((number + TEXTS // 2) % TEXTS + 0.5) / TEXTS
            lines = [f"# {stem} {code}.\n" for stem, code in zip(stems, codes, strict=True)]
            text = model.haystacks.hide(number, TOKENS, sorted(zip(depths, lines, strict=True)))
            asked = [encode(f"\n# {stem}") for stem in stems]
            self.needles.append((text, asked, [encode(f" {code}.\n") for code in codes]))
        texts = [model.haystacks.hide(number, TOKENS + 64, []) for number in range(TEXTS)]
        self.code = [(text[:TOKENS], text[TOKENS : TOKENS + ANSWER]) for text in texts]
        self._methods: dict[str, Method | None] = {"": None}
        slots = 4 * TEXTS * TOKENS
        self._answers = stack.enter_context(model.forced_answers(slots, self._methods))

    def use(self, specification: str, null: str = "") -> str:
        """Make a method or one of its nulls the one that is asked; return its name."""
        if null:
            method = cast("Method", make_null(specification, null, self.model.served))
        else:
            found = resolve_method(specification)
            assert found is not None
            is_specific = isinstance(found, ModelSpecific)
            method = found.for_model(self.model.served) if is_specific else found  # type: ignore[union-attr]
        self._methods["m"] = method
        return null or specification

    def first(self, name: str) -> np.ndarray:
        """Return the mean log probability of each first needle's digits after the first."""
        found = []
        for text, questions, answers in self.needles:
            rows = self._answers.logprobs("m", [*text, *questions[0]], answers[0])
            found.append(rows[np.arange(len(rows)), answers[0]][1:].mean())
        return shown("needle", name, np.array(found))

    def second(self, name: str) -> np.ndarray:
        """Return that of the second needles, asked for once the first question is answered.

        A method sees the text, the first question and its answer before it retains anything.
        """
        found = []
        for text, questions, answers in self.needles:
            before = [*text, *questions[0], *answers[0]]
            prompt = [*before, *questions[1][1:]]
            rows = self._answers.logprobs("m", prompt, answers[1], compress_after=len(before))
            found.append(rows[np.arange(len(rows)), answers[1]][1:].mean())
        return shown("second question", name, np.array(found))

    def divergences(self, name: str) -> np.ndarray:
        """Return each text's mean divergence from full KV."""
        found = [self._answers.divergence("m", *one) for one in self.code]
        return shown("KL", name, np.array(found))


def shown(measure: str, name: str, found: np.ndarray) -> np.ndarray:
    """Print the mean and its interval."""
    print(f"\n{measure:16} {name:44} {found.mean():7.3f} ±{radius(found):.3f}", end="", flush=True)
    return found


def radius(numbers: np.ndarray) -> float:
    """Return the half width of the 95% interval of a mean."""
    return float(STUDENT * numbers.std(ddof=1) / np.sqrt(len(numbers)))


def is_below(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether one is below the other, by the 95% interval of the mean difference."""
    difference = other - one
    print(f"\n  difference {difference.mean():.3f} ±{radius(difference):.3f}", end="", flush=True)
    return bool(difference.mean() > radius(difference))


@pytest.fixture(scope="module")
def asking(default_model: DefaultModel) -> Iterator[Asking]:
    with ExitStack() as stack:
        yield Asking(default_model, stack)


RANDOM, ENDS = "sentences at random", "first and last keys"


def test_sentences_find_needles_that_others_miss(asking: Asking) -> None:
    own = asking.first(asking.use(OWN))
    for null in (RANDOM, ENDS):
        assert is_below(asking.first(asking.use(OWN, null)), own)


def test_a_second_question_finds_what_an_eviction_has_forgotten(asking: Asking) -> None:
    own = asking.second(asking.use(OWN))
    assert is_below(asking.second(asking.use(OTHER)), own)


def test_sentences_are_nearer_to_full_kv_than_random_ones(asking: Asking) -> None:
    own = asking.divergences(asking.use(OWN))
    assert is_below(own, asking.divergences(asking.use(OWN, RANDOM)))
