"""The results of a comparison of servers: figures by load, and the servers."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from midfill.errors import MidfillError
from midfill.system.machine import Machine

MIDFILL = "midfill"
MIDFILL_PLAIN = "midfill without speculation"
LLAMA_CPP = "llama.cpp"
VLLM = "vllm"

STORED = "stored"
"""llama.cpp's weights as the model's file has them."""
NATIVE = "native"
"""Prefix and suffix as they are, laid out by the server."""

TOKENS_PER_SECOND = "tokens/s"
"""The only measure of which more is better; all others are times."""


class PeersOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What to measure.

    Attributes:
        servers: of "midfill", "llama.cpp" and "vllm".
        llama_formats: weights that llama.cpp is measured with, each as a server of its own:
            ``STORED``, or a type of llama-quantize such as "q4_k_m".
        vllm_dtypes: likewise for vLLM: "float32", "bfloat16".
        loads: of ``loads.LOADS``.
        prefill: prompt lengths, in tokens.
        contexts: tokens before the first decoded one.
        streams: answers decoded at once.
        decoded: tokens of each stream.
        users: documents edited at once in the rounds load.
        rounds: requests per user; at most 7.
        output_tokens: tokens of each answer of rounds and of the editing session.
        keystrokes: requests of the keystroke load; ten characters are typed before each.
        document_tokens: length of the document that they are typed into.
        session: requests of the editing session.
        repeats: runs of prefill and decode.
        round_repeats: runs of rounds.
        threads: per server.
        load_limit: seconds. A load whose prompts alone would take a server longer, at the prefill
            speed just measured, is skipped; a request without an answer for that long ends the
            server's run.
        start_limit: seconds until a server must answer.
        seed: chooses files and tokens.
    """

    servers: tuple[str, ...] = (MIDFILL, LLAMA_CPP, VLLM)
    llama_formats: tuple[str, ...] = ("stored", "q4_0", "q4_k_m")
    vllm_dtypes: tuple[str, ...] = ("float32",)
    loads: tuple[str, ...] = ("prefill", "decode", "keystroke", "rounds", "session")
    prefill: tuple[int, ...] = (512, 2000, 6000)
    contexts: tuple[int, ...] = (16, 2000, 6000)
    streams: tuple[int, ...] = (1, 4, 16)
    decoded: int = 64
    users: tuple[int, ...] = (1, 4)
    rounds: int = 5
    output_tokens: int = 16
    keystrokes: int = 20
    document_tokens: int = 2000
    session: int = 40
    repeats: int = 3
    round_repeats: int = 3
    threads: int = 1
    load_limit: float = 1200.0
    start_limit: float = 600.0
    seed: int = 0


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A load's figure on a server.

    Attributes:
        kind: of load, see ``loads``.
        load: its name, such as "decode at 2,000, 4 streams".
        measure: ``TOKENS_PER_SECOND``, or a time with its unit, such as "TTFT ms".
        layout: of prompts: "fim", "efim", "psm" by the client, "native" by the server; "" where
            there is nothing to lay out.
        median, lowest, highest: over the runs.
        runs: how many.
        bound: tokens/s that memory's bandwidth allows; None where other limits matter.
    """

    kind: str
    load: str
    measure: str
    layout: str = ""
    median: float
    lowest: float
    highest: float
    runs: int
    bound: float | None = None


def figure(
    kind: str,
    load: str,
    measure: str,
    values: Sequence[float],
    *,
    layout: str = "",
    bound: float | None = None,
) -> Figure:
    """Make a figure of the values of some runs."""
    return Figure(
        kind=kind,
        load=load,
        measure=measure,
        layout=layout,
        median=median(values),
        lowest=min(values),
        highest=max(values),
        runs=len(values),
        bound=bound,
    )


class ServerResult(msgspec.Struct, frozen=True, kw_only=True):
    """A server's run.

    Attributes:
        name: as in ``PeersOptions.servers``, with the format or dtype where a peer is run in
            several; midfill is run twice, see ``MIDFILL_PLAIN``.
        version: that the server reports.
        precision: of its weights, activations and KV.
        settings: its options beside model, port and name.
        ready_seconds: from its start until it answered /health; None if it never did.
        peak_rss_bytes: peak of the memory resident in all its processes; None if the system has
            no /proc.
        weight_bytes: of weights read per decoding step.
        kv_bytes_per_token: of KV read per decoded token and token of context.
        bytes_per_second: this machine's memory bandwidth, measured just before.
        figures: of the loads that were measured.
        skipped: load -> why it was not measured.
        error: why the run ended early; "" if it didn't.
        more_tokens: how many tokens more than the model's own tokenizer the server counts in a
            small text.
    """

    name: str
    version: str
    precision: str
    settings: str
    ready_seconds: float | None
    peak_rss_bytes: int | None
    weight_bytes: int
    kv_bytes_per_token: int
    bytes_per_second: float
    figures: list[Figure]
    skipped: dict[str, str]
    error: str = ""
    more_tokens: int = 0

    def find(self, load: str, measure: str, layout: str) -> Figure | None:
        """Return a figure, or None if it was not measured."""
        for one in self.figures:
            if (one.load, one.measure, one.layout) == (load, measure, layout):
                return one
        return None


class PeersReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured.

    Attributes:
        model: its name.
        kv_tokens: tokens of KV that each server has room for.
        servers: in the order in which they ran.
        missing: server -> why it is missing, one line.
    """

    model: str
    machine: Machine
    options: PeersOptions
    kv_tokens: int
    servers: list[ServerResult]
    missing: dict[str, str]

    def own(self, load: str, measure: str, layout: str) -> Figure | None:
        """Return midfill's figure from whichever of its runs measured it."""
        for server in self.servers:
            if server.name in (MIDFILL, MIDFILL_PLAIN):
                found = server.find(load, measure, layout)
                if found is not None:
                    return found
        return None


def times_faster(
    report: PeersReport, theirs: Figure, *, own_layout: str | None = None
) -> float | None:
    """Return how many times as fast midfill is; below 1 it is slower.

    Args:
        theirs: a server's figure.
        own_layout: of midfill's prompts; None takes the same prompts as theirs.

    Returns:
        None where midfill's figure is missing.
    """
    own = report.own(theirs.load, theirs.measure, own_layout or theirs.layout)
    if own is None or not own.median or not theirs.median:
        return None
    ratio = own.median / theirs.median
    return ratio if theirs.measure == TOKENS_PER_SECOND else 1 / ratio


def read_peers(path: Path) -> PeersReport:
    """Read the figures that ``midfill bench peers --json`` wrote.

    Raises:
        MidfillError: there are none.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=PeersReport)
    except OSError as error:
        raise MidfillError(f"{path} can't be read: {error.strerror}") from None
    except msgspec.DecodeError as error:
        raise MidfillError(f"{path} is no file of 'midfill bench peers': {error}") from None
