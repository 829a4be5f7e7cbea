"""``midfill serve``: the server, with a banner that says what is served and how to try it."""

import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.options import (
    AdapterOption,
    BackendOption,
    ContextOption,
    DeviceOption,
    DocumentMemoryOption,
    FimTokensOption,
    KvDtypeOption,
    KvMemoryOption,
    MethodOption,
    ModelArgument,
    SnippetsOption,
    SpeculationOption,
    ThreadsOption,
    WeightsFormatOption,
    WindowOption,
)
from midfill.cli.values import parse_codec, parse_size
from midfill.config import (
    DEFAULT_COMPLETION_TIMEOUT,
    DEFAULT_MAX_QUEUED_TOKENS,
    DEFAULT_STEP_TIMEOUT,
    LogFormat,
    LogLevel,
    SchedulerName,
)

if TYPE_CHECKING:
    from midfill.config import TlsFiles
    from midfill.engine.messages import EngineInfo
    from midfill.server.service import ModelService


API_KEY_VARIABLE = "MIDFILL_API_KEY"

HostOption = Annotated[str, typer.Option(help="Address to listen on.")]
PortOption = Annotated[
    int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
]
ServedNameOption = Annotated[
    str | None, typer.Option(help="What clients call the model.", metavar="NAME")
]
AliasOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A further name of the model; may be repeated. Editors that know templates by a"
        " model's name then know this one's.",
        metavar="NAME",
    ),
]
ApiKeyOption = Annotated[
    list[str] | None,
    typer.Option(
        envvar=API_KEY_VARIABLE,
        help="Key that clients must send; may be repeated (in the variable: separated by spaces)."
        " Each key has its own cache. A line NAME:sha256:DIGEST of 'midfill keys' stands for its"
        " key.",
    ),
]
ApiKeyFileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Keys that clients must send, as 'midfill keys' writes them; read again on SIGHUP.",
    ),
]
SslCertfileOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Speak HTTPS with this certificate chain (PEM); read again on SIGHUP.",
    ),
]
SslKeyfileOption = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The certificate's private key (PEM), if it is not in it."),
]
SslCaCertsOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Let in only clients that have a certificate signed by one of these (PEM).",
    ),
]
AllowedHostOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME",
        help="A server without API keys that listens on 127.0.0.1 answers under no other names than"
        " its machine's own; this is one more, such as a proxy's. May be repeated.",
    ),
]
TokenBudgetOption = Annotated[
    int,
    typer.Option(
        min=1,
        help="Maximum tokens per step. Lower: steadier streams; higher: faster prompts.",
    ),
]
SchedulerOption = Annotated[
    SchedulerName,
    typer.Option(
        metavar="NAME",
        help="How prompts longer than the token budget are computed beside running answers:"
        " sarathi-serve in chunks of tokens, layered-prefill by groups of layers. Answers are the"
        " same.",
    ),
]
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
IdlePrefillOption = Annotated[
    bool,
    typer.Option(
        help="While the engine is idle, compute the prompts that documents will probably need next."
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
LogFormatOption = Annotated[
    LogFormat,
    typer.Option(help="How to log on stderr: text for people, json for programs."),
]
LogLevelOption = Annotated[
    LogLevel,
    typer.Option(help="What is less urgent is not logged. Each finished request is info."),
]
RedactOption = Annotated[
    bool,
    typer.Option(
        "--redact",
        help="Leave out of logs and traces whatever a client could have chosen: its request ids,"
        " unknown paths, messages of exceptions, what libraries log. Prompts, answers and keys are"
        " never logged.",
    ),
]
AllowMethodOption = Annotated[
    list[str] | None,
    typer.Option(
        help="A method that requests may choose for their own prompt (midfill.method); may be"
        " repeated. 'none' lets them keep all KV, 'any' allows everything.",
        metavar="NAME",
    ),
]
OtlpTracesOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send a trace of each request to this OpenTelemetry collector, with OTLP over HTTP.",
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
WarmTierMemoryOption = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Host memory for KV that has no room in the KV pool, like 4GB. It outlives the engine"
        " process, not the server.",
    ),
]
WarmTierDiskOption = Annotated[
    int,
    typer.Option(
        parser=parse_size,
        metavar="SIZE",
        help="Disk space for KV, like 20GB: documents stay warm when the server is restarted.",
    ),
]
WarmTierFolderOption = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="Where --warm-tier-disk keeps its files; by default in midfill's cache folder.",
    ),
]
WarmTierCodecOption = Annotated[
    str,
    typer.Option(
        parser=parse_codec,
        metavar="NAME[:OPTION=VALUE,...]",
        help="How the warm tier writes KV: none, as it was computed, or cachegen, less than a"
        " quarter as large, whose answers are not exact.",
    ),
]
OldStreamIntervalOption = Annotated[
    float | None, typer.Option("--stream-interval", min=0, metavar="MS", hidden=True)
]


