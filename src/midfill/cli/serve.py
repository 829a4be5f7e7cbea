"""``midfill serve``: the server, with a banner that says what is served and how to try it."""

import dataclasses
import json
import logging
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec import structs

from midfill.cli.option_groups import FlagsOf, with_option_groups
from midfill.cli.options import ModelArguments
from midfill.cli.usage import GroupedHelp, root_app
from midfill.serving.options import ServeOptions

if TYPE_CHECKING:
    from midfill.config import ModelOptions
    from midfill.engine.messages import EngineInfo
    from midfill.engine.process.supervision import EngineProcess
    from midfill.serving.server.models.host import ModelHost
    from midfill.serving.server.service import ModelService

_log = logging.getLogger(__name__)


@with_option_groups
def serve(
    *, models: ModelArguments = None, served: Annotated[dict[str, Any], FlagsOf(ServeOptions)]
) -> None:
    """Serve models with OpenAI's API; without MODEL, a small one, downloaded on first use."""
    from midfill.engine.process.supervision import EngineProcess
    from midfill.system.process import ended_by_sigterm, ends_held_back

    models = models or []
    served["several"] = dataclasses.replace(served["several"], others=tuple(models[1:]))
    with ended_by_sigterm(), ExitStack() as started:
        if len(models) > 1:
            _run_several(models[0], served)
            return
        # First of all: the two processes load their libraries at the same time.
        with ends_held_back():
            process = EngineProcess.spawn()
            started.callback(process.discard)
        _run(models[0] if models else None, served, process)


app = root_app("The command line without other commands, whose files a start need not load.")
app.command(cls=GroupedHelp)(serve)


def _run(model: str | None, served: dict[str, Any], process: "EngineProcess") -> None:
    """Run the server; show how loading goes, and then the banner."""
    from midfill.system.process import start_in_background, without_collections

    with without_collections():
        from midfill.cli.progress import show_progress
        from midfill.engine.messages import Prepare
        from midfill.models.checkpoints.model_store import (
            DEFAULT_MODEL,
            awaits_download,
            resolve,
            resolve_adapter,
        )
        from midfill.serving.server.startup import run_server
        from midfill.system.logs import configure_logs

    configure_logs(served["logs"])
    model = model or DEFAULT_MODEL
    engine: ModelOptions = served.pop("options")
    adapter = resolve_adapter(model, engine.adapter)
    engine = structs.replace(engine, adapter=None if adapter is None else str(adapter))
    options = ServeOptions(model=model, options=engine, **served)
    if awaits_download(model):
        process.send(Prepare(engine))
    with ExitStack() as shown:
        progress = shown.enter_context(show_progress(_log.info))
        path = resolve(model, progress)

        def ready(url: str, info: "EngineInfo", service: "ModelService") -> None:
            shown.close()
            typer.echo(banner(url, info, service, options.key_header))
            if model == DEFAULT_MODEL and info.backend.startswith("CPU"):
                # The first request need not wait for it.
                start_in_background(_show_code_models, "models for code")

        run_server(options, path, progress, ready, process)


def _run_several(first: str, served: dict[str, Any]) -> None:
    """Run a server of several models."""
    from midfill.cli.progress import show_progress
    from midfill.models.checkpoints.model_store import resolve
    from midfill.serving.server.models.opening import run_models
    from midfill.system.logs import configure_logs

    configure_logs(served["logs"])
    options = ServeOptions(model=first, **served)
    with ExitStack() as shown:
        progress = shown.enter_context(show_progress(_log.info))
        paths = {model: resolve(model, progress) for model in (first, *options.several.others)}

        def ready(url: str, host: "ModelHost") -> None:
            shown.close()
            typer.echo(banner_of_several(url, host, options.key_header))

        run_models(options, paths, progress, ready)


def _show_code_models() -> None:
    """Say what the default model is, and what else this machine could serve."""
    from midfill.cli.code_models import code_models
    from midfill.system.bandwidth import memory_bandwidth
    from midfill.system.machine import available_memory

    bandwidth = memory_bandwidth()  # measured at the first start on a machine, later read
    lines = [f"  {line}\n" for line in code_models(bandwidth, available_memory(), usable=True)]
    if not lines:
        return
    with suppress(OSError):  # nobody reads what follows the banner
        typer.echo(
            "This model is a demonstration: small, and often wrong. Models for code, with what"
            f" memory\nof {bandwidth / 1e9:.0f} GB/s allows at most (midfill models lists more):\n"
            + "".join(lines)
        )


def banner(url: str, info: "EngineInfo", service: "ModelService", key_header: str) -> str:
    """Return what is shown when the server is ready: what it serves and how to try it."""
    from midfill.system.machine import format_size
    from midfill.version import __version__

    if (format := service.fim_format) is not None:
        sentinels = [each.text for each in (format.prefix, format.suffix, format.middle) if each]
        infill = f"FIM tokens {' '.join(sentinels)}"
        body: dict[str, object] = {
            "prompt": "def area(width, height):\n"
            '    """The area of a rectangle."""\n'
            "    return wid",
            "suffix": "\n\n\nprint(area(2, 3))\n",
        }
    else:
        infill = "no FIM tokens known: the model sees the prefix alone (--fim-tokens names some)"
        body = {"prompt": "def mean(values):\n    return "}
    body |= {"max_tokens": 16, "temperature": 0}
    adapter = f"\n  adapter  {info.adapter}" if info.adapter is not None else ""
    method = f"\n  method   {info.method}" if info.method != "none" else ""
    method += f"\n  reuse    {info.reuse}" if info.reuse != "none" else ""
    aliases = f"\n  aliases  {', '.join(service.aliases)}" if service.aliases else ""
    return f"""midfill {__version__} serves {service.name}{aliases}
  model    {info.layers} layers, weights {format_size(info.weight_bytes)}, {info.backend}{adapter}
  KV pool  {format_size(info.kv_bytes)} ({info.kv_bytes} bytes), {info.slots} tokens
  context  {info.context} tokens
  infill   {infill}{method}
  loaded   in {info.load_seconds:.1f} s
  listens  on {url} (Ctrl-C stops it)

Try it:
  curl {url}/v1/completions -H 'Content-Type: application/json'{key_header} \\
    -d '{json.dumps(body)}'
"""


def banner_of_several(url: str, host: "ModelHost", key_header: str) -> str:
    """Return what is shown when a server of several models is ready."""
    from midfill.system.machine import format_size
    from midfill.version import __version__

    listed = host.listed()
    width = max(len(model.name) for model in listed)
    lines = [
        f"  {model.name:{width}}  {format_size(model.bytes)},"
        f" {'in memory' if model.service is not None else 'loaded when a request names it'}"
        for model in listed
    ]
    body = {"model": listed[0].name, "prompt": "def mean(values):\n    return ", "max_tokens": 16}
    models = "\n".join(lines)
    return f"""midfill {__version__} serves {len(listed)} models
{models}
  memory   {format_size(host.memory)} for all of them
  listens  on {url} (Ctrl-C stops it)

Try it:
  curl {url}/v1/completions -H 'Content-Type: application/json'{key_header} \\
    -d '{json.dumps(body)}'
"""
