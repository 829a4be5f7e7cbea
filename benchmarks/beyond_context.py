"""Beyond the context: what rolling caches make of texts and answers that are longer than it is.

Texts are scored token by token. A method has its first tokens as a prompt, and rolls on over all
others, ``interval`` tokens at a time. Beside it stand full KV, as far as the context goes, and a
window that is computed anew every ``budget`` tokens, so that each token sees that many before it,
up to twice as many. All of them begin as the model's texts do: other first tokens make poor sinks.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, median
from typing import Annotated

import msgspec
import numpy as np
import typer

from benchmarks.report import publish
from midfill.arrays import Float32Array
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.evaluation.summary import estimate_mean
from midfill_lab.reporting import ResultTable

METHODS = ("streamingllm", "lacache")
FULL_KV, ANEW = "none", "window, anew"
_CHARACTERS_PER_TOKEN = 5  # at most, so that texts are long enough
_RANGE = 2048  # tokens, for scores and steps
_SCORES = EngineSamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)


class TextScores(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities of one text's tokens, means of each ``_RANGE`` tokens in nats.

    Attributes:
        method: what its tokens see.
        text: its number.
        scores: of each range; those that the method doesn't come to are missing.
    """

    method: str
    text: int
    scores: list[float]


class LongAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """One answer that outgrows the context.

    Attributes:
        method: its specification.
        step_seconds: medians of each ``_RANGE`` tokens.
        slots: that were held at most, in each of them.
    """

    method: str
    step_seconds: list[float]
    slots: list[int]


class BeyondContextReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    context: int
    budget: int
    texts: list[TextScores]
    answers: list[LongAnswer]


