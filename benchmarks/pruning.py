"""Methods that drop rows between layers: time to the first token, work, and the answers.

Every method answers the same prompts, real source text with a needle in it or cut at some line.
The known answer's tokens are forced one by one, whatever the method finds more likely: log
probabilities are of the same tokens under every method, and the rows that are revived while
decoding count, too. Beside each method stand the same shares of random tokens, and the same tokens
without revival.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean, median
from typing import Annotated, cast

import msgspec
import numpy as np
import typer

from benchmarks.counting_runner import CountingRunner
from benchmarks.cpu_model import open_cpu_model
from benchmarks.report import publish
from midfill.arrays import Float32Array, Int64Array
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.loading import scheduler_policy
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams
from midfill.errors import GenerationError, InvalidRequestError
from midfill.methods.method import Method
from midfill.methods.rows.lazyllm import LazyLLM
from midfill.methods.rows.uncomp_stage import UNCompStage
from midfill.methods.served_model import ServedModel
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.model_record import raw_bos_of
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.models.checkpoints.opening import model_digest
from midfill.models.config import ModelConfig
from midfill.runners.cpu.runner import CpuRunner
from midfill.runners.forward.batch import ForwardBatch
from midfill.runners.forward.logits import log_softmax
from midfill.runners.forward.runner import Runner
from midfill.system.machine import Machine, describe_machine
from midfill_lab.bench.methods.probes import Haystacks, names
from midfill_lab.cli.bench.options import (
    JsonOption,
)
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.evaluation.report import estimate_cell, figure_cell
from midfill_lab.evaluation.summary import estimate_difference, estimate_mean, estimate_share
from midfill_lab.reporting import ResultTable

KEEP = (0.7, 0.5, 0.3)
STAGES = (0.4, 0.2)
DENSE = "all rows"
_GOLD_CHARACTERS = 48
_DEPTHS = (0.1, 0.4, 0.7)


@dataclass(frozen=True)
class RandomTokens:
    """Implements ``PruningMethod``: as many tokens as another method keeps, at random.

    Attributes:
        other: the other method.
        seed: of the choice.
        sinks: first tokens, which stay: a choice without them loses for that reason alone.
    """

    other: LazyLLM
    seed: int = 0
    sinks: int = 4

    @property
    def scoring_rows(self) -> int:
        return self.other.scoring_rows

    @property
    def revives(self) -> bool:
        return self.other.revives

    def pruning_layers(self, config: ModelConfig) -> tuple[int, ...]:
        return self.other.pruning_layers(config)

    def select(self, place: int, scores: Float32Array, prompt: int) -> Int64Array:
        rng = np.random.default_rng([self.seed, place, len(scores)])
        drawn = rng.random(len(scores), np.float32)
        drawn[: self.sinks] = 1.0
        return self.other.select(place, drawn, prompt)


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt and the text that is known to follow it.

    Attributes:
        task: "needle" or "code".
        tokens: of the prompt.
        gold: tokens of the text.
        file: number of the file that the prompt begins with.
    """

    task: str
    tokens: list[int]
    gold: list[int]
    file: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What one method made of one probe.

    Attributes:
        ttft: seconds to the first token.
        processor: processor seconds meanwhile.
        rows: rows that ran meanwhile, per layer.
        key_pairs: pairs of a row and a key meanwhile, all layers together.
        token_seconds: seconds per token after the first.
        kl: of the first token's distribution from that of all rows, in nats.
        gold: mean log-probability of the known text's tokens, in nats.
        found: whether each of them was the most likely.
    """

    ttft: float
    processor: float
    rows: list[int]
    key_pairs: int
    token_seconds: float
    kl: float
    gold: float
    found: bool


class VariantAnswers(msgspec.Struct, frozen=True, kw_only=True):
    """One method's answers, in the order of the probes."""

    name: str
    answers: list[Answer]


def variants(served: ServedModel) -> dict[str, Method | None]:
    """Return what is measured, by name; the first keeps all rows.

    A method that isn't calibrated for the model is left out.
    """
    found: dict[str, Method | None] = {DENSE: None}
    for share in KEEP:
        lazy = LazyLLM(keep=f"{share:g}")
        found[f"lazyllm:keep={share:g}"] = lazy
        found[f"lazyllm:keep={share:g},revive=0"] = LazyLLM(keep=f"{share:g}", revive=0)
        found[f"random {share:g}"] = cast(Method, RandomTokens(lazy))
    with suppress(InvalidRequestError):
        for least in STAGES:
            found[f"uncomp-stage:least={least:g}"] = UNCompStage(least=least).for_model(served)
    return found


class PruningReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    load: float
    threads: int
    text: str
    tokens: int
    tasks: list[str]
    files: list[int]
    variants: list[VariantAnswers]


