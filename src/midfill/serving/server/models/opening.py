"""run_models: from ServeOptions to a server of several models."""

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from msgspec import structs

from midfill.errors import OptionError
from midfill.models.checkpoints.model_store import resolve_adapter
from midfill.serving.options import ServeOptions, SeveralModels
from midfill.serving.server.app import DIALECTS, create_app
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.listening import Listener, answer_until_stopped, listen
from midfill.serving.server.middleware import OwnHosts
from midfill.serving.server.models.host import HostedModel, ModelHost, RunningModel
from midfill.serving.server.models.memory import kv_bytes_each
from midfill.serving.server.models.switch import ModelSwitch
from midfill.serving.server.opened_model import open_engine, short_name
from midfill.serving.server.startup import service_of
from midfill.system.machine import available_memory
from midfill.system.progress import Progress

_SHARE = 0.9
"""Of the memory that is free at the start; the server's own processes take some, too."""


def run_models(
    options: ServeOptions,
    paths: Mapping[str, Path],
    on_progress: Progress | None = None,
    on_ready: Callable[[str, ModelHost], None] | None = None,
) -> None:
    """Serve several models until interrupted.

    Args:
        options: what to serve and how.
        paths: each model's checkpoint, already on disk, by name or path as the options name it.
        on_progress: called with (stage, done, total) while the first models load.
        on_ready: called with the URL and the models once clients can connect.

    Raises:
        MidfillError: two have one name, they don't fit in the memory, the address can't be used, or
            the first model or a pinned one can't be loaded.
    """
    models = {short_name(model): model for model in paths}
    if len(models) < len(paths):
        named = ", ".join(paths)
        raise OptionError(f"two models of one name can't be told apart: {named}; rename a file")
    listen(options, partial(_serve, options, models, paths, on_progress, on_ready))


async def _serve(
    options: ServeOptions,
    models: Mapping[str, str],
    paths: Mapping[str, Path],
    on_progress: Progress | None,
    on_ready: Callable[[str, ModelHost], None] | None,
    listener: Listener,
) -> None:
    several = options.several
    memory = int(available_memory() * _SHARE) if several.memory is None else several.memory
    weights = {name: _stored_bytes(paths[model]) for name, model in models.items()}
    kv = options.options.kv_memory or kv_bytes_each(weights.values(), memory)
    hosted = [
        HostedModel(name, weights[name] + kv, pinned=model in several.pinned)
        for name, model in models.items()
    ]
    limits = RateLimits(listener.keys.limits_of)
    loading = [on_progress]

    @contextlib.asynccontextmanager
    async def open_model(name: str) -> AsyncIterator[RunningModel]:
        one = options_of(options, models[name], kv)
        keys = listener.keys
        async with (
            open_engine(one, paths[models[name]], loading[0]) as opened,
            service_of(one, opened, keys.tenants, limits) as service,
        ):
            service.listed = host.listed
            app = create_app(
                service, keys, listener.traces, redact=options.logs.redact, monitored=host
            )
            info = opened.info
            yield RunningModel(app, service, info.weight_bytes + info.kv_bytes)

    host = ModelHost(hosted, open_model, memory)

    def listening() -> None:
        loading[0] = None  # the terminal has the banner now
        if on_ready is not None:
            on_ready(listener.url, host)

    try:
        await host.start()
        switch = ModelSwitch(host, listener.keys, DIALECTS, options.max_body_bytes)
        own_hosts = listener.own_hosts
        app = switch if own_hosts is None else OwnHosts(switch, own_hosts)
        await answer_until_stopped(app, listener, host, listening, options=options.listen)
    finally:
        await host.close()


def options_of(options: ServeOptions, model: str, kv_bytes: int) -> ServeOptions:
    """Return the options of one of several models.

    Args:
        options: of all.
        model: name or path.
        kv_bytes: what its KV may take where the options don't say it.
    """
    adapter = resolve_adapter(model, None)
    run = structs.replace(options.options, adapter=None if adapter is None else str(adapter))
    if run.kv_memory is None:
        run = structs.replace(run, memory_share=min(1.0, kv_bytes / available_memory()))
    return replace(options, model=model, several=SeveralModels(), options=run)


def _stored_bytes(path: Path) -> int:
    """Return the size of a checkpoint's weights on disk."""
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)
