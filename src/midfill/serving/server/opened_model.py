"""OpenedModel: a model whose engine runs, and the service of one."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from midfill.config import ModelOptions
from midfill.engine.disaggregated.client import DisaggregatedClient
from midfill.engine.messages import EngineInfo
from midfill.engine.process.client import EngineClient
from midfill.engine.process.supervision import EngineProcess
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.infill.formats import FimFormat
from midfill.infill.window import WindowRule
from midfill.methods.resolver import AllowedMethods
from midfill.models.checkpoints.checkpoint import Checkpoint
from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import ServeOptions
from midfill.serving.server.key_file import key_digest
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.served_engine import ServedEngine
from midfill.serving.server.service import ModelService
from midfill.system.process import without_collections
from midfill.system.progress import Progress

AnyService = TypeVar("AnyService", bound=ModelService)


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model whose engine runs.

    Attributes:
        checkpoint: opened for its prompts.
        format: its FIM tokens.
        engine: runs it.
        info: what the engine reported of itself.
    """

    checkpoint: Checkpoint
    format: FimFormat | None
    engine: EngineClient | DisaggregatedClient
    info: EngineInfo


@contextlib.asynccontextmanager
async def open_engine(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None = None,
    spawned: EngineProcess | None = None,
) -> AsyncIterator[OpenedModel]:
    """Load a model and start its engine; see ``open_service``."""
    run = options.options
    AllowedMethods(run.allow_methods, run.method)  # checks them
    engine = _engine_client(options, path, on_progress, spawned)
    starting = asyncio.ensure_future(engine.start())
    try:
        # Meanwhile, the model is opened here, too; its faults are told by whoever finds them here.
        checkpoint, format = await asyncio.to_thread(_open_for_prompts, options, path)
        yield OpenedModel(checkpoint, format, engine, await starting)
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await engine.close()


def _open_for_prompts(options: ServeOptions, path: Path) -> tuple[Checkpoint, FimFormat | None]:
    """Open the model for what its prompts need, with all that the first request would wait for."""
    run = options.options
    with without_collections():
        checkpoint = open_model(path, run.adapter_path, run.weights)
        format = fim_format(checkpoint, options.fim_tokens)
        checkpoint.tokenizer.prepare()
    return checkpoint, format


def _engine_client(
    options: ServeOptions,
    path: Path,
    on_progress: Progress | None,
    spawned: EngineProcess | None,
) -> EngineClient | DisaggregatedClient:
    """Return the engine that the options ask for, not yet started."""
    client = (
        partial(DisaggregatedClient, workers=options.workers)
        if options.workers.prefill
        else EngineClient
    )
    return client(
        path,
        _with_scope(options.options, options.api_keys),
        on_progress=on_progress,
        max_queued_tokens=options.max_queued_tokens,
        logs=options.logs,
        step_timeout=options.step_timeout,
        max_tenant_tokens=options.max_queued_tokens_per_key,
        spawned=spawned,
    )


async def assemble_service(
    options: ServeOptions,
    checkpoint: Checkpoint,
    format: FimFormat | None,
    engine: ServedEngine,
    info: EngineInfo,
    tenants: Sequence[str],
    limits: RateLimits | None,
) -> ModelService:
    """Return the service of a model whose engine runs, here or elsewhere.

    Args:
        options: what to serve and how.
        checkpoint: the model's; only its tokenizer and what it says of itself are read.
        format: its FIM tokens.
        engine: runs it.
        info: what the engine reported of itself.
        tenants: everybody who may send requests.
        limits: what they may use; None is everything.
    """
    return await assemble(ModelService, options, checkpoint, format, engine, info, tenants, limits)


async def assemble(
    kind: type[AnyService],
    options: ServeOptions,
    checkpoint: Checkpoint,
    format: FimFormat | None,
    engine: ServedEngine,
    info: EngineInfo,
    tenants: Sequence[str] = ("",),
    limits: RateLimits | None = None,
    *,
    remembers: bool = True,
) -> AnyService:
    """Return a service of some kind; ``remembers`` is ``PromptEncoder``'s."""
    run = options.options
    window = None if options.window is None else WindowRule(*options.window)
    prompts = await asyncio.to_thread(
        PromptEncoder, checkpoint, format, info.context, window, options.snippets,
        options.document_memory, remembers=remembers,
    )  # fmt: skip
    return kind(
        options.served_name or short_name(options.model),
        engine,
        checkpoint.tokenizer,
        prompts,
        options.max_body_bytes,
        aliases=options.aliases,
        check_method=AllowedMethods(run.allow_methods, run.method, info.reuse).check,
        infilling_method=None if info.reuse == "none" else info.reuse,
        idle_prefill=options.idle_prefill,
        stream_interval=options.stream_interval,
        completion_timeout=options.completion_timeout,
        min_confidence=options.min_confidence,
        candidates=None if sum(options.workers) else options.candidates,
        tenants=tenants,
        limits=limits,
    )


def _with_scope(options: ModelOptions, api_keys: Sequence[str]) -> ModelOptions:
    """Return the engine's options with what makes the tenants' names unique beyond this server.

    Keys without a file have names by their order, which may be others' at the next start.
    """
    if not api_keys:
        return options
    digests = b"".join(key_digest(key.encode()) for key in api_keys)
    tier = structs.replace(options.warm_tier, scope=hashlib.sha256(digests).hexdigest())
    return structs.replace(options, warm_tier=tier)


def short_name(model: str) -> str:
    """Return the last part of a path to a file or folder; any other name as it is."""
    path = Path(model).expanduser()
    if not path.exists():
        return model
    path = path.resolve()
    return path.stem if path.is_file() else path.name
