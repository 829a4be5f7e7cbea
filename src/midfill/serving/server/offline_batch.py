"""run_batch: ``midfill batch``: a model is loaded, answers a file of requests, and ends."""

import asyncio
import dataclasses
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from msgspec import structs

from midfill.engine.process.supervision import EngineProcess
from midfill.errors import OptionError
from midfill.serving.options import ServeOptions
from midfill.serving.server.batch.api import InProcessApi
from midfill.serving.server.batch.job import BatchJob, BatchProgress
from midfill.serving.server.batch.opening import open_row_service
from midfill.serving.server.batch.results import ResultFile
from midfill.serving.server.batch.row_budget import RowBudget
from midfill.serving.server.batch.rows import RowFile
from midfill.serving.server.opened_model import open_engine
from midfill.system.progress import Progress

_MAX_RUNNING = 512
"""Answers in progress. What bounds them is KV memory; this bounds the arrays of a step."""


def run_batch(
    options: ServeOptions,
    path: Path,
    source: Path,
    output: Path,
    on_progress: Progress | None = None,
    report: Callable[[BatchProgress], None] = lambda progress: None,
    spawned: EngineProcess | None = None,
) -> BatchProgress:
    """Answer the rows of a file that have no result yet; return how it went.

    Args:
        options: what answers them and how.
        path: the checkpoint, already on disk.
        source: the rows.
        output: where their results go, and where those of an interrupted run are.
        on_progress: called with (stage, done, total) while the engine loads.
        report: called with the batch's progress.
        spawned: a process for the engine that was started ahead.

    Raises:
        OptionError: source and output are one file.
        MidfillError: the rows can't be read, the results can't be written, or the model can't be
            loaded.
    """
    if output.exists() and source.exists() and output.samefile(source):
        raise OptionError("the output is the input; name another file with --output")
    with (
        closing(RowFile(source, options.max_body_bytes)) as rows,
        closing(ResultFile(output)) as results,
    ):
        return asyncio.run(
            _run(for_throughput(options), path, rows, results, on_progress, report, spawned)
        )


_ANY_NUMBER = 1 << 20
"""Of rows of a step: the token budget alone bounds them."""


def for_throughput(options: ServeOptions) -> ServeOptions:
    """Return the options with as many answers in progress as memory allows, and long steps."""
    engine = structs.replace(
        options.options,
        max_running=_MAX_RUNNING,
        offline_token_budget=_ANY_NUMBER,
    )
    return dataclasses.replace(options, options=engine)


async def _run(
    options: ServeOptions,
    path: Path,
    rows: RowFile,
    results: ResultFile,
    on_progress: Progress | None,
    report: Callable[[BatchProgress], None],
    spawned: EngineProcess | None,
) -> BatchProgress:
    async with open_engine(options, path, on_progress, spawned) as opened:
        service = await open_row_service(options, opened)
        try:
            budget = RowBudget(opened.info.slots)
            job = BatchJob(rows, results, InProcessApi(service), budget, report)
            return await job.run()
        finally:
            service.close()
