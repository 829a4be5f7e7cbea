"""The command ``python -m benchmarks plugins``."""

from typing import Annotated

import typer

from midfill.cli.bench.options import JsonOption
from midfill.cli.options import (
    AdapterOption,
    FimTokensOption,
    ModelArgument,
    SnippetsOption,
    WindowOption,
)
from midfill.cli.outputs import DocsOption, SectionOption
from midfill.cli.progress import show_steps
from midfill.errors import OptionError
from midfill.system.extras import require
from midfill.system.reporting.publish import publish

OnlyOption = Annotated[
    list[str] | None,
    typer.Option(metavar="CLIENT", help="A client as the table names it; repeatable."),
]
SessionsOption = Annotated[int, typer.Option(min=1, help="How many sessions.")]
RoundsOption = Annotated[int, typer.Option(min=1, help="States of the editor in each session.")]
SeedOption = Annotated[int, typer.Option(help="Of all random choices.")]


def plugins(
    model: ModelArgument = None,
    adapter: AdapterOption = None,
    fim_tokens: FimTokensOption = None,
    window: WindowOption = None,
    snippets: SnippetsOption = None,
    only: OnlyOption = None,
    sessions: SessionsOption = 3,
    rounds: RoundsOption = 600,
    seed: SeedOption = 0,
    json: JsonOption = None,
    docs: DocsOption = None,
    section: SectionOption = "plugins",
) -> None:
    """Count what editing sessions compute as each editor plugin sends them, without the model.

    Every client replays the same sessions through the server's own endpoints: windows, templates,
    snippets, requests made in advance and equal ones are as the plugin sends them. "all / whole"
    compares with a client that sends whole documents and nothing else.
    """
    require("bench plugins", ["httpx"], extra="bench")
    from benchmarks.plugins.measure import (
        PluginsOptions,
        measure_plugins,
        plugins_of,
        plugins_table,
    )
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
    from midfill.models.checkpoints.opening import open_model

    name = model or DEFAULT_MODEL
    checkpoint = open_model(resolve(name), resolve_adapter(name, adapter))
    known = plugins_of(checkpoint)
    for one in only or ():
        if one not in known:
            raise OptionError(f"--only {one}: there are {', '.join(known)}")
    options = PluginsOptions(
        sessions=sessions, rounds=rounds, window=window, snippets=snippets, seed=seed
    )
    with show_steps("preparing") as progress:
        report = measure_plugins(
            checkpoint, name, options, names=only, fim_tokens=fim_tokens, progress=progress
        )
    table = plugins_table(report)
    publish(report, table.drawn(), table.markdown(), section=section, json=json, docs=docs)
