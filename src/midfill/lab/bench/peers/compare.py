"""``bench peers``: midfill's server, llama.cpp's and vLLM's, one after another on one machine.

Same model, prompts, threads and room for KV; never two servers at once. Each is started afresh,
answers two small prompts to warm up, then gets every load of ``loads``. midfill runs twice:
as it is, and without speculation for decode, so that what is compared there is decoding alone.
Peers run at their best: llama.cpp in every format of weights that is asked for, vLLM in every
dtype, each as a server of its own.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from midfill.errors import MidfillError
from midfill.lab.bench.peers.compared_model import ComparedModel
from midfill.lab.bench.peers.llama_cpp import formats_for, launch_llama_cpp
from midfill.lab.bench.peers.loads import (
    ALL_LAYOUTS,
    LOADS,
    MIN_SEQUENCE,
    SPECULATIVE,
    Load,
    loads_for,
)
from midfill.lab.bench.peers.results import (
    LLAMA_CPP,
    MIDFILL,
    VLLM,
    PeersOptions,
    PeersReport,
    ServerResult,
)
from midfill.lab.bench.peers.run import LogLine, Work, run_server
from midfill.lab.bench.peers.servers import Launch, Missing, Room, launch_midfill
from midfill.lab.bench.peers.vllm import launch_vllm
from midfill.lab.bench.prompts import Prompts
from midfill.system.machine import describe_machine
from midfill.system.process import ended_by_sigterm

SERVERS = (MIDFILL, LLAMA_CPP, VLLM)
QUICK = PeersOptions(
    prefill=(512, 1500),
    contexts=(16, 1000),
    streams=(1, 4),
    decoded=32,
    users=(1, 2),
    rounds=2,
    output_tokens=8,
    keystrokes=8,
    document_tokens=1000,
    session=8,
    repeats=2,
    round_repeats=1,
)
"""A choice of loads that takes midfill a minute on two cores."""

_BLOCK = 128
"""Tokens of vLLM's block on a CPU; sequences are rounded up to it, so all have the same room."""


@dataclass(frozen=True)
class Programs:
    """The peers' programs, where the user names them.

    Attributes:
        llama_server: llama.cpp's server.
        vllm_python: an interpreter that has vllm.
    """

    llama_server: Path | None = None
    vllm_python: Path | None = None


def parse_names(text: str, known: Sequence[str], option: str) -> tuple[str, ...]:
    """Return the names that a list separated by commas holds, in the order of ``known``.

    Raises:
        MidfillError: an unknown name, or none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        what = ", ".join(unknown) or "nothing"
        raise MidfillError(f"{option} names {what}; there are {', '.join(known)}")
    return tuple(name for name in known if name in names)


def compare_peers(
    model: ComparedModel,
    options: PeersOptions,
    programs: Programs,
    progress: LogLine = lambda _: None,
    save: Callable[[PeersReport], None] = lambda _: None,
    earlier: PeersReport | None = None,
) -> PeersReport:
    """Run every server through every load.

    Args:
        progress: receives what is being done.
        save: receives the report as it stands after each server.
        earlier: what a run with the same options has left; servers that it measured to the end
            are kept and not run again.

    Raises:
        MidfillError: no load fits the model's context, or ``earlier`` is of another comparison.
    """
    prompts = Prompts(model.checkpoint.tokenizer, options.seed)
    loads = loads_for(options, prompts, ALL_LAYOUTS)
    fitting = [load for load in loads if load.sequence <= model.context]
    if not fitting:
        raise MidfillError(f"every load is longer than {model.name}'s {model.context} tokens")
    room = _room(fitting, model, options)
    work = Work(model, prompts, options, progress)
    report = PeersReport(
        model=model.name,
        machine=describe_machine(),
        options=options,
        kv_tokens=room.kv_tokens,
        servers=[] if earlier is None else _finished(earlier, model, options, room),
        missing={},
    )
    names = {server.name for server in report.servers}
    with tempfile.TemporaryDirectory(prefix="midfill-peers-") as folder, ended_by_sigterm():
        for launch in _launches(model, options, programs, room, Path(folder), progress):
            if launch.name in names:
                progress(f"{launch.name}: measured before")
                continue
            if isinstance(launch, Missing):
                report.missing[launch.name] = launch.reason
            else:
                log = Path(folder) / f"{len(report.servers)}.log"
                report.servers.append(run_server(launch, work, log))
            save(report)
    return report


def _finished(
    earlier: PeersReport, model: ComparedModel, options: PeersOptions, room: Room
) -> list[ServerResult]:
    """Return the servers of an earlier run that were measured to the end.

    Raises:
        MidfillError: it measured other loads, another model or another machine.
    """
    chosen = {name: getattr(options, name) for name in ("servers", "llama_formats", "vllm_dtypes")}
    same = (
        earlier.model == model.name
        and earlier.kv_tokens == room.kv_tokens
        and earlier.machine == describe_machine()
        and msgspec.structs.replace(earlier.options, **chosen) == options
    )
    if not same:
        raise MidfillError(
            "the earlier figures are of another model, machine or choice of loads: they can't be "
            "resumed with these options"
        )
    return [server for server in earlier.servers if not server.error]


def _room(loads: Sequence[Load], model: ComparedModel, options: PeersOptions) -> Room:
    longest = max(MIN_SEQUENCE, *(load.sequence for load in loads))
    return Room(
        threads=options.threads,
        sequence=min(-(-longest // _BLOCK) * _BLOCK, model.context),
        sequences=max(load.sequences for load in loads),
    )


def _launches(
    model: ComparedModel,
    options: PeersOptions,
    programs: Programs,
    room: Room,
    folder: Path,
    progress: LogLine,
) -> Iterator[Launch | Missing]:
    """Yield the servers to run; each is prepared when its turn comes."""
    if MIDFILL in options.servers:
        if model.random_weights:
            # It repeats itself without end, and drafts would always be right.
            yield launch_midfill(model, room, speculation=False, kinds=LOADS)
        else:
            others = (*(kind for kind in LOADS if kind != "decode"), SPECULATIVE)
            yield launch_midfill(model, room, speculation=True, kinds=others)
            if "decode" in options.loads:
                yield launch_midfill(model, room, speculation=False, kinds=("decode",))
    if LLAMA_CPP in options.servers:
        for weights in formats_for(model, options.llama_formats):
            progress(f"llama.cpp: preparing weights, {weights}")
            links = folder / "links"
            yield launch_llama_cpp(model, room, programs.llama_server, links, weights)
    if VLLM in options.servers:
        for dtype in options.vllm_dtypes:
            progress(f"vllm: preparing weights, {dtype}")
            yield launch_vllm(model, room, programs.vllm_python, dtype)
