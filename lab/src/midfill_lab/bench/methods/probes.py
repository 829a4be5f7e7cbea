"""Probe: a text with known answers, and how much of them a method leaves the model.

The known answers are in the text itself (teacher forcing), so one pass scores all of them: a
greedy answer would be the known one exactly where each of its tokens is the most likely. SCBench
appends the known answers between turns in the same way.

Needles are facts hidden in real source text, one alone or one among several like it. Shared
contexts are several questions about one context, in SCBench's two modes.

Source: Li et al., "SCBench: A KV Cache-Centric Analysis of Long-Context Methods", ICLR 2025,
arXiv 2412.10319. Kinds of its tasks, generated anew at the length that is asked for: string
retrieval (pairs, tracing), semantic retrieval (functions, after RepoQA) and global information
(labels, its many-shot task). Names are short words instead of UUIDs, which small models can't copy.
"""

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from midfill.arrays import Float32Array
from midfill.models.tokens.tokenizer import Tokenizer
from midfill_lab.bench.documents import unseen_documents
from midfill_lab.bench.methods.results import Score, Task
from midfill_lab.bench.methods.session import MethodSession
from midfill_lab.evaluation.holes import draw_holes
from midfill_lab.evaluation.problems import Problem
from midfill_lab.evaluation.source_files import SourceFile


@dataclass(frozen=True)
class Probe:
    """A text for the model.

    Attributes:
        name: unique in a run.
        task: what it measures.
        label: of rows that belong together: a needle's depth, a shared context's kind.
        tokens: the text.
        compress_after: how many of its first tokens the method sees and compresses.
        answers: start and end of each known answer in ``tokens``.
        group: of probes that are not independent: the file, or the shared context, that they are
            made of; the name where there is nothing else.
    """

    name: str
    task: Task
    label: str
    tokens: tuple[int, ...]
    compress_after: int
    answers: tuple[tuple[int, int], ...]
    group: str = ""


def score_probe(
    session: MethodSession, probe: Probe, method: str, full: Float32Array
) -> list[Score]:
    """Return the score of each of a probe's answers under a method.

    Args:
        session: the model.
        probe: the text.
        method: its specification.
        full: what ``read_probe`` returns for full KV.
    """
    return _scores(probe, read_probe(session, probe, method), full)


def read_probe(session: MethodSession, probe: Probe, method: str) -> Float32Array:
    """Return the distributions of all tokens from the first answer's first one on."""
    first = probe.answers[0][0]
    return session.log_likelihoods(probe.tokens, method, probe.compress_after, first)


def _scores(probe: Probe, found: Float32Array, full: Float32Array) -> list[Score]:
    first = probe.answers[0][0]
    scores = []
    for start, end in probe.answers:
        rows, expected = found[start - first : end - first], full[start - first : end - first]
        answer = np.array(probe.tokens[start:end])
        top = rows.argmax(axis=-1)
        divergence = (np.exp(expected) * (expected - rows)).sum(axis=-1)
        scores.append(
            Score(
                tokens=end - start,
                greedy=bool((top == answer).all()),
                logprob=float(rows[np.arange(len(answer)), answer].mean()),
                divergence=max(float(divergence.mean()), 0.0),
                agreement=float((top == expected.argmax(axis=-1)).mean()),
            )
        )
    return scores


@dataclass(frozen=True)
class Question:
    """What is asked about a context, and what is known to be right."""

    tokens: tuple[int, ...]
    answer: tuple[int, ...]


def served_probe(
    name: str,
    task: Task,
    label: str,
    context: Sequence[int],
    question: Question,
    group: str = "",
) -> Probe:
    """Return the probe of a prompt as it is served: the method sees the question, too."""
    asked = (*context, *question.tokens)
    answer = (len(asked), len(asked) + len(question.answer))
    return Probe(name, task, label, (*asked, *question.answer), len(asked), (answer,), group)


def turns_probe(
    name: str, label: str, context: Sequence[int], questions: Sequence[Question]
) -> Probe:
    """Return SCBench's multi-turn mode: the method sees the first question, the others follow."""
    tokens = [*context]
    answers = []
    for question in questions:
        tokens += question.tokens
        answers.append((len(tokens), len(tokens) + len(question.answer)))
        tokens += question.answer
    return Probe(name, "turns", label, tuple(tokens), answers[0][0], tuple(answers), name)


def request_probes(
    name: str, label: str, context: Sequence[int], questions: Sequence[Question]
) -> list[Probe]:
    """Return SCBench's multi-request mode: the method sees the context alone."""
    return [
        Probe(
            f"{name}/{number}",
            "requests",
            label,
            (*context, *question.tokens, *question.answer),
            len(context),
            (
                (
                    len(context) + len(question.tokens),
                    len(context) + len(question.tokens) + len(question.answer),
                ),
            ),
            name,
        )
        for number, question in enumerate(questions)
    ]


_DOCUMENTS = 40
_SHORTEST, _LONGEST = 9000, 20_000
"""Characters of a file: long enough that few are needed for a context."""


