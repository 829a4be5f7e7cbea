"""Prefill and decode speed of one request at a time through the whole engine."""

import random
import time
from collections.abc import Callable
from statistics import median

import msgspec

from midfill.config import Backend
from midfill.engine.messages import EngineInfo
from midfill.frontend.sampling import SamplingParams
from midfill.llm import LLM
from midfill.system.machine import Machine, describe_machine
from midfill_lab.reporting import ResultTable


class SpeedOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        prefill: prompt lengths, in tokens.
        contexts: tokens before the first decoded one.
        decoded: tokens decoded at each context.
        repeats: runs per figure; figures are medians.
    """

    prefill: tuple[int, ...] = (512, 1500)
    contexts: tuple[int, ...] = (16, 1500)
    decoded: int = 64
    repeats: int = 5


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens per second of the median run, the slowest and the fastest."""

    tokens_per_second: float
    slowest: float
    fastest: float


class SpeedReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        engine: its backend, its memory, and how long it took to load.
        prefill: by prompt length.
        decode: by context.
    """

    model: str
    machine: Machine
    options: SpeedOptions
    engine: EngineInfo
    prefill: dict[int, Rate]
    decode: dict[int, Rate]


def measure_speed(
    model: str,
    options: SpeedOptions,
    threads: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
    *,
    backend: Backend = "auto",
    device: str | None = None,
) -> SpeedReport:
    """Load ``model`` twice (the first time may compile and pack) and measure.

    Each prompt is new random tokens, so nothing is found in the cache. After them a model soon
    repeats itself, which speculation would turn into speed that real text doesn't have, so it is
    off. Prefill is timed up to the first token, decode from there.

    Args:
        model: a path or a name.
        options: what to measure.
        threads: of the CPU; None takes all cores this process may use.
        progress: called with what is being done.
        backend: what runs the model.
        device: of the torch backend, such as "cuda:0".

    Raises:
        MidfillError: the model can't be found or loaded, or the device is not there.
    """
    progress(f"loading {model}")
    LLM(model, threads=threads, backend=backend, device=device).close()
    llm = LLM(model, threads=threads, backend=backend, device=device, speculation=False)
    rng = random.Random(0)

    def prompt(length: int) -> list[int]:
        return [rng.randrange(100, llm.vocab_size) for _ in range(length)]

    _answer_rates(llm, prompt(64), 4)
    prefill: dict[int, list[float]] = {length: [] for length in options.prefill}
    decode: dict[int, list[float]] = {length: [] for length in options.contexts}
    for repeat in range(options.repeats):
        progress(f"run {repeat + 1} of {options.repeats}")
        for length, rates in prefill.items():
            rates.append(_answer_rates(llm, prompt(length), 1)[0])
        for length, rates in decode.items():
            rates.append(_answer_rates(llm, prompt(length), options.decoded)[1])
    llm.close()
    return SpeedReport(
        model=model,
        machine=describe_machine(),
        options=options,
        engine=llm.info,
        prefill={length: _rate(rates) for length, rates in prefill.items()},
        decode={length: _rate(rates) for length, rates in decode.items()},
    )


def _answer_rates(llm: LLM, prompt: list[int], tokens: int) -> tuple[float, float]:
    """Return prompt tokens per second up to the first token, and tokens per second after it."""
    sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    started = time.perf_counter()
    arrivals = []
    counts = []
    for delta in llm.generate_stream(prompt, sampling):
        arrivals.append(time.perf_counter())
        counts.append(len(delta.token_ids))
    rest = arrivals[-1] - arrivals[0]
    return len(prompt) / (arrivals[0] - started), sum(counts[1:]) / rest if rest else 0.0


def _rate(rates: list[float]) -> Rate:
    return Rate(tokens_per_second=median(rates), slowest=min(rates), fastest=max(rates))


def speed_table(report: SpeedReport) -> ResultTable:
    """A row per prompt length."""
    engine = report.engine
    prefill = [_cells(f"prefill of {n} tokens", rate) for n, rate in report.prefill.items()]
    decode = [_cells(f"decode at {n} tokens", rate) for n, rate in report.decode.items()]
    return ResultTable(
        title="Prefill and decode",
        rows=prefill + decode,
        caption=f"{report.model}, one request at a time, without speculation, "
        f"median of {report.options.repeats} runs; "
        f"{engine.backend}, weights {engine.weight_bytes / 1e6:.1f} MB, KV pool "
        f"{engine.kv_bytes / 1e9:.2f} GB ({engine.slots} tokens), loaded in "
        f"{engine.load_seconds:.1f} s; {report.machine}.",
    )


def _cells(measured: str, rate: Rate) -> dict[str, str]:
    return {
        "measured": measured,
        "tokens/s": f"{rate.tokens_per_second:.0f}",
        "slowest": f"{rate.slowest:.0f}",
        "fastest": f"{rate.fastest:.0f}",
    }