def measure_pruning(
    model: str,
    *,
    tokens: int = 4000,
    repeats: int = 14,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> PruningReport:
    """Load ``model`` on the CPU kernels, and have every method answer every probe in turn.

    Args:
        model: name or path.
        tokens: of each prompt, about.
        repeats: probes of each kind and depth.
        threads: that the model runs on; None is one per core.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    with open_cpu_model(model, threads, progress) as loaded:
        runner = loaded.runner
        checkpoint = loaded.checkpoint
        served = ServedModel(config=checkpoint.config, digest=model_digest(checkpoint))
        methods = variants(served)
        bench = _Bench(checkpoint, runner, methods, tokens)
        haystacks = Haystacks(bench.encode, seed=0)
        probes = _probes(checkpoint, haystacks, bench.encode, tokens, repeats)
        answers: dict[str, list[Answer]] = {name: [] for name in methods}
        bench.answer(probes[0], DENSE, None)  # warms up
        for number, probe in enumerate(probes, 1):
            exact: Float32Array | None = None
            for name in methods:
                progress(f"probe {number} of {len(probes)}: {name}")
                answer, logits = bench.answer(probe, name, exact)
                exact = logits if exact is None else exact
                answers[name].append(answer)
        return PruningReport(
            model=model,
            machine=describe_machine(),
            load=loaded.load,
            threads=runner.threads,
            text=haystacks.source,
            tokens=tokens,
            tasks=[probe.task for probe in probes],
            files=[probe.file for probe in probes],
            variants=[VariantAnswers(name=name, answers=found) for name, found in answers.items()],
        )


def _probes(
    checkpoint: Checkpoint,
    haystacks: Haystacks,
    encode: Callable[[str], list[int]],
    tokens: int,
    repeats: int,
) -> list[Probe]:
    """Return needles at each depth, and as many beginnings of code."""
    continuation = checkpoint.tokenizer.encode_continuation
    probes = []
    for number in range(repeats * len(_DEPTHS)):
        rng = random.Random(number)
        (name,), code = names(1, rng), str(rng.randrange(1000, 10_000))
        needle = (_DEPTHS[number % len(_DEPTHS)], f"# The pass code of the {name} is {code}.\n")
        question = continuation(f"\n# The pass code of the {name} is")
        context = haystacks.hide(number, tokens - len(question), [needle])
        asked, gold = [*context, *question], continuation(f" {code}.")
        probes.append(Probe(task="needle", tokens=asked, gold=gold, file=number))
        text = "".join(haystacks.lines(number, tokens + _GOLD_CHARACTERS))
        begin = _cut(text, encode, tokens)
        gold = continuation(text[begin : begin + _GOLD_CHARACTERS])
        probes.append(Probe(task="code", tokens=encode(text[:begin]), gold=gold, file=number))
    return probes


def _cut(text: str, encode: Callable[[str], list[int]], tokens: int) -> int:
    """Return where the last line begins whose text before it has at most so many tokens."""
    few, many = 0, len(text) - _GOLD_CHARACTERS
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (middle, many) if len(encode(text[:middle])) <= tokens else (few, middle)
    return text.rfind("\n", 0, few) + 1


class _Bench:
    """Answers probes one at a time, each with a cache of its own, so that none is cached."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        runner: CpuRunner,
        methods: dict[str, Method | None],
        tokens: int,
    ) -> None:
        self._tokenizer, self._bos = checkpoint.tokenizer, raw_bos_of(checkpoint)
        self._tap = _Tap(runner)
        options = ModelOptions(token_budget=tokens + 512)  # a prompt is one step
        self._engine = Engine(
            cast(Runner, self._tap),
            (),
            EngineOptions(),
            policy=scheduler_policy(options, runner.config.layers),
            token_bytes=checkpoint.tokenizer.token_bytes,
            find_method=methods.__getitem__,
        )
        self._asked = 0

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that begins a prompt, as the server begins raw prompts."""
        tokens = self._tokenizer.encode(text)
        return tokens if self._bos is None else [self._bos, *tokens]

    def answer(
        self, probe: Probe, method: str, exact: Float32Array | None
    ) -> tuple[Answer, Float32Array]:
        """Return a method's answer and the log-probabilities of its first token.

        Args:
            probe: what is asked.
            method: its name.
            exact: the log-probabilities of the first token with all rows; None if these are asked
                for.
        """
        self._asked += 1
        name = f"{self._asked}"
        sampling = EngineSamplingParams(
            temperature=0.0, max_tokens=len(probe.gold), ignore_eos=True
        )
        request = EngineRequest(
            request_id=name, tenant=name, token_ids=probe.tokens, sampling=sampling, method=method
        )
        self._tap.restart()
        self._tap.force(probe.gold)
        started, used = time.perf_counter(), time.process_time()
        self._engine.add(request)
        outputs: list[EngineOutput] = []
        while not outputs:
            outputs += _checked(self._engine.step())
        ttft, processor = time.perf_counter() - started, time.process_time() - used
        work = self._tap.work
        self._tap.restart()
        started = time.perf_counter()
        while self._engine.has_work():
            outputs += _checked(self._engine.step())
        taken = time.perf_counter() - started
        assert [token for output in outputs for token in output.token_ids] == probe.gold
        rows = np.array(self._tap.rows)
        first = rows[0]
        exact = first if exact is None else exact
        return Answer(
            ttft=ttft,
            processor=processor,
            rows=work.rows,
            key_pairs=work.key_pairs,
            token_seconds=taken / max(len(probe.gold) - 1, 1),
            kl=float((np.exp(exact) * (exact - first)).sum(dtype=np.float64)),
            gold=float(rows[np.arange(len(rows)), probe.gold].mean()),
            found=rows.argmax(axis=1).tolist() == probe.gold,
        ), first


class _Tap(CountingRunner):
    """A counting runner that also forces an answer, and keeps the distributions of its tokens.

    Attributes:
        rows: log-probabilities float32 [vocab] of each token so far.
    """

    def __init__(self, runner: CpuRunner) -> None:
        super().__init__(runner)
        self.force([])

    def force(self, tokens: Sequence[int]) -> None:
        """Have the next tokens be these, one per step."""
        self.rows: list[Float32Array] = []
        self._forced = tokens

    def forward(self, batch: ForwardBatch) -> Float32Array:
        """See ``Runner.forward``."""
        return self._kept(super().forward(batch))

    def compute_logits(self, batch: ForwardBatch, hidden: Float32Array) -> Float32Array:
        """See ``Runner.compute_logits``."""
        return self._kept(super().compute_logits(batch, hidden))

    def argmax_tokens(self, logits: Float32Array) -> list[int]:
        """Return the forced token [1], whatever is most likely; see ``Runner.argmax_tokens``."""
        return [self._forced[len(self.rows) - 1]]

    def _kept(self, logits: Float32Array) -> Float32Array:
        if len(logits):
            (row,) = log_softmax(logits)
            self.rows.append(row)
        return logits


def _checked(outputs: list[EngineOutput]) -> list[EngineOutput]:
    for output in outputs:
        if output.finish_reason == "error":
            raise GenerationError(output.error or "the engine failed")
    return outputs


def pruning_table(report: PruningReport) -> ResultTable:
    """Return the table of a report."""
    return ResultTable(
        rows=[_cells(report, variant) for variant in report.variants],
        caption=(
            f"{report.model}, threads: {report.threads}; {len(report.tasks)} prompts of"
            f" {report.tokens:,} tokens of {report.text}, half of them with a needle, in one step,"
            " none of it cached. TTFT and its processor time: median of the ratio to all rows on"
            " the same prompt, moments apart. Rows: times layers, until the first token, beside"
            " all rows'; key pairs likewise. KL: of the first token's distribution from that of"
            " all rows, in nats. Found: percent of the needles whose tokens are all most likely."
            " Needle, code: mean log-probability per token of the known answer, minus that with"
            " all rows on the same prompts, in nats; with all rows, the mean itself. In brackets:"
            " 95% intervals. Per token: median time of the answer's later tokens."
            f" {report.machine}; load {report.load:.1f}."
        ),
    )


def _cells(report: PruningReport, found: VariantAnswers) -> dict[str, str]:
    dense = report.variants[0].answers

    def ratio(of: Callable[[Answer], float]) -> float:
        pairs = zip(found.answers, dense, strict=True)
        return median(of(answer) / of(whole) for answer, whole in pairs)

    def of_task(task: str) -> list[tuple[Answer, Answer, str]]:
        answers = zip(found.answers, dense, report.tasks, report.files, strict=True)
        return [(own, whole, f"{file}") for own, whole, kind, file in answers if kind == task]

    def divergence(task: str) -> str:
        return f"{fmean(answer.kl for answer, *_ in of_task(task)):.3f}"

    def logprob(task: str) -> str:
        own, whole, files = zip(*of_task(task), strict=True)
        if found.name == DENSE:
            return figure_cell(estimate_mean([answer.gold for answer in own], files))
        return figure_cell(
            estimate_difference([one.gold for one in whole], [one.gold for one in own], files),
            signed=True,
        )

    needles, _, files = zip(*of_task("needle"), strict=True)
    return {
        "method": found.name,
        "TTFT ms": f"{median(answer.ttft for answer in found.answers) * 1e3:,.0f}",
        "of all rows'": f"{ratio(lambda answer: answer.ttft):.2f}",
        "processor time": f"{ratio(lambda answer: answer.processor):.2f}",
        "rows": f"{ratio(lambda answer: sum(answer.rows)):.2f}",
        "key pairs": f"{ratio(lambda answer: answer.key_pairs):.2f}",
        "KL needle": divergence("needle"),
        "KL code": divergence("code"),
        "found": estimate_cell(estimate_share([answer.found for answer in needles], files)),
        "needle": logprob("needle"),
        "code": logprob("code"),
        "per token ms": f"{median(answer.token_seconds for answer in found.answers) * 1e3:.1f}",
    }


def pruning(
    model: ModelArgument = None,
    tokens: Annotated[int, typer.Option(min=128, help="Of each prompt, about.")] = 4000,
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each kind and depth.")] = 14,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure methods that drop rows of a prompt between layers: time, work, and answers."""
    with show_steps("loading") as progress:
        report = measure_pruning(
            model or DEFAULT_MODEL,
            tokens=tokens,
            repeats=repeats,
            threads=threads,
            progress=progress,
        )
    publish(report, pruning_table(report), section="pruning", json=json, docs=docs)
