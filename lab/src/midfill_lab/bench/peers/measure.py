"""``bench peers``: midfill's server and those of others, one after another on one machine.

Same model, prompts, threads and room for KV; never two servers at once. Each is started afresh,
once or in several turns, between which a shared machine may become faster or slower for all,
answers two small prompts to warm up, then gets every load of ``loads``. midfill runs twice:
as it is, and without speculation for decode, so that what is compared there is decoding alone.
Peers run at their best: llama.cpp in every format of weights that is asked for, vLLM in every
dtype, each as a server of its own. Those that can draft tokens without another model run a second
time for the decode load in which midfill does so, too.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import httpx
import msgspec

from midfill.errors import MidfillError
from midfill.system.machine import describe_machine
from midfill.system.process import ended_by_sigterm
from midfill_lab.bench.clients import HttpClient
from midfill_lab.bench.documents import Prompts
from midfill_lab.bench.neighbours import busy_processes
from midfill_lab.bench.peers.llama_cpp import (
    IK_BUILD,
    LLAMA_CPP_BUILD,
    LlamaBuild,
    formats_for,
    launch_llama_cpp,
)
from midfill_lab.bench.peers.loads import (
    ALL_LAYOUTS,
    MIN_SEQUENCE,
    Load,
    Subject,
    loads_for,
    warm_up,
)
from midfill_lab.bench.peers.openvino import launch_openvino
from midfill_lab.bench.peers.process import ServerProcess, free_port
from midfill_lab.bench.peers.results import (
    CPU,
    LOADS,
    MIDFILL,
    OPENVINO,
    SPECULATIVE,
    VLLM,
    Figure,
    PeersOptions,
    PeersReport,
    ServerResult,
    column,
    pooled,
)
from midfill_lab.bench.peers.servers import (
    PORT,
    ComparedModel,
    Launch,
    Missing,
    Room,
    launch_midfill,
)
from midfill_lab.bench.peers.vllm import launch_vllm
from midfill_lab.bench.roofline.ceilings import measure_roofline

LogLine = Callable[[str], None]

_SETTLE_SECONDS = 0.5
T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """The work of every server.

    Attributes:
        model: the model.
        prompts: made with its tokenizer.
        options: the loads.
        progress: receives what is being done.
    """

    model: ComparedModel
    prompts: Prompts
    options: PeersOptions
    progress: LogLine


class _RunOverError(MidfillError):
    """The server has ended or doesn't answer."""


def run_server(
    launch: Launch, work: Work, log: Path, prefill: Sequence[Figure] = ()
) -> ServerResult:
    """Run one server from start to end; its failure is part of the result.

    Args:
        launch: the server.
        work: what it does.
        log: a new file for its output.
        prefill: figures of the same server's prefill in an earlier run.
    """
    work.progress(f"{launch.name}: memory bandwidth")
    found = ServerResult(
        name=launch.name,
        version=launch.version,
        precision=launch.precision,
        settings=launch.settings,
        bytes_per_second=_memory_speed(work.options),
    )
    try:
        _start_and_measure(launch, work, log, found, prefill)
    except MidfillError as error:
        found.error = str(error)
    return found


def _memory_speed(options: PeersOptions) -> float:
    """Return the bytes per second of the memory that servers read."""
    if options.device == CPU:
        return measure_roofline(options.threads).bytes_per_second
    # Imported where it is used: it needs PyTorch.
    from midfill_lab.bench.roofline.gpu import copied_per_second

    return copied_per_second(options.device)


def _process(launch: Launch, log: Path) -> ServerProcess:
    port = free_port()
    command = [str(port) if argument == PORT else argument for argument in launch.command]
    return ServerProcess(command, launch.environment, port, log)


