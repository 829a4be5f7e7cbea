"""Typed over: what an answer takes whose beginning the last one proposed, and its user typed.

The rest of the last answer is drafted then. Each request is answered twice from the same cache, in
random order: with what is predicted of it, and with drafts from its own text alone.
"""

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Sequence
from statistics import fmean, median
from typing import Annotated, NamedTuple

import msgspec
import typer

from benchmarks.compare.ratios import MIN_PAIRS, estimate_ratio
from benchmarks.report import publish
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.engine import Engine
from midfill.engine.loading import load_engine
from midfill.frontend.prompt import Prompt, PromptAnswer
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.frontend.sampling import SamplingParams
from midfill.infill.request import InfillRequest
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.models.tokens.tokenizer import Tokenizer
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.documents import standard_library_documents
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

TYPED = (0, 1, 2, 4, 8)
"""Characters of the last answer that were typed."""
_ANSWER = SamplingParams(temperature=0.0, max_tokens=48)
_HOLE = 60  # characters that are missing at the caret
_DOCUMENTS = 100
_ATTEMPTS = 5  # per hole: many an answer is too short
_KV_MEMORY = 512 << 20


class TypedOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What requests took, one item each.

    Attributes:
        typed: characters of the last answer that stand before the caret.
        same: whether the answer is the rest of the last one.
        tokens: of the answer.
        seconds, steps: with what was predicted.
        plain_seconds, plain_steps: without.
    """

    typed: int
    same: list[bool] = []
    tokens: list[int] = []
    seconds: list[float] = []
    steps: list[int] = []
    plain_seconds: list[float] = []
    plain_steps: list[int] = []


class TypedOverReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    holes: int
    outcomes: list[TypedOutcome]


class Answered(NamedTuple):
    """An answer with what it took."""

    token_ids: list[int]
    seconds: float
    steps: int


def measure_typed_over(
    model: str,
    *,
    holes: int = 100,
    threads: int | None = None,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> TypedOverReport:
    """Ask at holes in files of the standard library, type, and ask again.

    Args:
        model: its name or path.
        holes: at which an answer has as many characters as are typed at most, and one more.
        threads: of the kernels; None takes all.
        seed: of all random choices.
        progress: receives what is being done.

    Raises:
        MidfillError: the model can't be found or loaded.
    """
    progress(f"loading {model}")
    options = ModelOptions(threads=threads, kv_memory=_KV_MEMORY)
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), options.weights)
    engine, runner, info = load_engine(checkpoint, options)
    encoder = PromptEncoder(checkpoint, fim_format(checkpoint), info.context)
    session = TypingSession(engine, encoder, checkpoint.tokenizer, random.Random(seed))
    outcomes = [TypedOutcome(typed=count) for count in TYPED]
    done = 0
    texts = itertools.cycle(standard_library_documents(_DOCUMENTS, seed=seed))
    for text in itertools.islice(texts, _ATTEMPTS * holes):
        if done == holes:
            break
        progress(f"hole {done + 1} of {holes}")
        done += session.type_over(text, outcomes)
    close = getattr(runner, "close", None)
    if close is not None:
        close()
    return TypedOverReport(model=model, machine=describe_machine(), holes=done, outcomes=outcomes)


class TypingSession:
    """Asks an engine, and types what it answers."""

    def __init__(
        self,
        engine: Engine,
        encoder: PromptEncoder,
        tokenizer: Tokenizer,
        chance: random.Random,
    ) -> None:
        self._engine = engine
        self._encoder = encoder
        self._tokenizer = tokenizer
        self._chance = chance
        self._asked = 0

    def type_over(self, text: str, outcomes: Sequence[TypedOutcome]) -> bool:
        """Ask at a hole in a text, then with more and more of the answer typed.

        Args:
            text: of a document.
            outcomes: what is measured is added to them.

        Returns:
            Whether the answer is long enough.
        """
        caret = self._chance.randrange(len(text) // 4, len(text) // 2)
        prefix, suffix = text[:caret], text[caret + _HOLE :]
        first = self._prompt(prefix, suffix)
        answered = self._answer(first)
        self._encoder.record_answers([PromptAnswer(first, answered.token_ids)])
        written = self._text(first, answered)
        if len(written) <= max(TYPED):
            return False
        for outcome in outcomes:
            prompt = self._prompt(prefix + written[: outcome.typed], suffix)
            self._answer(prompt, _ANSWER_OF_ONE)  # the prompt is cached from here on
            plain = dataclasses.replace(prompt, prediction=())
            asked = [prompt, plain]
            self._chance.shuffle(asked)
            found = {id(each): self._answer(each) for each in asked}
            with_it, without = found[id(prompt)], found[id(plain)]
            assert with_it.token_ids == without.token_ids
            outcome.same.append(self._text(prompt, with_it) == written[outcome.typed :])
            outcome.tokens.append(len(with_it.token_ids))
            outcome.seconds.append(with_it.seconds)
            outcome.steps.append(with_it.steps)
            outcome.plain_seconds.append(without.seconds)
            outcome.plain_steps.append(without.steps)
        return True

    def _prompt(self, prefix: str, suffix: str) -> Prompt:
        return self._encoder.infill(InfillRequest(prefix=prefix, suffix=suffix))

    def _text(self, prompt: Prompt, answered: Answered) -> str:
        """Return what an answer writes after the caret."""
        written = b"".join(map(self._tokenizer.token_bytes, answered.token_ids))
        return written[len(prompt.begins_with) :].decode(errors="ignore")

    def _answer(self, prompt: Prompt, sampling: SamplingParams = _ANSWER) -> Answered:
        self._asked += 1
        request = prompt.request(str(self._asked), sampling)
        token_ids, steps = list[int](), 0
        started = time.perf_counter()
        self._engine.add(request)
        while self._engine.has_work():
            steps += 1
            for output in self._engine.step():
                token_ids += output.token_ids
        return Answered(token_ids, time.perf_counter() - started, steps)


_ANSWER_OF_ONE = msgspec.structs.replace(_ANSWER, max_tokens=1)


def typed_over_table(report: TypedOverReport) -> ResultTable:
    """A row per number of typed characters."""
    rows = []
    for each in report.outcomes:
        ratios = [
            plain / seconds for plain, seconds in zip(each.plain_seconds, each.seconds, strict=True)
        ]
        found = estimate_ratio(ratios)
        all_of_it = sum(each.plain_seconds) / sum(each.seconds)
        rows.append(
            {
                "typed": str(each.typed),
                "the rest again": f"{fmean(each.same):.0%}",
                "tokens": f"{fmean(each.tokens):.1f}",
                "steps": f"{fmean(each.plain_steps):.1f}",
                "steps, predicted": f"{fmean(each.steps):.1f}",
                "ms": f"{1000 * median(each.plain_seconds):.1f}",
                "ms, predicted": f"{1000 * median(each.seconds):.1f}",
                "times as fast": f"{found[0]:.2f} [{found[1]:.2f}, {found[2]:.2f}]",
                "all answers": f"{all_of_it:.2f}",
            }
        )
    return ResultTable(
        title="Answers whose beginning was typed",
        rows=rows,
        caption=f"{report.model}, greedy answers of at most {_ANSWER.max_tokens} tokens at"
        f" {report.holes} carets in files of the standard library; typed: characters of the last"
        " answer. Tokens and steps: means; milliseconds: medians, prompts cached, all tokens;"
        " times as fast: the median of each answer's ratio with its 95% interval, and of all"
        f" answers together. Both draft from the prompt's own text, too. {report.machine}.",
    )


def typed_over(
    model: ModelArgument = None,
    holes: Annotated[
        int, typer.Option(min=MIN_PAIRS, help="Carets at which answers are asked.")
    ] = 100,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure answers whose beginning was typed, the rest of the last one drafted or not."""
    with show_steps("loading") as progress:
        report = measure_typed_over(
            model or DEFAULT_MODEL, holes=holes, threads=threads, progress=progress
        )
    publish(report, typed_over_table(report), section="typed-over", json=json, docs=docs)