def serve(
    model: ModelArgument = None,
    host: HostOption = "127.0.0.1",
    port: PortOption = 8080,
    served_name: ServedNameOption = None,
    alias: AliasOption = None,
    api_key: ApiKeyOption = None,
    api_key_file: ApiKeyFileOption = None,
    kv_transfer_key: KvTransferKeyOption = None,
    ssl_certfile: SslCertfileOption = None,
    ssl_keyfile: SslKeyfileOption = None,
    ssl_ca_certs: SslCaCertsOption = None,
    allowed_host: AllowedHostOption = None,
    backend: BackendOption = "auto",
    device: DeviceOption = None,
    weights: WeightsFormatOption = "auto",
    threads: ThreadsOption = None,
    context: ContextOption = None,
    kv_memory: KvMemoryOption = None,
    kv_cache_dtype: KvDtypeOption = "auto",
    adapter: AdapterOption = None,
    fim_tokens: FimTokensOption = None,
    window: WindowOption = None,
    snippets: SnippetsOption = None,
    document_memory: DocumentMemoryOption = "256MB",  # type: ignore[assignment]
    token_budget: TokenBudgetOption = 128,
    scheduler: SchedulerOption = "sarathi-serve",
    prefill_workers: PrefillWorkersOption = 0,
    decode_workers: DecodeWorkersOption = 0,
    max_queued_tokens: MaxQueuedTokensOption = DEFAULT_MAX_QUEUED_TOKENS,
    max_queued_tokens_per_key: MaxQueuedPerKeyOption = None,
    completion_timeout: CompletionTimeoutOption = DEFAULT_COMPLETION_TIMEOUT,
    step_timeout: StepTimeoutOption = DEFAULT_STEP_TIMEOUT,
    max_connections: MaxConnectionsOption = 2048,
    client_timeout: ClientTimeoutOption = 30,
    drain_timeout: DrainTimeoutOption = 8,
    idle_prefill: IdlePrefillOption = True,
    stream_interval_ms: StreamIntervalOption = 25,
    stream_interval: OldStreamIntervalOption = None,
    speculation: SpeculationOption = True,
    method: MethodOption = "none",
    log_format: LogFormatOption = "text",
    log_level: LogLevelOption = "info",
    redact: RedactOption = False,
    otlp_traces_endpoint: OtlpTracesOption = None,
    allow_method: AllowMethodOption = None,
    warm_tier_memory: WarmTierMemoryOption = "0",  # type: ignore[assignment]
    warm_tier_disk: WarmTierDiskOption = "0",  # type: ignore[assignment]
    warm_tier_folder: WarmTierFolderOption = None,
    warm_tier_codec: WarmTierCodecOption = "none",
) -> None:
    """Serve a model with OpenAI's API; without MODEL, a small one that is fetched at first."""
    from midfill.checkpoints.model_store import DEFAULT_MODEL, resolve, resolve_adapter
    from midfill.cli.progress import show_progress
    from midfill.config import (
        ListenOptions,
        LogOptions,
        ModelOptions,
        ServeOptions,
        WarmTierOptions,
        Workers,
    )
    from midfill.server.run import run_server
    from midfill.system.logs import configure_logs

    logs = LogOptions(format=log_format, level=log_level, redact=redact)
    configure_logs(logs)
    folder = resolve_adapter(model or DEFAULT_MODEL, adapter)
    options = ServeOptions(
        model=model or DEFAULT_MODEL,
        served_name=served_name,
        aliases=tuple(alias or ()),
        host=host,
        port=port,
        api_keys=given_api_keys(api_key),
        api_key_file=api_key_file,
        kv_transfer_key=kv_transfer_key,
        tls=given_tls(ssl_certfile, ssl_keyfile, ssl_ca_certs),
        allowed_hosts=tuple(allowed_host or ()),
        fim_tokens=fim_tokens,
        window=window,
        snippets=snippets,
        document_memory=document_memory,
        max_queued_tokens=max_queued_tokens,
        max_queued_tokens_per_key=max_queued_tokens_per_key,
        completion_timeout=completion_timeout,
        step_timeout=step_timeout,
        workers=Workers(prefill_workers, decode_workers),
        listen=ListenOptions(
            max_connections=max_connections,
            client_timeout=client_timeout,
            drain_timeout=drain_timeout,
        ),
        idle_prefill=idle_prefill,
        stream_interval=(stream_interval_ms if stream_interval is None else stream_interval) / 1000,
        logs=logs,
        otlp_traces_endpoint=otlp_traces_endpoint,
        options=ModelOptions(
            backend=backend,
            device=device,
            weights=weights,
            threads=threads,
            context=context,
            kv_memory=kv_memory,
            kv_dtype=kv_cache_dtype,
            token_budget=token_budget,
            scheduler=scheduler,
            adapter=None if folder is None else str(folder),
            speculation=speculation,
            method=method,
            allow_methods=tuple(allow_method or ()),
            warm_tier=WarmTierOptions(
                memory=warm_tier_memory,
                disk=warm_tier_disk,
                codec=warm_tier_codec,
                folder=None if warm_tier_folder is None else str(warm_tier_folder.absolute()),
            ),
        ),
    )
    with ExitStack() as shown:
        progress = shown.enter_context(show_progress())
        path = resolve(options.model, progress)

        def ready(url: str, info: "EngineInfo", service: "ModelService") -> None:
            shown.close()
            typer.echo(banner(url, info, service))

        run_server(options, path, progress, ready)


def given_api_keys(given: list[str] | None) -> tuple[str, ...]:
    """Return the API keys of the command line or, without any, of the environment.

    Raises:
        MidfillError: the variable is set but holds no key.
    """
    from midfill.errors import MidfillError

    if not given and API_KEY_VARIABLE in os.environ:
        raise MidfillError(
            f"{API_KEY_VARIABLE} is set but empty; unset it to serve without API keys"
        )
    return tuple(given or ())


def given_tls(
    certificate: Path | None, key: Path | None, authorities: Path | None
) -> "TlsFiles | None":
    """Return the files for TLS that the command line names, if any.

    Raises:
        MidfillError: there is no certificate among them.
    """
    from midfill.config import TlsFiles
    from midfill.errors import MidfillError

    if certificate is not None:
        return TlsFiles(certificate, key, authorities)
    if key is not None or authorities is not None:
        raise MidfillError("TLS needs a certificate, too: --ssl-certfile FILE")
    return None


def banner(url: str, info: "EngineInfo", service: "ModelService") -> str:
    """Return what is shown when the server is ready: what it serves and how to try it."""
    from midfill.reporting.sizes import format_size
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
