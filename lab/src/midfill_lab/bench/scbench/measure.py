"""A run: every method on the same shared contexts, in both modes, beside full KV."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from statistics import fmean

import numpy as np

from midfill.arrays import Float32Array
from midfill.errors import OptionError
from midfill.methods.registry import METHODS, parse_name, split_methods
from midfill.system.machine import describe_machine
from midfill_lab.bench.methods.results import FULL, Variant
from midfill_lab.bench.scbench.packages import read_packages
from midfill_lab.bench.scbench.results import (
    MODES,
    REUSES,
    Key,
    Mode,
    ResultFile,
    Reuse,
    Row,
    SCBenchOptions,
    SCBenchReport,
)
from midfill_lab.bench.scbench.samples import Exchange, Sample, SampleMaker
from midfill_lab.bench.scbench.scoring import score_answer
from midfill_lab.bench.scbench.session import Asked, Generated, SharedContextSession
from midfill_lab.bench.scbench.tasks import TASKS

_FEWEST_FILES, _TOKENS_PER_FILE = 120, 20
_PARTS = 4
"""Parts of a context that methods of reuse know from elsewhere."""

Progress = Callable[[str], None]


def measure_scbench(
    model: str,
    variants: Sequence[Variant],
    options: SCBenchOptions,
    *,
    results: ResultFile,
    threads: int | None = None,
    progress: Progress = lambda _: None,
) -> SCBenchReport:
    """Measure what ``results`` lacks.

    Args:
        model: name or path.
        variants: methods at budgets; full KV is measured beside them.
        options: what is measured.
        results: what is known, and where further rows go.
        threads: that the model runs on; None is one per core.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be loaded, or a length doesn't fit it.
    """
    progress(f"loading {model}")
    session = SharedContextSession(model, threads)
    try:
        for length in options.lengths:
            if length > session.info.context:
                raise OptionError(
                    f"--length {length} is beyond the {session.info.context} tokens that {model}"
                    " can be served with"
                )
        refused = {
            variant.specification: reason
            for variant in variants
            if (reason := session.refusal(variant.specification)) is not None
        }
        methods = [
            variant.specification for variant in variants if variant.specification not in refused
        ]
        texts = read_packages(options.seed, _files(options))
        makers = [
            SampleMaker(
                session.encode,
                session.tokenizer.encode_continuation,
                texts,
                length,
                options.turns,
                options.seed,
            )
            for length in options.lengths
        ]
        rows = list(_run(session, methods, options, makers, results, progress))
    finally:
        session.close()
    return SCBenchReport(
        machine=describe_machine(),
        options=options,
        model=model,
        backend=session.info.backend,
        text=texts.source,
        variants=list(variants),
        refused=refused,
        rows=rows,
    )


def _files(options: SCBenchOptions) -> int:
    """Return how many files of packages have text enough for the longest contexts."""
    return max(_FEWEST_FILES, max(options.lengths) // _TOKENS_PER_FILE)


def _run(
    session: SharedContextSession,
    methods: Sequence[str],
    options: SCBenchOptions,
    makers: Sequence[SampleMaker],
    results: ResultFile,
    progress: Progress,
) -> Iterator[Row]:
    """Yield all rows; contexts of all tasks take turns, so that a part of a run shows them all."""
    total = options.contexts * len(makers) * len(options.tasks)
    done, measured, started = 0, 0, time.monotonic()
    for number in range(options.contexts):
        for maker in makers:
            for task in options.tasks:
                sample = maker.make(task, TASKS[task].draft, number)
                run = SampleRun(session, sample, maker.length, methods, results)
                left = ""
                if measured:
                    seconds = (time.monotonic() - started) / measured * (total - done)
                    left = f", about {seconds / 60:.0f} min left"
                progress(f"{task}, {maker.length:,} tokens, context {done + 1} of {total}{left}")
                if run.lacks:
                    run.measure()
                    measured += 1
                done += 1
                yield from run.rows()


@dataclass(frozen=True)
class Question:
    """A question as it is asked of a method.

    Attributes:
        mode, reuse, turn: see ``results``.
        tokens: the prompt.
        compress_after: how many of them the method sees.
        exchange: the question and its right answer.
    """

    mode: Mode
    reuse: Reuse
    turn: int
    tokens: tuple[int, ...]
    compress_after: int
    exchange: Exchange


def ask(sample: Sample, mode: Mode, reuse: Reuse) -> list[Question]:
    """Return a sample's questions in order.

    Under "held", a method sees the first question in turns, and the context alone in requests.
    """
    questions = []
    for turn, exchange in enumerate(sample.exchanges):
        tokens = sample.asked_in_turn(turn) if mode == "turns" else sample.asked_alone(turn)
        seen = len(tokens)
        if reuse == "held":
            seen = len(sample.asked_in_turn(0) if mode == "turns" else sample.context)
        questions.append(Question(mode, reuse, turn, tuple(tokens), seen, exchange))
    return questions


def reuses_of(method: str) -> tuple[Reuse, ...]:
    """Return what later questions can find under a method.

    What it has kept can be held where it compresses a given part of the prompt. Methods that take
    KV from elsewhere or drop rows act on prompts as they come. Full KV is the same under both.
    """
    kinds = {METHODS[parse_name(name)].kind for name in split_methods(method)}
    return REUSES if kinds and kinds <= {"evict", "quantize", "prefill"} else ("anew",)


@dataclass
class SampleRun:
    """One sample under all methods.

    Attributes:
        session: the model.
        sample: the context with its questions.
        length: tokens that were asked for.
        methods: specifications, without full KV's.
        results: what is known, and where rows go.
    """

    session: SharedContextSession
    sample: Sample
    length: int
    methods: Sequence[str]
    results: ResultFile
    _full: dict[tuple[int, ...], Float32Array] = field(default_factory=dict)
    _read: dict[tuple[str, tuple[int, ...], int], tuple[float, float]] = field(default_factory=dict)

    @property
    def lacks(self) -> bool:
        """Whether a row is yet to be measured."""
        return any(self._missing(method) for method in (FULL, *self.methods))

    def rows(self) -> Iterator[Row]:
        """Yield the rows; all are known."""
        for method in (FULL, *self.methods):
            for question in self._questions(method):
                row = self.results.find(self._key(method, question))
                assert row is not None
                yield row

    def measure(self) -> None:
        """Measure what is missing.

        The first question is answered by one method after the other, full KV first: it has the
        context computed, and what a method holds is counted. Later ones are answered in batches.
        """
        missing = {method: self._missing(method) for method in (FULL, *self.methods)}
        for method, questions in missing.items():
            if questions and self._takes_parts(method):
                self._show_parts(method)
        for mode in MODES:
            for turn in range(len(self.sample.exchanges)):
                pairs = [
                    (method, question)
                    for method, questions in missing.items()
                    for question in questions
                    if question.mode == mode and question.turn == turn
                ]
                is_first = mode == MODES[0] and turn == 0
                for batch in [[pair] for pair in pairs] if is_first else [pairs]:
                    self._answer(batch)

    def _show_parts(self, method: str) -> None:
        """Have a method compute the context's parts in another order, and a question's first token.

        What a method keeps of a part beside its KV, it keeps where it computes it.
        """
        parts = [self.sample.context[a:b] for a, b in pairwise(self._bounds)][::-1]
        bounds = [0, *accumulate(map(len, parts))]
        first = self._questions(method)[0].tokens[len(self.sample.context)]
        tokens = [*(token for part in parts for token in part), first]
        self.session.cache(tokens, method, self._tenant(method), bounds)

    def _answer(self, pairs: Sequence[tuple[str, Question]]) -> None:
        """Have a batch of (method, question) answered, and note the rows."""
        answers = self.session.generate([self._asked(*pair) for pair in pairs])
        full = next((a for (m, _), a in zip(pairs, answers, strict=True) if m == FULL), None)
        rows = []
        for (method, question), answer in zip(pairs, answers, strict=True):
            known = self.results.find(self._key(FULL, question))
            if known is not None:
                expected = known.answer
            else:
                assert full is not None
                expected = trim_answer(full.text, question.exchange.turn.paragraph)
            rows.append(self._row(method, question, answer, expected))
        self.results.add(rows)

    def _tenant(self, method: str) -> str:
        """Return whose cache a method's requests share.

        Methods find the exact KV that full KV has computed. One that takes KV from elsewhere finds
        the context's parts in another order, and nothing exact.
        """
        return f"{self.sample.digest} {method if self._takes_parts(method) else ''}"

    def _asked(self, method: str, question: Question) -> Asked:
        exchange = question.exchange
        return Asked(
            question.tokens,
            method,
            exchange.limit,
            self._tenant(method),
            compress_after=question.compress_after,
            contexts=tuple(self._bounds) if self._takes_parts(method) else (),
            ends=_ends_paragraph if exchange.turn.paragraph else _ends_line,
        )

    def _row(self, method: str, question: Question, found: Generated, expected: str) -> Row:
        turn = question.exchange.turn
        answer = trim_answer(found.text, turn.paragraph)
        logprob, divergence = self._likelihood(method, question)
        return Row(
            **self._key(method, question)._asdict(),
            task=self.sample.task,
            length=self.length,
            number=self.sample.number,
            prompt_tokens=len(question.tokens),
            cached_tokens=found.cached_tokens,
            reused_tokens=found.reused_tokens,
            held_slots=found.held_slots,
            answer=answer,
            score=score_answer(turn.metric, answer, turn.accepted, turn.others),
            same=answer == expected,
            logprob=logprob,
            divergence=divergence,
            guess=self._guess(question.turn),
        )

    def _guess(self, asked: int) -> float:
        """Return the mean score of the right answers to other questions of its kind."""
        turn = self.sample.exchanges[asked].turn
        others = [
            each.turn.gold.strip()
            for number, each in enumerate(self.sample.exchanges)
            if number != asked and each.turn.metric == turn.metric
        ]
        scores = [score_answer(turn.metric, gold, turn.accepted, turn.others) for gold in others]
        return fmean(scores) if scores else 0.0

    def _likelihood(self, method: str, question: Question) -> tuple[float | None, float | None]:
        """Return the right answer's log-probability, and the divergence from full KV's.

        Both are of one pass that reads the right answer; None where a method leaves none.
        """
        if method != FULL and reuses_of(method) != REUSES:
            return None, None
        answer = question.exchange.answer
        tokens = (*question.tokens, *answer)
        asked = (method, tokens, question.compress_after)
        if asked not in self._read:  # a first turn is the same under both reuses
            if tokens not in self._full:
                self._full[tokens] = self._distributions(FULL, question)
            expected = self._full[tokens]
            rows = expected if method == FULL else self._distributions(method, question)
            divergence = (np.exp(expected) * (expected - rows)).sum(axis=-1)
            logprob = rows[np.arange(len(answer)), np.array(answer)].mean()
            self._read[asked] = float(logprob), max(float(divergence.mean()), 0.0)
        return self._read[asked]

    def _distributions(self, method: str, question: Question) -> Float32Array:
        """Return log-probabilities [answer, vocab] while the right answer is read."""
        tokens = (*question.tokens, *question.exchange.answer)
        self.session.tenant = self._tenant(method)
        return self.session.log_likelihoods(
            tokens, method, question.compress_after, len(question.tokens)
        )

    def _missing(self, method: str) -> list[Question]:
        return [
            question
            for question in self._questions(method)
            if self.results.find(self._key(method, question)) is None
        ]

    def _questions(self, method: str) -> list[Question]:
        return [
            question
            for mode in MODES
            for reuse in reuses_of(method)
            for question in ask(self.sample, mode, reuse)
        ]

    def _key(self, method: str, question: Question) -> Key:
        reuse: Reuse = "anew" if method == FULL else question.reuse
        return Key(
            self.session.fingerprint,
            self.sample.digest,
            question.mode,
            reuse,
            question.turn,
            method,
        )

    @property
    def _bounds(self) -> list[int]:
        """Numbers of the first token of each part of the context, and of what follows them."""
        count = len(self.sample.context)
        return [round(count * part / _PARTS) for part in range(_PARTS + 1)]

    @staticmethod
    def _takes_parts(method: str) -> bool:
        return any(METHODS[parse_name(name)].kind == "reuse" for name in split_methods(method))


def _ends_line(text: str) -> bool:
    return "\n" in text.lstrip()


def _ends_paragraph(text: str) -> bool:
    return "\n\n" in text.lstrip()


def trim_answer(text: str, paragraph: bool) -> str:
    """Return an answer up to the end of its first line or paragraph."""
    return text.strip("\n").partition("\n\n" if paragraph else "\n")[0]
