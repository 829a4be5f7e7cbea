"""Shared contexts: several questions about one context, in SCBench's two modes.

Source: Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods", ICLR 2025,
arXiv 2412.10319. Kinds of its tasks, generated anew at the length that is asked for: string
retrieval (pairs, tracing), semantic retrieval (functions, after RepoQA) and global information
(labels, its many-shot task). Names are short words instead of UUIDs, which small models can't copy.
"""

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from midfill.lab.bench.methods.haystacks import WORDS, Haystacks, names
from midfill.lab.bench.methods.probes import Probe, Question, request_probes, turns_probe
from midfill.models.tokens.tokenizer import Tokenizer

_FUNCTION = re.compile(r"^ *(def \w+\()(.*(?:\n.+)+)", re.MULTILINE)
_FUNCTION_TOKENS = 16
_CATEGORIES = {
    "dax": ("fox", "owl", "bear", "wolf", "hare", "crow", "seal", "toad", "goat", "mole"),
    "wug": ("oak", "pine", "elm", "fern", "moss", "reed", "palm", "ivy", "rose", "lily"),
    "fep": ("hammer", "saw", "drill", "file", "wrench", "pliers", "axe", "chisel", "rake", "hoe"),
    "blick": ("bread", "rice", "soup", "cheese", "honey", "butter", "salt", "sugar", "tea", "milk"),
}


@dataclass(frozen=True)
class SharedContext:
    """A context and questions about it, in order."""

    tokens: list[int]
    questions: list[Question]


@dataclass(frozen=True)
class ContextMaker:
    """Makes contexts of every kind.

    Attributes:
        tokenizer: the model's.
        encode: returns the tokens of a text that begins a prompt.
        haystacks: real text.
        tokens: of a context, about.
        questions: per context.
    """

    tokenizer: Tokenizer
    encode: Callable[[str], list[int]]
    haystacks: Haystacks
    tokens: int
    questions: int

    def pairs(self, rng: random.Random, number: int) -> SharedContext:
        """Return pairs of keys and values, in JSON; a value is asked for by its key."""
        keys = (f"{first}-{second}-{i}" for i in range(10**6) for first, second in _two_words(rng))
        pairs: dict[str, str] = {}
        for key in keys:
            pairs[key] = f"{rng.randrange(1000, 10_000)}"
            if len(pairs) % 8 == 0 and len(self.encode(_json(pairs))) >= self.tokens:
                break
        asked = rng.sample(sorted(pairs), self.questions)
        return SharedContext(
            self.encode(_json(pairs)),
            [self._question(f'The value of "{key}": "', f'{pairs[key]}"') for key in asked],
        )

    def tracing(self, rng: random.Random, number: int) -> SharedContext:
        """Return chains of three variables among real lines; a chain's value is asked for."""
        hidden, questions = [], []
        for chain in names(self.questions, rng):
            first, second = chain.split()
            value = f"{rng.randrange(1000, 10_000)}"
            links = (
                f"{first} = {value}\n",
                f"{second} = {first}\n",
                f"{first}_{second} = {second}\n",
            )
            depths = sorted(rng.random() for _ in links)
            hidden += list(zip(depths, links, strict=True))
            questions.append(self._question(f"\nprint({first}_{second})  # prints", f" {value}"))
        return SharedContext(self.haystacks.hide(number, self.tokens, hidden), questions)

    def labels(self, rng: random.Random, number: int) -> SharedContext:
        """Return words with their classes' made-up labels; labels of new words are asked for."""
        every = [
            (f"{adjective} {noun}", label)
            for label, nouns in _CATEGORIES.items()
            for noun in nouns
            for adjective in WORDS[0]
        ]
        rng.shuffle(every)
        asked, shown = every[: self.questions], every[self.questions :]
        lines: list[str] = []
        while len(self.encode("".join(lines))) < self.tokens:
            lines += [
                f"{word} -> {label}\n" for word, label in shown[len(lines) % len(shown) :][:8]
            ]
        return SharedContext(
            self.encode("".join(lines)),
            [self._question(f"\n{word} ->", f" {label}") for word, label in asked],
        )

    def functions(self, rng: random.Random, number: int) -> SharedContext:
        """Return real source files; functions are asked for by their names."""
        text = "".join(self.haystacks.lines(number, self.tokens))
        found = [
            match for match in _FUNCTION.finditer(text) if text.count(match[1]) == 1
        ]  # another function of the name would make two answers right
        asked = rng.sample(found, min(self.questions, len(found)))
        return SharedContext(
            self.encode(text),
            [
                self._question(f"\n# once more:\n{one[1]}", one[2], _FUNCTION_TOKENS)
                for one in asked
            ],
        )

    def _question(self, asked: str, answer: str, most: int | None = None) -> Question:
        encode = self.tokenizer.encode_continuation
        return Question(tuple(encode(asked)), tuple(encode(answer)[:most]))


def shared_context_probes(maker: ContextMaker, *, contexts: int, seed: int) -> list[Probe]:
    """Return the probes of both modes.

    Args:
        maker: makes the contexts.
        contexts: of each kind.
        seed: of all random choices.
    """
    return list(_probes(maker, contexts, seed))


def _probes(maker: ContextMaker, contexts: int, seed: int) -> Iterator[Probe]:
    kinds = (maker.pairs, maker.tracing, maker.labels, maker.functions)
    for number in range(contexts):
        for make in kinds:
            kind = make.__name__
            shared = make(random.Random(f"{seed}/{kind}/{number}"), number)
            if not shared.questions:
                continue
            name = f"{kind}/{number}"
            yield turns_probe(f"turns/{name}", kind, shared.tokens, shared.questions)
            yield from request_probes(f"requests/{name}", kind, shared.tokens, shared.questions)


def _two_words(rng: random.Random) -> list[tuple[str, str]]:
    every = [(first, second) for first in WORDS[0] for second in WORDS[1]]
    rng.shuffle(every)
    return every


def _json(pairs: dict[str, str]) -> str:
    lines = "".join(f'    "{key}": "{value}",\n' for key, value in pairs.items())
    return f"{{\n{lines}}}\n"