class Session:
    """A loaded model, of which one request at a time is asked."""

    def __init__(self, model: str, threads: int | None, slots_for: int) -> None:
        """Load a model with room for so many tokens."""
        folder = resolve_adapter(model, None)
        checkpoint = open_model(resolve(model), folder, "auto")
        config = checkpoint.config
        cell = 8 * config.layers * config.kv_heads * config.head_dim  # K and V of 32 bits at most
        options = ModelOptions(
            threads=threads,
            adapter=None if folder is None else str(folder),
            kv_memory=cell * slots_for,
            speculation=False,
            allow_methods=("any",),
        )
        self.engine: Engine
        self.engine, self._runner, info = load_engine(checkpoint, options)
        self.context, self._tokenizer = info.context, checkpoint.tokenizer
        self._begin = PromptEncoder(checkpoint, fim_format(checkpoint), info.context).raw_bos
        self._numbers = itertools.count()

    def close(self) -> None:
        """End the model's threads."""
        close = getattr(self._runner, "close", None)
        if close is not None:
            close()

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens."""
        return self.begun(self._tokenizer.encode(text))

    def begun(self, tokens: Sequence[int]) -> list[int]:
        """Return a text that goes on with these tokens."""
        return list(tokens) if self._begin is None else [self._begin, *tokens]

    def scores(self, tokens: Sequence[int], method: str, first: int) -> Float32Array:
        """Return the log-probabilities of all tokens but the first: float32 [len(tokens) - 1].

        Args:
            tokens: of a text.
            method: sees the ``first`` of them as a prompt.
            first: see above.
        """
        found: list[float] = []
        for _ in self._run(tokens, method, _SCORES, compress_after=first, into=found):
            pass
        return np.array(found, np.float32)

    def steps(self, prompt: Sequence[int], method: str, tokens: int) -> Iterator[float]:
        """Answer with so many tokens; yield the seconds of each step."""
        sampling = EngineSamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        return self._run(prompt, method, sampling)

    @property
    def held_slots(self) -> int:
        """Slots that are neither free nor evictable."""
        stats = self.engine.stats()
        return stats.slots_total - stats.slots_free - stats.slots_cached

    def _run(
        self,
        tokens: Sequence[int],
        method: str,
        sampling: EngineSamplingParams,
        compress_after: int | None = None,
        into: list[float] | None = None,
    ) -> Iterator[float]:
        self.engine.add(
            EngineRequest(
                request_id=str(next(self._numbers)),
                token_ids=list(tokens),
                sampling=sampling,
                method=method,
                compress_after=len(tokens) if compress_after is None else compress_after,
            )
        )
        while self.engine.has_work():
            started = time.perf_counter()
            for output in self.engine.step():
                if output.error is not None:
                    raise RuntimeError(output.error)
                if into is not None and output.prompt_logprobs:
                    into += [each.logprob for each in output.prompt_logprobs]
            yield time.perf_counter() - started


def measure_beyond_context(
    model: str,
    *,
    budget: int = 1024,
    length: int = 16384,
    texts: int = 8,
    answer: int = 20000,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> BeyondContextReport:
    """Score texts, and write answers, that are longer than the context.

    Args:
        model: its name or path.
        budget: tokens per layer that methods keep.
        length: tokens of a text.
        texts: how many.
        answer: tokens of an answer; 0 writes none.
        threads: of the kernels; None takes all.
        progress: receives what is being done.

    Raises:
        MidfillError: the model can't be found or loaded.
    """
    progress(f"loading {model}")
    session = Session(model, threads, max(length, answer + 2 * budget) + 1)
    found: list[TextScores] = []
    tokens: list[int] = []
    for number, tokens in enumerate(_long_texts(session.encode, length, texts)):
        for method in (FULL_KV, ANEW, *METHODS):
            progress(f"text {number + 1} of {texts}, {method}")
            scores = _text_scores(session, tokens, method, budget)
            found.append(TextScores(method=method, text=number, scores=_range_means(scores)))
    answers = []
    for method in METHODS if answer else ():
        progress(f"an answer of {answer:,} tokens, {method}")
        answers.append(_long_answer(session, tokens[:budget], f"{method}:budget=256", answer))
    session.close()
    return BeyondContextReport(
        model=model,
        machine=describe_machine(),
        context=session.context,
        budget=budget,
        texts=found,
        answers=answers,
    )


def _long_texts(encode: Callable[[str], list[int]], length: int, count: int) -> list[list[int]]:
    """Return texts of so many tokens, each of one file of the standard library."""
    characters = length * _CHARACTERS_PER_TOKEN
    documents = standard_library_documents(count, shortest=characters, longest=100 * characters)
    return [encode(document)[:length] for document in documents]


def _text_scores(session: Session, tokens: Sequence[int], method: str, budget: int) -> Float32Array:
    """Return the log-probabilities of all tokens but the first, as far as the method gets."""
    if method == FULL_KV:
        seen = tokens[: session.context - 1]
        return session.scores(seen, FULL_KV, len(seen))
    if method == ANEW:
        parts = [session.scores(tokens[: 2 * budget], FULL_KV, 2 * budget)]
        for start in range(budget, len(tokens) - budget, budget):
            window = session.begun(tokens[start : start + 2 * budget])
            parts.append(session.scores(window, FULL_KV, len(window))[-budget:])
        return np.concatenate(parts)
    return session.scores(tokens, f"{method}:budget={budget}", 2 * budget)


def _range_means(scores: Float32Array) -> list[float]:
    """Return the means of whole ranges; the first lacks its first token, the last may another."""
    ends = range(_RANGE, len(scores) + 3, _RANGE)
    return [float(scores[end - _RANGE : end].mean()) for end in ends]


def _long_answer(session: Session, prompt: Sequence[int], method: str, tokens: int) -> LongAnswer:
    seconds, slots = list[float](), list[int]()
    for each in session.steps(prompt, method, tokens):
        seconds.append(each)
        slots.append(session.held_slots)
    starts = range(len(seconds) - tokens, len(seconds) - _RANGE + 1, _RANGE)
    return LongAnswer(
        method=method,
        step_seconds=[median(seconds[start : start + _RANGE]) for start in starts],
        slots=[max(slots[start + 1 : start + _RANGE]) for start in starts],
    )


def scores_table(report: BeyondContextReport) -> ResultTable:
    """A row per method, a column per range of tokens."""
    rows = []
    for method in dict.fromkeys(each.method for each in report.texts):
        texts = [each for each in report.texts if each.method == method]
        row = {"method": method}
        for place in range(max(len(each.scores) for each in report.texts)):
            found = [each.scores[place] for each in texts if place < len(each.scores)]
            row[_range_name(place)] = _mean_cell(found) if found else "-"
        rows.append(row)
    count = len({each.text for each in report.texts})
    return ResultTable(
        title="Log-probability of code beyond the context",
        rows=rows,
        caption=f"{report.model}, context {report.context:,} tokens: nats per token, means of"
        f" {count} texts with 95% intervals over these, by tokens before them. Methods keep"
        f" {report.budget:,} tokens per layer; {ANEW}: the last {report.budget:,} to"
        f" {2 * report.budget:,} tokens alone, computed anew every {report.budget:,}.",
    )


def answers_table(report: BeyondContextReport) -> ResultTable:
    """A row per method, a column per range of tokens."""
    rows = []
    for each in report.answers:
        row = {"method": each.method}
        for place, (seconds, slots) in enumerate(zip(each.step_seconds, each.slots, strict=True)):
            row[_range_name(place)] = f"{1000 * seconds:.2f} ms, {slots}"
        rows.append(row)
    return ResultTable(
        title="Steps of an answer beyond the context",
        rows=rows,
        caption=f"{report.model}, one stream without drafts, by tokens of the answer: medians of"
        f" steps, and the most slots that were held. {report.machine}.",
    )


def _range_name(place: int) -> str:
    return f"{place * _RANGE / 1024:g}k to {(place + 1) * _RANGE / 1024:g}k"


def _mean_cell(values: Sequence[float]) -> str:
    mean = fmean(values)
    if len(values) < 2:
        return f"{mean:.3f}"
    found = estimate_mean(values, [str(number) for number in range(len(values))])
    return f"{mean:.3f} ± {max(found.high - mean, mean - found.low):.3f}"


def beyond_context(
    model: ModelArgument = None,
    budget: Annotated[int, typer.Option(min=64, help="Tokens per layer that methods keep.")] = 1024,
    length: Annotated[int, typer.Option(min=_RANGE, help="Tokens of a text.")] = 16384,
    texts: Annotated[int, typer.Option(min=1, help="Texts.")] = 8,
    answer: Annotated[int, typer.Option(min=0, help="Tokens of a long answer; 0: none.")] = 20480,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Score texts, and time answers, that are longer than the model's context."""
    with show_steps("loading") as progress:
        report = measure_beyond_context(
            model or DEFAULT_MODEL, budget=budget, length=length, texts=texts, answer=answer,
            threads=threads, progress=progress,
        )  # fmt: skip
    tables = [scores_table(report), *([answers_table(report)] if report.answers else [])]
    publish(report, *tables, section="beyond-context", json=json, docs=docs)