def _start_and_measure(
    launch: Launch, work: Work, log: Path, found: ServerResult, prefill: Sequence[Figure]
) -> None:
    if launch.first_start:
        work.progress(f"{launch.name}: first start")
        with _process(launch, log) as process:
            process.wait_until_ready(work.options.start_limit)
            if launch.stored is not None:
                process.wait_for_file(launch.stored, work.options.start_limit)
    with _process(launch, log) as process:
        try:
            work.progress(f"{launch.name}: starting")
            found.ready_seconds = process.wait_until_ready(work.options.start_limit)
            read = launch.read_bytes(process.log_text())
            found.weight_bytes, found.kv_bytes_per_token = read.weights, read.kv_per_token
            with busy_processes(work.options.busy):
                asyncio.run(_measure(process, launch, work, found, prefill))
        except _RunOverError as error:
            raise MidfillError(f"{error}; {process.last_words()}") from None
        finally:
            found.peak_rss_bytes = process.peak_rss_bytes


async def _measure(
    process: ServerProcess,
    launch: Launch,
    work: Work,
    found: ServerResult,
    prefill: Sequence[Figure],
) -> None:
    def bound(context: float, streams: int) -> float:
        step = found.weight_bytes + streams * context * found.kv_bytes_per_token
        return found.bytes_per_second * streams / step

    limit = work.options.load_limit
    async with HttpClient(f"{process.url}/v1", timeout=limit) as client:
        client.sentinels = work.model.sentinels
        subject = Subject(
            client=client,
            model=work.model.name,
            bound=bound,
            progress=lambda what: work.progress(f"{launch.name}: {what}"),
        )
        found.more_tokens = await _attempt(process, "warming up", warm_up(subject, work.prompts))
        for load in loads_for(work.options, work.prompts, launch.layouts):
            if load.kind not in launch.kinds:
                continue
            known = [*prefill, *found.figures]
            reason = reason_to_skip(load, work.model.context, known, limit)
            if reason is None:
                try:
                    found.figures += await _attempt(process, load.name, load.run(subject))
                    continue
                except _RunOverError:
                    raise
                except MidfillError as error:
                    reason = str(error)
            found.skipped[load.name] = reason


async def _attempt(process: ServerProcess, what: str, asked: Awaitable[T]) -> T:
    """Await a request or a load.

    Raises:
        _RunOverError: it failed because the server has ended or doesn't answer.
        MidfillError: it failed otherwise.
    """
    try:
        return await asked
    except MidfillError as error:
        await asyncio.sleep(_SETTLE_SECONDS)  # a dying server ends a moment after its connections
        silent = isinstance(error.__cause__, httpx.TimeoutException)
        if silent or not process.running:
            raise _RunOverError(f"{what}: {error}") from None
        raise


def reason_to_skip(load: Load, context: int, figures: Sequence[Figure], limit: float) -> str | None:
    """Return why a load should be skipped, or None.

    Args:
        context: maximum tokens of a sequence.
        figures: measured before; those of prefill tell how fast prompts are computed.
        limit: maximum seconds for a load's prompts.
    """
    if load.sequence > context:
        return f"takes {load.sequence:,} tokens, the model has {context:,}"
    rates = [figure.median for figure in figures if figure.kind == "prefill"]
    if load.kind == "prefill" or not rates:
        return None
    seconds = load.prompt_tokens / min(rates)
    if seconds <= limit:
        return None
    return f"its prompts would take about {seconds:,.0f} s, more than the limit of {limit:,.0f} s"


SERVERS = (MIDFILL, LLAMA_CPP_BUILD.name, IK_BUILD.name, OPENVINO, VLLM)
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
        ik_llama_server: ik_llama.cpp's server.
        openvino_python: an interpreter that has openvino-genai.
        vllm_python: an interpreter that has vllm.
    """

    llama_server: Path | None = None
    ik_llama_server: Path | None = None
    openvino_python: Path | None = None
    vllm_python: Path | None = None


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
        MidfillError: no load fits the model's context, ``earlier`` is of another comparison, or
            none of the servers computes on the device.
    """
    if options.device != CPU and not {MIDFILL, VLLM} & set(options.servers):
        raise MidfillError(
            f"--device {options.device} compares midfill and vllm alone; --only names neither"
        )
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
        gpu=_gpu_name(options.device),
        options=options,
        kv_tokens=room.kv_tokens,
        servers=[] if earlier is None else _finished(earlier, model, options, room),
        missing={},
    )
    with tempfile.TemporaryDirectory(prefix="midfill-peers-") as folder, ended_by_sigterm():
        launches = []
        for launch in _launches(model, options, programs, room, Path(folder), progress):
            if isinstance(launch, Missing):
                report.missing[launch.name] = launch.reason
                save(report)
            else:
                launches.append(launch)
        for turn in range(options.turns):
            for number, launch in enumerate(launches):
                log = Path(folder) / f"{turn}-{number}.log"
                _take_turn(turn, launch, work, log, report)
                save(report)
    return report