class Haystacks:
    """Contexts of real source lines, made with a model's tokenizer.

    Attributes:
        source: where the files come from.
        texts: of the files.
    """

    def __init__(self, encode: Callable[[str], list[int]], seed: int) -> None:
        """Read the files.

        Args:
            encode: returns the tokens of a text that begins a prompt.
            seed: chooses them.

        Raises:
            MidfillError: too few are installed.
        """
        documents = unseen_documents(_DOCUMENTS, seed=seed, shortest=_SHORTEST, longest=_LONGEST)
        self.source = documents.source
        self.texts = documents.texts
        self._encode = encode

    def document(self, number: int) -> list[int]:
        """Return the tokens of one file."""
        return self._encode(self.texts[number % len(self.texts)])

    def file(self, number: int) -> str:
        """Return what a file is called: its number among the files."""
        return f"{number % len(self.texts)}"

    def text(self, number: int) -> str:
        """Return one file."""
        return self.texts[number % len(self.texts)]

    def lines(self, number: int, tokens: int) -> list[str]:
        """Return whole lines of so many tokens or a few fewer, from files in order.

        Args:
            number: of the first file.
            tokens: of all lines together.
        """
        lines: list[str] = []
        while len(self._encode("".join(lines))) < tokens:
            lines += self.text(number).rstrip("\n").splitlines(keepends=True)
            lines[-1] += "\n"
            number += 1
        few, many = 0, len(lines)
        while many - few > 1:  # lines[:few] fit
            middle = (few + many) // 2
            if len(self._encode("".join(lines[:middle]))) <= tokens:
                few = middle
            else:
                many = middle
        return lines[:few]

    def hide(self, number: int, tokens: int, hidden: Sequence[tuple[float, str]]) -> list[int]:
        """Return a context of real lines with some others between them.

        Args:
            number: of the first file.
            tokens: of the whole context, which has a few fewer.
            hidden: (depth from 0 to 1, line) of each.
        """
        taken = sum(len(self._encode(line)) for _, line in hidden)
        lines = self.lines(number, tokens - taken)
        for depth, line in sorted(hidden, reverse=True):
            lines.insert(round(depth * len(lines)), line)
        return self._encode("".join(lines))


def draw_lines(texts: Sequence[str], count: int) -> list[Problem]:
    """Return rests of lines that are missing in texts, as the evaluation draws them."""
    files = [SourceFile(f"{number}.py", text) for number, text in enumerate(texts)]
    return draw_holes(files, "line", count, seed=0)


WORDS = (
    ("amber", "brisk", "calm", "dusty", "early", "faint", "grand", "hollow", "ivory", "jolly"),
    ("anchor", "beacon", "candle", "dragon", "engine", "falcon", "garden", "harbor", "island"),
)


def names(count: int, rng: random.Random) -> list[str]:
    """Return different names of two words, such as "amber falcon"."""
    every = [f"{first} {second}" for first in WORDS[0] for second in WORDS[1]]
    return rng.sample(every, count)


_OTHERS: Mapping[Task, int] = {"needle": 0, "multi-key": 3}
"""Needles beside the one that is asked for."""


def needle_probes(
    tokenizer: Tokenizer,
    haystacks: Haystacks,
    *,
    tokens: int,
    depths: tuple[float, ...],
    repeats: int,
    seed: int,
) -> list[Probe]:
    """Return probes with one needle and with several, at each depth.

    Args:
        tokenizer: the model's.
        haystacks: real text.
        tokens: of each context.
        depths: where the needle that is asked for is, from 0 (the beginning) to 1.
        repeats: probes per depth and kind.
        seed: of all random choices.
    """
    probes = []
    for repeat in range(repeats):
        for place, depth in enumerate(depths):
            for task, others in _OTHERS.items():
                rng = random.Random(f"{seed}/{task}/{repeat}/{depth}")
                number = repeat * len(depths) + place
                probes.append(
                    _probe(tokenizer, haystacks, tokens, depth, task, others, number, rng)
                )
    return probes


def _probe(
    tokenizer: Tokenizer,
    haystacks: Haystacks,
    tokens: int,
    depth: float,
    task: Task,
    others: int,
    number: int,
    rng: random.Random,
) -> Probe:
    name, *rest = names(1 + others, rng)
    codes = [f"{code}" for code in rng.sample(range(1000, 10_000), 1 + others)]
    hidden = [(depth, _needle(name, codes[0]))]
    hidden += [(rng.random(), _needle(*pair)) for pair in zip(rest, codes[1:], strict=True)]
    context = haystacks.hide(number, tokens, hidden)
    question = Question(
        tuple(tokenizer.encode_continuation(f"\n# The pass code of the {name} is")),
        tuple(tokenizer.encode_continuation(f" {codes[0]}")),
    )
    return served_probe(
        f"{task}/{depth:g}/{number}", task, f"{depth:g}", context, question, haystacks.file(number)
    )


def _needle(name: str, code: str) -> str:
    return f"# The pass code of the {name} is {code}.\n"


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
                self._question(f"\n# once more:\n{match[1]}", match[2], _FUNCTION_TOKENS)
                for match in asked
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
