"""python -m benchmarks prefill: what sparse prefill saves and loses beside dense attention."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption
from midfill.cli.options import ModelOption
from midfill.cli.outputs import DocsOption
from midfill.cli.progress import show_steps


def prefill(
    methods: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:OPTION=VALUE,...],...",
            help="Methods of sparse prefill, separated by commas; all there are if not set.",
        ),
    ] = None,
    model: ModelOption = None,
    tokens: Annotated[
        int | None, typer.Option(min=2000, help="Tokens per prompt; 8000, with --quick 4000.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Runs that are timed; 3, with --quick 1.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer and shorter prompts, timed once.")
    ] = False,
    threads: Annotated[int, typer.Option(min=1, help="Threads that the model runs on.")] = 1,
    json: JsonOption = None,
    docs: DocsOption = None,
) -> None:
    """Measure methods of sparse prefill beside dense attention, on the same prompts.

    Costs: products of queries and keys, counted; processor time of attention and of the whole
    prefill. Quality: needles in real source text, and the distributions of a prompt's last tokens.
    Beside each method, lists of the same length that know nothing.
    """
    import msgspec

    from benchmarks.prefill.report import prefill_table
    from benchmarks.prefill.results import QUICK, PrefillOptions
    from benchmarks.prefill.run import measure_prefill
    from midfill.errors import OptionError
    from midfill.lab.bench.methods.variants import split_specifications
    from midfill.methods.registry import methods_of, parse_name, resolve_method
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.system.reporting.publish import publish

    chosen = {"tokens": tokens, "repeats": repeats, "threads": threads}
    options = msgspec.structs.replace(
        QUICK if quick else PrefillOptions(),
        **{name: value for name, value in chosen.items() if value is not None},
    )
    known = methods_of("prefill")
    named = known if methods is None else split_specifications(methods)
    for text in named:
        resolve_method(text)
        if parse_name(text) not in known:
            raise OptionError(
                f"--methods takes methods of sparse prefill ({', '.join(known)}),"
                f" not {parse_name(text)}"
            )
    with show_steps("loading") as progress:
        report = measure_prefill(model or DEFAULT_MODEL, named, options, progress)
    table = prefill_table(report)
    publish(report, table.drawn(), table.markdown(), section="prefill", json=json, docs=docs)
