"""The command ``python -m benchmarks kv-dtypes``."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption
from midfill.cli.options import ModelArgument, ThreadsOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps
from midfill.cli.values import parse_counts
from midfill.config import KvDtype
from midfill.system.reporting.publish import publish


def kv_dtypes(
    model: ModelArgument = None,
    first: Annotated[KvDtype, typer.Option(help="Format that the other is compared with.")] = "f16",
    second: Annotated[KvDtype, typer.Option(help="The other format.")] = "bf16",
    prefill: Annotated[str, typer.Option(help="Prompt lengths, separated by commas.")] = "512,2000",
    contexts: Annotated[
        str, typer.Option(help="Tokens before the first decoded one, separated by commas.")
    ] = "16,2000",
    pairs: Annotated[int, typer.Option(min=6, help="Runs with each format, in turn.")] = 15,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Compare the speed of two formats of the KV cache, in turn in this process."""
    from benchmarks.kv_dtypes import KvDtypesOptions, kv_dtypes_table, measure_kv_dtypes
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL

    options = KvDtypesOptions(
        dtypes=(first, second),
        prefill=parse_counts(prefill),
        contexts=parse_counts(contexts),
        pairs=pairs,
    )
    with show_steps("loading") as progress:
        report = measure_kv_dtypes(model or DEFAULT_MODEL, options, threads, progress)
    table = kv_dtypes_table(report)
    publish(report, table.drawn(), table.markdown(), section="kv-dtypes", json=json, docs=docs)