def _take_turn(turn: int, launch: Launch, work: Work, log: Path, report: PeersReport) -> None:
    """Run a server once more, unless it has had this turn or failed; the report is updated."""
    prefill = _prefill_figures(report.servers, launch.name)
    numbers = {server.name: number for number, server in enumerate(report.servers)}
    number = numbers.get(launch.name)
    if number is None:
        report.servers.append(run_server(launch, work, log, prefill))
        return
    earlier = report.servers[number]
    if earlier.turns > turn or earlier.error:
        work.progress(f"{launch.name}: measured before")
        return
    again = run_server(replace(launch, first_start=False), work, log, prefill)
    report.servers[number] = pooled(earlier, again)


def _prefill_figures(servers: Sequence[ServerResult], name: str) -> list[Figure]:
    """Return figures of a server's prefill, which may be those of its run with other drafts."""
    return [
        each
        for server in servers
        if column(server.name) == column(name)
        for each in server.figures
        if each.kind == "prefill"
    ]


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


def _gpu_name(device: str) -> str:
    """Return the name of the GPU that is compared on; "" on the CPU.

    Raises:
        MidfillError: there is no such GPU, or no PyTorch to find it.
    """
    if device == CPU:
        return ""
    try:
        from midfill_lab.bench.roofline.gpu import gpu_name

        return gpu_name(device)
    except ImportError:
        raise MidfillError(
            f"--device {device} needs PyTorch: pip install 'midfill[torch]'"
        ) from None
    except (AssertionError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise MidfillError(f"--device {device}: PyTorch finds no such GPU ({reason})") from None


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
    device = options.device
    if MIDFILL in options.servers:
        if model.random_weights:
            # It repeats itself without end, and drafts would always be right.
            yield launch_midfill(model, room, speculation=False, kinds=LOADS, device=device)
        else:
            others = (*(kind for kind in LOADS if kind != "decode"), SPECULATIVE)
            yield launch_midfill(model, room, speculation=True, kinds=others, device=device)
            if "decode" in options.loads:
                yield launch_midfill(
                    model, room, speculation=False, kinds=("decode",), device=device
                )
    for build, program in (
        (LLAMA_CPP_BUILD, programs.llama_server),
        (IK_BUILD, programs.ik_llama_server),
    ):
        if build.name in options.servers and device == CPU:
            yield from _llama_launches(model, options, build, program, room, folder, progress)
    if OPENVINO in options.servers and device == CPU:
        yield launch_openvino(model, room, programs.openvino_python)
    if VLLM in options.servers:
        for dtype in options.vllm_dtypes:
            progress(f"vllm: preparing weights, {dtype}")
            yield launch_vllm(model, room, programs.vllm_python, dtype, device)


def _llama_launches(
    model: ComparedModel,
    options: PeersOptions,
    build: LlamaBuild,
    program: Path | None,
    room: Room,
    folder: Path,
    progress: LogLine,
) -> Iterator[Launch | Missing]:
    """Yield a server per format of weights, and where drafts say something, one with drafts."""
    speculates = "decode" in options.loads and not model.random_weights
    for weights in formats_for(model, options.llama_formats):
        progress(f"{build.name}: preparing weights, {weights}")
        for speculating in (False, True) if speculates else (False,):
            launch = launch_llama_cpp(
                model,
                room,
                program,
                folder / "links",
                weights,
                build=build,
                speculating=speculating,
            )
            yield launch
            if isinstance(launch, Missing):
                break
