"""What a run measures, and what it found; a file of results can be continued."""

from pathlib import Path

import msgspec

from midfill.errors import MidfillError
from midfill.lab.bench.methods.probes import Score, Task
from midfill.lab.bench.methods.variants import Variant
from midfill.system.machine import Machine


class MethodsOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured.

    Attributes:
        context: tokens of a context with needles, or that several questions share.
        depths: where needles are.
        needles: contexts per depth, each with one needle and with several.
        shared: contexts of each kind that several questions share.
        questions: asked about each of these.
        code: held-out files whose next tokens are predicted.
        code_context, code_tokens: tokens of a file before the predicted ones, and these.
        holes: lines to fill in.
        speed_context, short_context: tokens of the contexts at which decoding is timed.
        decoded: tokens decoded at each.
        repeats: runs of everything that is timed; figures are medians.
        seed: of all random choices.
    """

    context: int = 2000
    depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    needles: int = 2
    shared: int = 1
    questions: int = 4
    code: int = 8
    code_context: int = 1500
    code_tokens: int = 128
    holes: int = 40
    speed_context: int = 6000
    short_context: int = 1500
    decoded: int = 64
    repeats: int = 3
    seed: int = 0


QUICK = MethodsOptions(
    context=1000,
    depths=(0.1, 0.5, 0.9),
    needles=1,
    shared=1,
    questions=2,
    code=2,
    code_context=1000,
    code_tokens=64,
    holes=8,
    speed_context=2000,
    short_context=500,
    decoded=24,
    repeats=1,
)


class Hole(msgspec.Struct, frozen=True):
    """A line to fill in: the text around the caret and the one that was there."""

    name: str
    prefix: str
    text: str
    suffix: str


class ProbeResult(msgspec.Struct, frozen=True):
    """A probe's scores: by specification, one per answer."""

    name: str
    task: Task
    label: str
    scores: dict[str, list[Score]]


class HoleResult(msgspec.Struct, frozen=True):
    """A hole's answers by specification, and whether each is what was there."""

    name: str
    answers: dict[str, str]
    exact: dict[str, bool]


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What a method holds and how fast it is, at one length of context.

    Attributes:
        context, short_context: tokens of the long and of the short prompt.
        after_prefill: see ``session.Holding``.
        bytes: of these slots, with the lists of their cells.
        tokens_per_second: while decoding at the long context, median.
        times_full, times_short: how many times as fast it decodes there as full KV does at the long
            and at the short context moments before, in each repeat.
        ttft_seconds: of a prompt at the short context, of which nothing is cached; median.
        peak: the largest number of slots that this prompt held.
    """

    context: int
    short_context: int
    after_prefill: int
    bytes: int
    tokens_per_second: float
    times_full: list[float]
    times_short: list[float]
    ttft_seconds: float
    peak: int


class ModelResult(msgspec.Struct, frozen=True, kw_only=True):
    """What one model's run has found so far.

    Attributes:
        fingerprint: digest of the model.
        backend: what ran it.
        text: where real text comes from.
        refused: by specification, why the model can't be used with a method.
        probes, holes: in the order of the run.
        costs: by specification.
    """

    model: str
    fingerprint: str
    backend: str
    text: str = ""
    refused: dict[str, str] = {}
    probes: list[ProbeResult] = []
    holes: list[HoleResult] = []
    costs: dict[str, Cost] = {}


class MethodsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        load: processes that ran or waited for a core in the minute before the run, on average.
        variants: without full KV, which is always measured.
        finished: whether nothing is missing.
        format: version of this record.
    """

    machine: Machine
    load: float
    options: MethodsOptions
    variants: list[Variant]
    models: list[ModelResult]
    finished: bool = False
    format: int = 1


def read_methods_report(path: Path) -> MethodsReport:
    """Read a file of results.

    Raises:
        MidfillError: it can't be read, or is no such file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=MethodsReport)
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MidfillError(f"{path} holds no results of bench methods: {error}") from error
