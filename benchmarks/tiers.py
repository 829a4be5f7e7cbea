"""The warm tier measured: time to the first token where KV is computed, loaded, or in the pool."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec
import typer

from benchmarks.report import publish
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill.config import ModelOptions
from midfill.engine.engine import Engine, EngineOptions
from midfill.engine.kv_transfer.transfers import IdentitySource
from midfill.engine.loading import kv_identity, scheduler_policy
from midfill.engine.request import EngineRequest, EngineSamplingParams
from midfill.kv.tiers.folders import SHARED_MEMORY, ChunkFolder
from midfill.kv.tiers.warm_tier import WarmTier
from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
from midfill.models.checkpoints.opening import open_model
from midfill.runners.forward.runner import Runner
from midfill.runners.loading import load_runner
from midfill.system.cache import cache_folder
from midfill.system.machine import Machine, describe_machine, format_size
from midfill_lab.bench.documents import Prompts
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption
from midfill_lab.reporting import ResultTable

_CAPACITY = 64 * 2**30
_FLUSH_SECONDS = 120.0


class TierOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds to the first token of a prompt, medians over repeats.

    Attributes:
        tokens: of the prompt.
        computed: without a tier, nothing cached.
        stored: with a tier, nothing cached or stored: it is written to beside the steps.
        memory, disk: all but the end loaded from there; the disk's files are not in the system's
            page cache.
        pool: in the prefix cache.
        loaded_tokens: how many were loaded.
        file_bytes: of the files that hold them.
    """

    tokens: int
    computed: float
    stored: float
    memory: float
    disk: float
    pool: float
    loaded_tokens: int
    file_bytes: int


class TierReport(msgspec.Struct, frozen=True, kw_only=True):
    """Everything one call measured."""

    model: str
    machine: Machine
    load: float
    repeats: int
    backend: str
    token_bytes: int
    outcomes: list[TierOutcome]


