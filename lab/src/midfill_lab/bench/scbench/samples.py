"""Sample: a context and the questions that share it, generated anew at a stated length.

A *draft* is text; its context grows with the number of items (pairs, sentences, functions). A
sample has as many items as fit, in a model's tokens, together with all questions and answers.
"""

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from midfill.errors import MidfillError, OptionError
from midfill_lab.bench.scbench.packages import PackageTexts
from midfill_lab.bench.scbench.scoring import Metric

T = TypeVar("T")


@dataclass(frozen=True)
class Turn:
    """A question, and what is right.

    Attributes:
        question: text that follows the context, or the answer before.
        gold: the right answer as it would stand behind the question.
        metric: how answers are scored.
        accepted: what they are compared with, see ``scoring.score_answer``.
        others: wrong answers of the same kind in the context, for ``function``.
        tokens: that an answer may have, or as many as the right one has if that is more.
        paragraph: whether an answer ends with a blank line; others end with their line.
    """

    question: str
    gold: str
    metric: Metric
    accepted: tuple[str, ...]
    others: tuple[str, ...] = ()
    tokens: int = 16
    paragraph: bool = False


@dataclass(frozen=True)
class Draft:
    """A context and questions about it, as text."""

    context: str
    turns: tuple[Turn, ...]


DraftMaker = Callable[[random.Random, int, int, PackageTexts], Draft]
"""Called with a seeded generator, the number of items, of questions, and texts; the same arguments
give the same draft.

Raises:
    MidfillError: the installed packages hold too few.
"""


@dataclass(frozen=True)
class Exchange:
    """A question and its right answer, in tokens.

    Attributes:
        turn: the text.
        question, answer: [n] token ids.
        limit: tokens that a generated answer may have.
    """

    turn: Turn
    question: tuple[int, ...]
    answer: tuple[int, ...]
    limit: int


@dataclass(frozen=True)
class Sample:
    """A shared context.

    Attributes:
        task: name of its task.
        number: which one of this task.
        text: the context.
        context: its tokens.
        exchanges: the questions, in order.
    """

    task: str
    number: int
    text: str
    context: tuple[int, ...]
    exchanges: tuple[Exchange, ...]

    @property
    def tokens(self) -> int:
        """Of the context, all questions, and answers as long as they may get."""
        return len(self.context) + sum(len(each.question) + each.limit for each in self.exchanges)

    @property
    def digest(self) -> str:
        """Names the sample by its tokens: results of the same sample belong together."""
        parts = [self.context, *(part for e in self.exchanges for part in (e.question, e.answer))]
        return hashlib.sha256(repr((self.task, parts)).encode()).hexdigest()[:16]

    def asked_in_turn(self, turn: int) -> list[int]:
        """Return the conversation up to a question, with the right answers to those before it."""
        tokens = list(self.context)
        for each in self.exchanges[:turn]:
            tokens += each.question + each.answer
        return tokens + list(self.exchanges[turn].question)

    def asked_alone(self, turn: int) -> list[int]:
        """Return the context and one question."""
        return [*self.context, *self.exchanges[turn].question]


@dataclass(frozen=True)
class SampleMaker:
    """Makes samples with a model's tokenizer.

    Attributes:
        encode: returns the tokens of a text that begins a prompt.
        encode_continuation: returns those of a text that follows another.
        texts: of installed packages.
        length: tokens of a sample, at most, see ``Sample.tokens``.
        turns: questions per context.
        seed: of all random choices.
    """

    encode: Callable[[str], list[int]]
    encode_continuation: Callable[[str], list[int]]
    texts: PackageTexts
    length: int
    turns: int
    seed: int

    def make(self, task: str, draft: DraftMaker, number: int) -> Sample:
        """Return a sample with as many items as fit.

        Args:
            task: its name.
            draft: makes it.
            number: which one.

        Raises:
            OptionError: not even the fewest items fit.
            MidfillError: the installed packages hold too little text for the length.
        """

        lacking: dict[int, MidfillError] = {}

        def at(items: int) -> Sample | None:
            rng = random.Random(f"{self.seed}/{task}/{number}")
            try:
                return self._sample(task, number, draft(rng, items, self.turns, self.texts))
            except MidfillError as error:
                lacking[items] = error
                return None

        few = self.turns + 1
        fits = at(few)
        if fits is None:
            raise lacking[few]
        if fits.tokens > self.length:
            raise OptionError(
                f"--length {self.length} is too short for {task} with {self.turns} questions:"
                f" it takes {fits.tokens} tokens at least"
            )
        many = 2 * few
        while (larger := at(many)) is not None and larger.tokens <= self.length:
            few, fits, many = many, larger, 2 * many
        while many - few > 1:
            middle = (few + many) // 2
            found = at(middle)
            if found is not None and found.tokens <= self.length:
                few, fits = middle, found
            else:
                many = middle
        if many in lacking:  # one more might still fit
            raise lacking[many]
        return fits

    def _sample(self, task: str, number: int, draft: Draft) -> Sample:
        exchanges = []
        for turn in draft.turns:
            answer = tuple(self.encode_continuation(turn.gold))
            question = tuple(self.encode_continuation(turn.question))
            exchanges.append(Exchange(turn, question, answer, max(turn.tokens, len(answer))))
        context = tuple(self.encode(draft.context))
        return Sample(task, number, draft.context, context, tuple(exchanges))


def take_items(rng: random.Random, items: Sequence[T], count: int, what: str) -> list[T]:
    """Return some items in a random order.

    Raises:
        MidfillError: there are fewer.
    """
    if count > len(items):
        raise MidfillError(
            f"the installed packages hold {len(items)} {what}, {count} are needed: choose a shorter"
            " --length"
        )
    return rng.sample(items, count)
