"""``midfill serve``: the server, with a banner that says what is served and how to try it."""

import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from midfill.cli.engine_options import IdlePrefillOption, StepFlags, WarmTierFlags, WeightsFlags
from midfill.cli.option_groups import with_option_groups
from midfill.cli.options import (
    AdapterOption,
    DeviceOption,
    DocumentMemoryOption,
    ModelArgument,
    ThreadsOption,
)
from midfill.cli.server_options import (
    AccessFlags,
    HostOption,
    LogFlags,
    NameFlags,
    OtlpTracesOption,
    PortOption,
    PromptFlags,
    TlsFlags,
)
from midfill.config import (
    DEFAULT_COMPLETION_TIMEOUT,
    DEFAULT_MAX_QUEUED_TOKENS,
    DEFAULT_STEP_TIMEOUT,
    ListenOptions,
    Workers,
)

if TYPE_CHECKING:
    from midfill.config import ModelOptions, ServeOptions
    from midfill.engine.messages import EngineInfo
    from midfill.serving.server.service import ModelService

_log = logging.getLogger(__name__)

MaxQueuedTokensOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Maximum number of prompt tokens whose requests wait for their first token. Requests"
        " beyond it are refused with status 429.",
    ),
]
MaxQueuedPerKeyOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="The same for each API key; if not set, half of it where requests of other keys wait,"
        " too.",
    ),
]
CompletionTimeoutOption = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Time for which an infill request waits for its first token (for its answer, if that"
        " is not streamed) unless its client says how long it waits; 0 is for ever.",
    ),
]
StepTimeoutOption = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Restart the engine when it takes no step, and does not say that it is idle, for so"
        " long; 0 never does.",
    ),
]
MaxConnectionsOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Maximum number of open connections. Beyond it, idle ones are closed, and then new"
        " ones refused with status 503.",
    ),
]
ClientTimeoutOption = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Time in which a client must have sent its request, and after which one that takes"
        " nothing of its answer is disconnected; 0 is for ever.",
    ),
]
DrainTimeoutOption = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="SECONDS",
        help="Time for which answers in progress may go on when the server is told to stop.",
    ),
]
StreamIntervalOption = Annotated[
    float,
    typer.Option(
        "--stream-interval-ms",
        min=0,
        metavar="MS",
        help="Milliseconds for which tokens of a streamed answer, after its first, may be held"
        " back to be sent together: each message takes time from the model. 0 sends each at once.",
    ),
]
PrefillWorkersOption = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Engine processes that compute prompts, and their answers' first tokens; with"
        " --decode-workers. Each has --threads and --kv-memory of its own.",
    ),
]
DecodeWorkersOption = Annotated[
    int,
    typer.Option(
        min=0,
        metavar="N",
        help="Engine processes that go on with the answers, so that prompts never slow them down;"
        " with --prefill-workers. Without both, one engine does everything.",
    ),
]
KvTransferKeyOption = Annotated[
    str | None,
    typer.Option(
        envvar="MIDFILL_KV_TRANSFER_KEY",
        metavar="KEY",
        help="Let whoever sends this key move KV between servers, that of all API keys.",
    ),
]
OldStreamIntervalOption = Annotated[
    float | None, typer.Option("--stream-interval", min=0, metavar="MS", hidden=True)
]


@dataclass(frozen=True)
class WorkerFlags:
    """How many engine processes compute prompts, and how many answers."""

    prefill_workers: PrefillWorkersOption = 0
    decode_workers: DecodeWorkersOption = 0

    @property
    def counts(self) -> Workers:
        """The same for the server."""
        return Workers(self.prefill_workers, self.decode_workers)


@dataclass(frozen=True)
class WaitingFlags:
    """How many requests wait, and how long, for an engine that takes its steps."""

    max_queued_tokens: MaxQueuedTokensOption = DEFAULT_MAX_QUEUED_TOKENS
    max_queued_tokens_per_key: MaxQueuedPerKeyOption = None
    completion_timeout: CompletionTimeoutOption = DEFAULT_COMPLETION_TIMEOUT
    step_timeout: StepTimeoutOption = DEFAULT_STEP_TIMEOUT


@dataclass(frozen=True)
class ConnectionFlags:
    """How many connections are open, and how long."""

    max_connections: MaxConnectionsOption = 2048
    client_timeout: ClientTimeoutOption = 30
    drain_timeout: DrainTimeoutOption = 8

    @property
    def options(self) -> ListenOptions:
        """The same for the server."""
        return ListenOptions(
            max_connections=self.max_connections,
            client_timeout=self.client_timeout,
            drain_timeout=self.drain_timeout,
        )


