"""The command ``midfill bench batch``."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from midfill.cli.option_groups import FlagsOf, with_option_groups
from midfill.cli.options import ModelArgument
from midfill.cli.progress import show_steps
from midfill.config import ModelOptions
from midfill.serving.options import ServeOptions
from midfill_lab.cli.bench.options import JsonOption
from midfill_lab.cli.outputs import DocsOption, SectionOption

if TYPE_CHECKING:
    from midfill_lab.bench.batch import BatchLoad

_RUN_FIELDS = ("threads", "kv_memory", "adapter", "token_budget", "scheduler", "speculation")
_KV_MEMORY = 64_000_000
"""About 2,800 tokens of the default model: a quarter of the default batch."""


@dataclass(frozen=True)
class LoadFlags:
    """The load; see ``BatchLoad``."""

    prefixes: Annotated[int, typer.Option(min=1, help="Tasks with a prefix of their own.")] = 8
    rows: Annotated[int, typer.Option(min=1, help="Rows per prefix.")] = 8
    prefix_characters: Annotated[int, typer.Option(min=1, help="Of a prefix.")] = 2000
    rest_characters: Annotated[int, typer.Option(min=1, help="Of the rest of a prompt.")] = 200
    output_tokens: Annotated[int, typer.Option(min=1, help="Of an answer.")] = 16
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each order, in turn.")] = 3
    seed: Annotated[int, typer.Option(help="Of all random choices.")] = 0

    @property
    def load(self) -> "BatchLoad":
        """The same for the benchmark."""
        from midfill_lab.bench.batch import BatchLoad

        return BatchLoad(**vars(self))


@with_option_groups
def batch(
    model: ModelArgument = None,
    *,
    load: LoadFlags,
    run: Annotated[dict[str, Any], FlagsOf(ModelOptions, *_RUN_FIELDS)],
    json: JsonOption = None,
    docs: DocsOption = None,
    section: SectionOption = "batch",
) -> None:
    """Run a batch with shared prefixes in BatchLLM's order and in its file's, in turn.

    The batch must be larger than the KV pool; 'midfill batch' runs a file of requests.
    """
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve_adapter
    from midfill_lab.bench.batch import batch_table, measure_batch
    from midfill_lab.reporting import publish_tables

    model = model or DEFAULT_MODEL
    adapter = resolve_adapter(model, run.pop("adapter"))
    run["kv_memory"] = run["kv_memory"] or _KV_MEMORY
    options = ModelOptions(**run, adapter=None if adapter is None else str(adapter))
    served = ServeOptions(model=model, options=options)
    with show_steps("making the batch") as progress:
        report = measure_batch(served, load.load, progress)
    publish_tables(report, [batch_table(report)], json=json, docs=docs, section=section)
