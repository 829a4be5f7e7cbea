"""Loads for methods of reuse: agents, retrieved chunks, edited prompts.

All are made of source files, in which facts are hidden: "The pass code of the amber falcon is
4711." Each prompt ends with a question for one of those that it shows.

**Agents.** Three agents, each with a template of its own, are asked about one question after the
other. An agent's prompt has two contents: the question, which is the same for all three, and notes
(of the first agent) or what stands for the answer of the agent before. They are near-duplicates of
a few texts: a tenth of the tokens differs, and so does the fact. Every fifth question and its
answers are like none before.

**Chunks.** Each prompt shows some chunks of a pool, in random order, as retrieval finds them: the
chunk of rank r with a probability in proportion to 1 / r (Zipf's law).

**Edits.** Texts that were asked about before come back with another beginning, with a tenth of the
tokens and one of three facts changed, a paragraph put in, and every second time with their first
third at the end.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from midfill.models.tokens.tokenizer import Tokenizer
from midfill_lab.bench.methods.probes import Haystacks, names

AGENTS, CHUNKS, EDITS = "agents", "chunks", "edits"
LOADS = (AGENTS, CHUNKS, EDITS)
_HEADER = 300
"""First tokens of a file, which are often the same as another's: a licence, imports."""


class LoadSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How large the loads are.

    Attributes:
        prompts: questions to three agents, prompts with chunks, and edited prompts.
        piece: tokens of a content, of a chunk, and of a third of an edited text.
        fixed: tokens of each of a template's three segments, and of what begins other prompts; at
            most those of a piece.
        families: questions, each with answers, that contents are near-duplicates of.
        texts: that are edited.
        pool: chunks that prompts show some of.
        shown: chunks of a prompt.
    """

    prompts: int = 16
    piece: int = 80
    fixed: int = 24
    families: int = 2
    texts: int = 8
    pool: int = 12
    shown: int = 4


class LoadPrompt(NamedTuple):
    """One prompt.

    Attributes:
        name: unique in its load.
        group: of prompts that aren't independent.
        tokens: the whole prompt.
        answer: what is right.
        contexts: see ``EngineRequest``.
    """

    name: str
    group: str
    tokens: list[int]
    answer: list[int]
    contexts: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Fact:
    """A fact, and how it is asked for."""

    line: list[int]
    question: list[int]
    answer: list[int]


class LoadMaker:
    """Makes the loads.

    Args:
        tokenizer: the model's.
        begin: the tokens that prompts begin with, such as BOS.
        sizes: of the loads.
        seed: all chance follows from it.
    """

    def __init__(
        self, tokenizer: Tokenizer, begin: Sequence[int], sizes: LoadSizes, seed: int
    ) -> None:
        self._encode: Callable[[str], list[int]] = tokenizer.encode_continuation
        self._begin = list(begin)
        self._sizes = sizes
        self._seed = seed
        self._haystacks = Haystacks(tokenizer.encode, seed=seed)
        self._texts = 0

    @property
    def source(self) -> str:
        """Where the files come from."""
        return self._haystacks.source

    def make(self, load: str) -> list[LoadPrompt]:
        """Return the prompts of a load in the order in which they are asked."""
        self._texts = 10 * LOADS.index(load)
        chance = random.Random(f"{self._seed}/{load}")
        makers = {AGENTS: self._agents, CHUNKS: self._chunks, EDITS: self._edits}
        return makers[load](chance)

    # --- pieces

    def _text(self, tokens: int) -> list[int]:
        """Return so many tokens that no other piece of the load has: at most a piece's."""
        turn, number = divmod(self._texts, len(self._haystacks.texts))
        self._texts += 1
        start = _HEADER + turn * self._sizes.piece
        found = self._haystacks.document(number)[start : start + tokens]
        assert len(found) == tokens, "pieces are longer than what is left of a file"
        return found

    def _fact(self, chance: random.Random, name: str) -> _Fact:
        code = f"{chance.randrange(1000, 10_000)}"
        line = self._encode(f"\n# The pass code of the {name} is {code}.\n")
        question = self._encode(f"\n# The pass code of the {name} is")
        answer = self._encode(f" {code}")
        if answer[:1] == self._encode(" "):  # a token of its own, which is no answer yet
            question, answer = question + answer[:1], answer[1:]
        return _Fact(line, question, answer)

    def _with_fact(self, text: Sequence[int], fact: _Fact) -> list[int]:
        """Return a text whose middle is replaced with a fact."""
        start = max((len(text) - len(fact.line)) // 2, 0)
        return [*text[:start], *fact.line, *text[start + len(fact.line) :]]

    def _changed(self, text: Sequence[int], chance: random.Random) -> list[int]:
        """Return a text of which every tenth token is another one of it."""
        offset = chance.randrange(10)
        return [
            chance.choice(text) if number % 10 == offset else token
            for number, token in enumerate(text)
        ]

    # --- loads

    def _agents(self, chance: random.Random) -> list[LoadPrompt]:
        sizes = self._sizes
        templates = [[self._text(sizes.fixed) for _ in range(3)] for _ in range(3)]
        families = [[self._text(sizes.piece) for _ in range(4)] for _ in range(sizes.families)]
        prompts = []
        for task in range(sizes.prompts):
            family = chance.choice(families)
            if task % 5 == 4:
                family = [self._text(sizes.piece) for _ in range(4)]
            facts = [self._fact(chance, name) for name in names(len(family), chance)]
            question, *others = (
                self._with_fact(self._changed(text, chance), fact)
                for text, fact in zip(family, facts, strict=True)
            )
            for agent, (first, between, after) in enumerate(templates):
                asked = facts[chance.choice((0, 1 + agent))]
                pieces = [[*self._begin, *first], question, between, others[agent], after]
                prompts.append(_assembled(f"{task}/{agent}", f"{task}", pieces, asked))
        return prompts

    def _chunks(self, chance: random.Random) -> list[LoadPrompt]:
        sizes = self._sizes
        system = [*self._begin, *self._text(sizes.fixed)]
        facts = [self._fact(chance, name) for name in names(sizes.pool, chance)]
        pool = [self._with_fact(self._text(sizes.piece), fact) for fact in facts]
        shares = 1.0 / np.arange(1, sizes.pool + 1)
        draw = np.random.default_rng(chance.randrange(1 << 32))
        prompts = []
        for number in range(sizes.prompts):
            shown = draw.choice(sizes.pool, sizes.shown, replace=False, p=shares / shares.sum())
            pieces = [system, *(pool[chunk] for chunk in shown)]
            asked = facts[int(draw.choice(shown))]
            prompts.append(_assembled(f"{number}", f"{number}", pieces, asked))
        return prompts

    def _edits(self, chance: random.Random) -> list[LoadPrompt]:
        sizes = self._sizes
        prompts = []
        known = names(3, chance)
        texts = []
        for number in range(sizes.texts):
            facts = [self._fact(chance, name) for name in known]
            text = [self._text(sizes.piece) for _ in facts]
            texts.append((text, facts))
            shown = [self._with_fact(*each) for each in zip(text, facts, strict=True)]
            pieces = [[*self._begin, *self._text(sizes.fixed)], *shown]
            prompts.append(_assembled(f"text {number}", f"{number}", pieces, facts[0], False))
        for number in range(sizes.prompts):
            which = number % len(texts)
            text, facts = texts[which]
            place, asked = chance.randrange(3), chance.randrange(3)
            facts = list(facts)
            facts[place] = self._fact(chance, known[place])
            shown = [
                self._with_fact(self._runs_changed(part, chance), fact)
                for part, fact in zip(text, facts, strict=True)
            ]
            if number % 2:
                shown = [*shown[1:], shown[0]]
            shown.insert(chance.randrange(4), self._text(sizes.piece // 3))
            pieces = [[*self._begin, *self._text(sizes.fixed)], *shown]
            prompts.append(_assembled(f"{number}", f"{which}", pieces, facts[asked], False))
        return prompts

    def _runs_changed(self, text: Sequence[int], chance: random.Random) -> list[int]:
        """Return a text of which four tokens side by side of every forty are others of it."""
        found = list(text)
        for start in range(chance.randrange(10, 36), len(text) - 4, 40):
            found[start : start + 4] = [chance.choice(text) for _ in range(4)]
        return found


def _assembled(
    name: str, group: str, pieces: Sequence[list[int]], asked: _Fact, bounds: bool = True
) -> LoadPrompt:
    """Return the prompt of some pieces and a question; the first piece is fixed text."""
    ends = tuple(np.cumsum([len(piece) for piece in pieces]).tolist())
    tokens = [token for piece in pieces for token in piece] + asked.question
    return LoadPrompt(name, group, tokens, asked.answer, ends if bounds else ())