@dataclass(frozen=True)
class StreamFlags:
    """How long tokens of a stream are held back."""

    stream_interval_ms: StreamIntervalOption = 25
    stream_interval: OldStreamIntervalOption = None

    @property
    def seconds(self) -> float:
        """The interval."""
        old = self.stream_interval
        return (self.stream_interval_ms if old is None else old) / 1000


@with_option_groups
def serve(
    *,
    model: ModelArgument = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    names: NameFlags,
    access: AccessFlags,
    tls: TlsFlags,
    kv_transfer_key: KvTransferKeyOption = None,
    adapter: AdapterOption = None,
    prompts: PromptFlags,
    document_memory: DocumentMemoryOption = "256MB",  # type: ignore[assignment]
    device: DeviceOption = None,
    threads: ThreadsOption = None,
    loading: WeightsFlags,
    steps: StepFlags,
    warm_tier: WarmTierFlags,
    workers: WorkerFlags,
    waiting: WaitingFlags,
    connections: ConnectionFlags,
    idle_prefill: IdlePrefillOption = True,
    streams: StreamFlags,
    log: LogFlags,
    otlp_traces_endpoint: OtlpTracesOption = None,
) -> None:
    """Serve a model with OpenAI's API; without MODEL, a small one that is fetched at first."""
    from midfill.config import ServeOptions
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL, resolve_adapter
    from midfill.system.logs import configure_logs

    configure_logs(log.options)
    folder = resolve_adapter(model or DEFAULT_MODEL, adapter)
    options = ServeOptions(
        model=model or DEFAULT_MODEL,
        served_name=names.served_name,
        aliases=names.aliases,
        host=host,
        port=port,
        api_keys=access.api_keys,
        api_key_file=access.api_key_file,
        kv_transfer_key=kv_transfer_key,
        tls=tls.files,
        allowed_hosts=access.allowed_hosts,
        fim_tokens=prompts.fim_tokens,
        window=prompts.window,
        snippets=prompts.snippets,
        document_memory=document_memory,
        max_queued_tokens=waiting.max_queued_tokens,
        max_queued_tokens_per_key=waiting.max_queued_tokens_per_key,
        completion_timeout=waiting.completion_timeout,
        step_timeout=waiting.step_timeout,
        workers=workers.counts,
        listen=connections.options,
        idle_prefill=idle_prefill,
        stream_interval=streams.seconds,
        logs=log.options,
        otlp_traces_endpoint=otlp_traces_endpoint,
        options=_merged(steps.apply(loading.options), warm_tier, device, threads, folder),
    )
    _run(options)


def _merged(
    options: "ModelOptions",
    warm_tier: WarmTierFlags,
    device: str | None,
    threads: int | None,
    adapter: Path | None,
) -> "ModelOptions":
    """Return the options of an engine process with these."""
    return msgspec.structs.replace(
        options,
        device=device,
        threads=threads,
        adapter=None if adapter is None else str(adapter),
        warm_tier=warm_tier.options,
    )


def _run(options: "ServeOptions") -> None:
    """Run the server; show how loading goes, and then the banner."""
    from midfill.cli.progress import show_progress
    from midfill.models.checkpoints.model_store import resolve
    from midfill.serving.server.run import run_server

    with ExitStack() as shown:
        progress = shown.enter_context(show_progress(_log.info))
        path = resolve(options.model, progress)

        def ready(url: str, info: "EngineInfo", service: "ModelService") -> None:
            shown.close()
            typer.echo(banner(url, info, service))

        run_server(options, path, progress, ready)


def banner(url: str, info: "EngineInfo", service: "ModelService") -> str:
    """Return what is shown when the server is ready: what it serves and how to try it."""
    from midfill.system.reporting import format_size
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
    aliases = f"\n  aliases  {', '.join(service.aliases)}" if service.aliases else ""
    return f"""midfill {__version__} serves {service.name}{aliases}
  model    {info.layers} layers, weights {format_size(info.weight_bytes)}, {info.backend}{adapter}
  KV pool  {format_size(info.kv_bytes)} ({info.kv_bytes} bytes), {info.slots} tokens
  context  {info.context} tokens
  infill   {infill}{method}
  loaded   in {info.load_seconds:.1f} s
  listens  on {url} (Ctrl-C stops it)

Try it:
  curl {url}/v1/completions -H 'Content-Type: application/json' \\
    -d '{json.dumps(body)}'
"""
