"""Two formats of the KV cache in turn: prefill and decode of the same prompts, as ratios."""

import random
import time
from collections.abc import Callable
from statistics import median

import msgspec

from midfill.config import KvDtype
from midfill.frontend.sampling import SamplingParams
from midfill.lab.bench.versions.report import RatioFigure, ratio_figure
from midfill.llm import LLM
from midfill.system.machine import Machine, describe_machine
from midfill.system.reporting.result_table import ResultTable

_DECODED = 32


class KvDtypesOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        dtypes: the two formats; ratios are of the second one's speed to the first one's.
        prefill: prompt lengths, in tokens.
        extend: tokens that are new at the end of the longest of these prompts.
        contexts: tokens before the first decoded one.
        pairs: runs of each with each format.
    """

    dtypes: tuple[KvDtype, KvDtype] = ("f16", "bf16")
    prefill: tuple[int, ...] = (512, 2000)
    extend: tuple[int, ...] = (8, 32)
    contexts: tuple[int, ...] = (16, 2000)
    pairs: int = 15


class KvDtypesReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured; figures are tokens per second."""

    model: str
    machine: Machine
    options: KvDtypesOptions
    backend: str
    figures: list[RatioFigure]


def measure_kv_dtypes(
    model: str,
    options: KvDtypesOptions,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> KvDtypesReport:
    """Load ``model`` once with each format and let both answer the same prompts in turn.

    Prompts are random tokens, new in each run, and nothing is drafted.

    Raises:
        MidfillError: the model can't be found, loaded, or run by the CPU kernels.
    """
    llms = {}
    for dtype in options.dtypes:
        progress(f"loading {model} with KV in {dtype}")
        llms[dtype] = LLM(model, backend="cpu", threads=threads, kv_dtype=dtype, speculation=False)
    rng = random.Random(0)
    rates: dict[str, dict[KvDtype, list[float]]] = {}
    for pair in range(-1, options.pairs):
        progress(f"run {pair + 1} of {options.pairs}")
        seed = rng.random()
        order = options.dtypes if pair % 2 == 0 else options.dtypes[::-1]
        for dtype in order:
            for name, rate in _run(llms[dtype], options, random.Random(seed)).items():
                if pair >= 0:  # the first run warms up
                    rates.setdefault(name, {}).setdefault(dtype, []).append(rate)
    for llm in llms.values():
        llm.close()
    first, second = options.dtypes
    return KvDtypesReport(
        model=model,
        machine=describe_machine(),
        options=options,
        backend=llms[first].info.backend,
        figures=[_figure(name, found[first], found[second]) for name, found in rates.items()],
    )


def _figure(name: str, old: list[float], new: list[float]) -> RatioFigure:
    ratios = [b / a for a, b in zip(old, new, strict=True)]
    return ratio_figure(name, "tokens/s", old, new, ratios)


def _run(llm: LLM, options: KvDtypesOptions, rng: random.Random) -> dict[str, float]:
    """Return the tokens per second of everything that is measured, once."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(100, llm.vocab_size) for _ in range(count)]

    rates = {}
    prompt: list[int] = []
    for length in sorted(options.prefill):
        prompt = tokens(length)
        rates[f"prefill of {length:,} tokens"] = length / _seconds(llm, prompt, 1)[0]
    for more in options.extend:
        # The longest prompt's own last token is computed again: it gives the logits.
        seconds = _seconds(llm, prompt[:-1] + tokens(more), 1)[0]
        rates[f"{more} more tokens at {len(prompt):,}"] = more / seconds
    for context in options.contexts:
        seconds = _seconds(llm, tokens(context), _DECODED + 1)[1]
        rates[f"decode at {context:,} tokens"] = _DECODED / seconds
    return rates


def _seconds(llm: LLM, prompt: list[int], count: int) -> tuple[float, float]:
    """Return the seconds up to the first token, and from there to the last one."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    started = time.perf_counter()
    arrivals = []
    for _ in llm.generate_stream(prompt, sampling):
        arrivals.append(time.perf_counter())
    return arrivals[0] - started, arrivals[-1] - arrivals[0]


def kv_dtypes_table(report: KvDtypesReport) -> ResultTable:
    """A row per figure: both medians and the ratio."""
    first, second = report.options.dtypes
    return ResultTable(
        title="Formats of the KV cache",
        rows=[
            {
                "measured": figure.name,
                f"{first} tokens/s": f"{median(figure.old):,.0f}",
                f"{second} tokens/s": f"{median(figure.new):,.0f}",
                "ratio": f"{figure.ratio:.2f}",
                "95% interval": f"{figure.low:.2f} to {figure.high:.2f}",
            }
            for figure in report.figures
        ],
        caption=f"{report.model}, one request at a time, without speculation, {report.backend}; "
        f"medians of {report.options.pairs} runs with each format, in turn, and of their "
        f"ratios; {report.machine}.",
    )