def measure_tiers(
    model: str,
    *,
    lengths: tuple[int, ...] = (512, 1000, 2000, 4000, 8000),
    repeats: int = 5,
    threads: int | None = None,
    folder: Path | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> TierReport:
    """Load ``model`` and time the first token of prompts of real code, in each way in turn.

    Args:
        model: name or path.
        lengths: tokens of the prompts.
        repeats: runs, each with a prompt of its own.
        threads: CPU threads; None takes all.
        folder: where on disk; None takes one in the cache folder.
        progress: called with what is being done.

    Raises:
        MidfillError: the model can't be found or loaded.
    """
    progress(f"loading {model}")
    options = ModelOptions(threads=threads)
    checkpoint = open_model(resolve(model), resolve_adapter(model, None), options.weights)
    runner = load_runner(checkpoint, options)
    before = os.getloadavg()[0]
    prompts = Prompts(checkpoint.tokenizer, seed=0)
    source = IdentitySource(lambda: kv_identity(checkpoint, runner, options))
    longest = min(runner.config.context, runner.slots) - 2
    outcomes = []
    with _folders(folder) as (memory, disk):
        bench = _Bench(runner, options, source, memory, disk)
        for length in dict.fromkeys(min(length, longest) for length in lengths):
            runs = []
            for repeat in range(repeats + 1):
                progress(f"{length} tokens, repeat {repeat} of {repeats}")
                prompt = prompts.code_tokens(repeat, length, longest)
                runs.append(bench.measure(prompt[-length:]))
            outcomes.append(_median(runs[1:]))  # the first one warms up
    token_bytes = outcomes[0].file_bytes // max(outcomes[0].loaded_tokens, 1)
    return TierReport(
        model=model,
        machine=describe_machine(),
        load=max(before, os.getloadavg()[0]),
        repeats=repeats,
        backend=runner.description,
        token_bytes=token_bytes,
        outcomes=outcomes,
    )


@contextmanager
def _folders(folder: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield empty folders in memory and on disk, and remove them."""
    parent = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    base = cache_folder() if folder is None else folder
    base.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix="midfill-bench-", dir=parent) as memory,
        tempfile.TemporaryDirectory(prefix="midfill-bench-", dir=base) as disk,
    ):
        yield Path(memory), Path(disk)


class _Bench:
    """Runs each prompt in each way, on engines of their own over one runner."""

    def __init__(
        self,
        runner: Runner,
        options: ModelOptions,
        source: IdentitySource,
        memory: Path,
        disk: Path,
    ) -> None:
        self._runner = runner
        self._source = source
        self._policy = scheduler_policy(options, runner.config.layers)
        self._memory, self._disk = memory, disk
        self._number = 0

    def measure(self, prompt: list[int]) -> TierOutcome:
        """Time one prompt in each way."""
        plain = self._engine(None)
        computed = self._first_token(plain, prompt)
        pool = self._first_token(plain, prompt)
        with self._tier(self._memory, durable=False) as tier:
            stored = self._fill(self._engine(tier), prompt)
            memory, loaded = self._load(tier, prompt)
        with self._tier(self._disk, durable=True) as tier:
            self._fill(self._engine(tier), prompt)
            drop_from_page_cache(self._disk)
            disk, _ = self._load(tier, prompt)
            used = tier.folders["disk"].used_bytes
        return TierOutcome(
            tokens=len(prompt),
            computed=computed,
            stored=stored,
            memory=memory,
            disk=disk,
            pool=pool,
            loaded_tokens=loaded,
            file_bytes=used,
        )

    @contextmanager
    def _tier(self, folder: Path, *, durable: bool) -> Iterator[WarmTier]:
        """Yield an empty tier; what was stored is removed afterwards."""
        self._number += 1
        chunks = ChunkFolder(folder / str(self._number), _CAPACITY, durable=durable)
        tier = WarmTier(self._source.identity, memory=None, disk=chunks)
        try:
            yield tier
        finally:
            tier.close()
            chunks.shrink(0)
            chunks.close()

    def _engine(self, tier: WarmTier | None) -> Engine:
        return Engine(
            self._runner,
            (),
            EngineOptions(),
            policy=self._policy,
            kv_source=self._source,
            warm_tier=tier,
        )

    def _fill(self, engine: Engine, prompt: list[int]) -> float:
        """Compute a prompt and store it; return the seconds to its first token."""
        seconds = self._first_token(engine, prompt)
        while engine.has_work():
            engine.step()
        engine.kv_traffic.flush(_FLUSH_SECONDS)
        return seconds

    def _load(self, tier: WarmTier, prompt: list[int]) -> tuple[float, int]:
        """Return the seconds to the first token where KV is stored, and the tokens loaded."""
        engine = self._engine(tier)
        seconds = self._first_token(engine, prompt)
        stats = engine.stats().warm_tier
        return seconds, 0 if stats is None else stats.loaded_tokens

    def _first_token(self, engine: Engine, prompt: list[int]) -> float:
        sampling = EngineSamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        started = time.perf_counter()
        engine.add(EngineRequest(request_id="prompt", token_ids=prompt, sampling=sampling))
        while not engine.step():
            pass
        return time.perf_counter() - started


def drop_from_page_cache(folder: Path) -> None:
    """Have the files of a folder read from the disk the next time, where the system can do so."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in folder.rglob("*.kv"):
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(handle)


def _median(outcomes: list[TierOutcome]) -> TierOutcome:
    times = {
        name: median(getattr(outcome, name) for outcome in outcomes)
        for name in ("computed", "stored", "memory", "disk", "pool")
    }
    return msgspec.structs.replace(outcomes[-1], **times)


def tier_table(report: TierReport) -> ResultTable:
    """Return the table of a report."""
    return ResultTable(
        rows=[_cells(outcome) for outcome in report.outcomes],
        labels=0,
        caption=(
            f"{report.model}: milliseconds to the first token of prompts of real code, medians of"
            f" {report.repeats} prompts, each in every way in turn. Computed while stored: the tier"
            " is written to beside the steps. Memory, disk: loaded in chunks of 64 tokens, the rest"
            " of the prompt computed; the disk's files are not in the page cache. Pool: found in"
            f" the prefix cache. Files hold {report.token_bytes:,} bytes per token, headers"
            f" included. {report.backend}; {report.machine}; load {report.load:.1f}."
        ),
    )


def _cells(outcome: TierOutcome) -> dict[str, str]:
    return {
        "prompt tokens": f"{outcome.tokens:,}",
        "computed ms": f"{outcome.computed * 1e3:,.0f}",
        "computed while stored ms": f"{outcome.stored * 1e3:,.0f}",
        "disk ms": f"{outcome.disk * 1e3:,.0f}",
        "memory ms": f"{outcome.memory * 1e3:,.0f}",
        "pool ms": f"{outcome.pool * 1e3:,.1f}",
        "computed / disk": f"{outcome.computed / outcome.disk:.1f}",
        "computed / memory": f"{outcome.computed / outcome.memory:.1f}",
        "loaded tokens": f"{outcome.loaded_tokens:,}",
        "files": format_size(outcome.file_bytes),
    }


def tiers(
    model: ModelArgument = None,
    prompts: Annotated[
        str, typer.Option(help="Prompt lengths in tokens, separated by commas.")
    ] = "512,1000,2000,4000,8000",
    repeats: Annotated[int, typer.Option(min=1, help="Prompts of each length.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where on disk to write; by default in midfill's cache folder."),
    ] = None,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure the warm tier: time to the first token of KV computed, loaded, or in the pool."""
    lengths = parse_counts(prompts)
    with show_steps("loading") as progress:
        report = measure_tiers(
            model or DEFAULT_MODEL,
            lengths=lengths,
            repeats=repeats,
            threads=threads,
            folder=folder,
            progress=progress,
        )
    publish(report, tier_table(report), section="tiers", json=json, docs=docs)
