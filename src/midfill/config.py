"""Options: how a model is loaded and run, and how it is served.

An option is declared once, as an annotated field here: its ``Flag`` says how the command line takes
it and what it means (``cli.option_groups``). Options travel to where they are used in these
objects.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec

from midfill.errors import MidfillError, OptionError

Backend = Literal["auto", "cpu", "torch"]
WeightsOption = Literal["auto", "q4", "q8", "f32"]
KvDtype = Literal["auto", "f32", "f16", "bf16", "i8"]
SchedulerName = Literal["sarathi-serve", "layered-prefill"]
RouterName = Literal["document", "round-robin"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

DEFAULT_MAX_QUEUED_TOKENS = 262_144
DEFAULT_DOCUMENT_MEMORY = 256 * 2**20
DEFAULT_STEP_TIMEOUT = 120.0
DEFAULT_COMPLETION_TIMEOUT = 120.0


Panel = Literal["Basics", "Memory", "Network", "Limits", "Advanced"]
"""A group of options in ``--help``."""

API_KEY_VARIABLE = "MIDFILL_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """How the command line takes an option.

    Attributes:
        help: what it means.
        panel: its group in ``midfill serve --help``.
        name: the option; None takes the field's name, with hyphens.
        metavar: what stands for its value in the help.
        kind: how its value is written, see ``cli.option_groups.PARSERS``.
        min, max: bounds of its value.
        scale: what its value is multiplied by.
        written_default: its default as one writes it, where that is not the value.
        repeated: it may be given several times; the field is a tuple.
        envvar: environment variable that gives its value otherwise.
        former: former name of the option, for one release.
        missing: error for other options of its group without it.
    """

    help: str
    panel: Panel = "Basics"
    name: str | None = None
    metavar: str | None = None
    kind: str | None = None
    min: float | None = None
    max: float | None = None
    scale: float | None = None
    written_default: str | None = None
    repeated: bool = False
    envvar: str | None = None
    former: str | None = None
    missing: str | None = None


class FimTokens(NamedTuple):
    """The texts of a model's FIM sentinels, as a user or an adapter names them."""

    prefix: str
    suffix: str
    middle: str


class WindowSize(NamedTuple):
    """How many characters of a long document to show the model: ``WindowRule``'s fields."""

    before: int
    after: int


class Workers(NamedTuple):
    """How many engine processes compute prompts, and how many answers; 0 of both: one does both."""

    prefill: Annotated[
        int,
        Flag(
            name="--prefill-workers",
            panel="Advanced",
            min=0,
            metavar="N",
            help="Engine processes that compute prompts, and their answers' first tokens; with"
            " --decode-workers. Each has --threads and --kv-memory of its own.",
        ),
    ] = 0
    decode: Annotated[
        int,
        Flag(
            name="--decode-workers",
            panel="Advanced",
            min=0,
            metavar="N",
            help="Engine processes that go on with the answers, so that prompts never slow them"
            " down; with --prefill-workers. Without both, one engine does everything.",
        ),
    ] = 0


class WarmTierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Where KV is kept that the engine's own memory has no room for, or that it could lose.

    Attributes:
        memory: bytes in host memory; 0 keeps none there. They outlive the engine process, not the
            server.
        disk: bytes on disk; 0 keeps none there.
        folder: where on disk; None takes one in the cache folder.
        memory_folder: where in memory; made by whoever starts the engine.
        scope: digest of what makes tenants' names unique, see ``kv.blob.bind_tenant``.
        codec: how KV is written: "none" as it was computed, "cachegen" smaller and not exact, see
            ``methods.codecs``.
    """

    memory: Annotated[
        int,
        Flag(
            name="--warm-tier-memory",
            panel="Memory",
            kind="size",
            metavar="SIZE",
            help="Host memory for KV that has no room in the KV pool, like 4GB. It outlives the"
            " engine process, not the server.",
        ),
    ] = 0
    disk: Annotated[
        int,
        Flag(
            name="--warm-tier-disk",
            panel="Memory",
            kind="size",
            metavar="SIZE",
            help="Disk space for KV, like 20GB: documents stay warm when the server is restarted.",
        ),
    ] = 0
    folder: Annotated[
        str | None,
        Flag(
            name="--warm-tier-folder",
            panel="Memory",
            kind="folder",
            metavar="FOLDER",
            help="Where --warm-tier-disk keeps its files; by default in midfill's cache folder.",
        ),
    ] = None
    memory_folder: str | None = None
    scope: str = ""
    codec: Annotated[
        str,
        Flag(
            name="--warm-tier-codec",
            panel="Memory",
            kind="codec",
            metavar="NAME[:OPTION=VALUE,...]",
            help="How the warm tier writes KV: none, as it was computed, or cachegen, less than a"
            " quarter as large, whose answers are not exact.",
        ),
    ] = "none"


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How a model is loaded and run. Crosses the process boundary, so plain values only.

    Attributes:
        backend: "cpu" is midfill's compiled CPU kernels, "torch" is PyTorch on any device; "auto"
            takes PyTorch if it finds a CUDA GPU and the kernels otherwise.
        device: torch device such as "cuda:0", for the torch backend; None lets torch choose.
        weights: how the CPU kernels store the weights: "auto" as in the checkpoint,
            losslessly where possible; the others quantise (or dequantise) all of them.
        threads: CPU threads per step; None takes the cores this process may use.
        context: maximum tokens of a prompt and its answer; None takes the model's own.
        kv_memory: bytes for KV; None sizes it from free memory.
        memory_share: of the free memory, where ``kv_memory`` is None; others on the machine have
            the rest.
        kv_cache_dtype: how the CPU kernels store KV: "auto" is float32 with float32 weights,
            otherwise bfloat16 on chips that multiply it and float16 on others; with "bf16" queries
            and softmax weights are rounded, too; "i8" has one scale per token and head.
        token_budget: maximum tokens per step; fewer where steps were measured to take long.
        scheduler: how prompts longer than ``token_budget`` are computed beside running answers:
            "sarathi-serve" in chunks of tokens, "layered-prefill" by groups of layers.
        max_running: maximum number of answers in progress; others wait.
        adapter: folder of the LoRA adapter that is merged into the model; None for none.
        speculation: verify drafts of an answer's next tokens, copied from its own text, where that
            saves more time than it costs. Answers are the same with and without.
        method: compresses the KV of every prompt whose request names no method, or takes it from
            elsewhere: "cake:budget=256", see ``methods.registry``.
        allow_methods: names of the methods that requests may choose; "any" allows all.
        warm_tier: where KV is kept that may be evicted or lost.
    """

    backend: Annotated[
        Backend, Flag(help="What runs the model: midfill's CPU kernels, or PyTorch on any device.")
    ] = "auto"
    device: Annotated[
        str | None, Flag(metavar="NAME", help="Device of the torch backend, such as cuda:1.")
    ] = None
    weights: Annotated[
        WeightsOption,
        Flag(
            panel="Memory",
            help="How the CPU kernels store weights: as in the file, in at most 4 or 8 bits,"
            " float32.",
        ),
    ] = "auto"
    threads: Annotated[
        int | None,
        Flag(
            min=1,
            max=1024,
            help="CPU threads; by default all cores this process may use, fewer under a CPU quota.",
        ),
    ] = None
    context: Annotated[
        int | None, Flag(min=2, help="Maximum tokens of a prompt and its answer.")
    ] = None
    kv_memory: Annotated[
        int | None,
        Flag(
            panel="Memory",
            kind="size",
            metavar="SIZE",
            help="Memory for KV, like 2GB; by default sized from free memory.",
        ),
    ] = None
    memory_share: float = 1.0
    kv_cache_dtype: Annotated[
        KvDtype,
        Flag(
            panel="Memory",
            help="How the CPU kernels store KV: float32, float16, bfloat16 or 8-bit; with quantised"
            " weights by default bfloat16 on chips with AVX512-BF16, float16 on others. With"
            " bfloat16 attention is rounded, too; these chips compute long prompts faster so.",
        ),
    ] = "auto"
    token_budget: Annotated[
        int,
        Flag(
            panel="Advanced",
            min=1,
            help="Maximum tokens per step. Lower: steadier streams; higher: faster prompts.",
        ),
    ] = 128
    scheduler: Annotated[
        SchedulerName,
        Flag(
            panel="Advanced",
            metavar="NAME",
            help="How prompts longer than the token budget are computed beside running answers:"
            " sarathi-serve in chunks of tokens, layered-prefill by groups of layers. Answers are"
            " the same.",
        ),
    ] = "sarathi-serve"
    max_running: int = 128
    adapter: Annotated[
        str | None,
        Flag(
            metavar="PATH|none",
            help="Folder of a LoRA adapter to merge into the model; by default the one that midfill"
            " ships for a model of this name.",
        ),
    ] = None
    speculation: Annotated[
        bool,
        Flag(
            panel="Advanced",
            help="Draft tokens that copy from the text and verify several per step; never changes"
            " an answer.",
        ),
    ] = True
    method: Annotated[
        str,
        Flag(
            panel="Advanced",
            kind="method",
            metavar="NAME[:OPTION=VALUE,...]",
            help="Compress the KV of every prompt, as in cake:budget=256, or take it from"
            " elsewhere, as in cacheblend:ratio=0.15; see 'midfill methods'.",
        ),
    ] = "none"
    allow_methods: Annotated[
        tuple[str, ...],
        Flag(
            name="--allow-method",
            panel="Advanced",
            kind="allowed_method",
            metavar="NAME",
            repeated=True,
            help="A method that requests may choose for their own prompt (midfill.method); may be"
            " repeated. 'none' lets them keep all KV, 'any' allows everything.",
        ),
    ] = ()
    warm_tier: WarmTierOptions = WarmTierOptions()

    @property
    def adapter_path(self) -> Path | None:
        """``adapter`` as a path."""
        return None if self.adapter is None else Path(self.adapter)


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the server and its engine process log, and how. Crosses the process boundary.

    Attributes:
        format: "text" for people, "json" for programs: an object per line.
    """

    format: Annotated[
        LogFormat,
        Flag(
            name="--log-format",
            panel="Advanced",
            help="How to log on stderr: text for people, json for programs.",
        ),
    ] = "text"
    level: Annotated[
        LogLevel,
        Flag(
            name="--log-level",
            panel="Advanced",
            help="What is less urgent is not logged. Each finished request is info.",
        ),
    ] = "info"
    redact: Annotated[
        bool,
        Flag(
            name="--redact",
            panel="Advanced",
            help="Leave out of logs and traces whatever a client could have chosen: its request"
            " ids, unknown paths, messages of exceptions, what libraries log. Prompts, answers and"
            " keys are never logged.",
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server that speaks TLS, all in PEM.

    Attributes:
        certificate: its certificate, and those between it and a root.
        key: the private key; None if it is in ``certificate``.
        client_authorities: certificates of those who sign the certificates that clients must
            have; None asks clients for none.
    """

    certificate: Annotated[
        Path,
        Flag(
            name="--ssl-certfile",
            panel="Network",
            metavar="FILE",
            missing="TLS needs a certificate, too: --ssl-certfile FILE",
            help="Speak HTTPS with this certificate chain (PEM); read again on SIGHUP.",
        ),
    ]
    key: Annotated[
        Path | None,
        Flag(
            name="--ssl-keyfile",
            panel="Network",
            metavar="FILE",
            help="The certificate's private key (PEM), if it is not in it.",
        ),
    ] = None
    client_authorities: Annotated[
        Path | None,
        Flag(
            name="--ssl-ca-certs",
            panel="Network",
            metavar="FILE",
            help="Let in only clients that have a certificate signed by one of these (PEM).",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """What bounds a server's connections, and its end; each flag says what its field means."""

    max_connections: Annotated[
        int,
        Flag(
            panel="Limits",
            min=1,
            help="Maximum number of open connections. Beyond it, idle ones are closed, and then new"
            " ones refused with status 503.",
        ),
    ] = 2048
    client_timeout: Annotated[
        float,
        Flag(
            panel="Limits",
            min=0,
            metavar="SECONDS",
            help="Time in which a client must have sent its request, and after which one that takes"
            " nothing of its answer is disconnected; 0 is for ever.",
        ),
    ] = 30.0
    drain_timeout: Annotated[
        float,
        Flag(
            panel="Limits",
            min=0,
            metavar="SECONDS",
            help="Time for which answers in progress may go on when the server is told to stop.",
        ),
    ] = 8.0


@dataclass(frozen=True, kw_only=True)
class FrontendOptions:
    """Where a server or a gateway listens, to whom, and how it makes prompts.

    Each flag says what its field means; what it doesn't say is here.

    Attributes:
        served_name: the model's name for clients; None takes ``model``, or the last part of a path.
        aliases: further names of the model for clients. Editors choose a FIM template by them.
        host, port: where to listen; port 0 takes a free one.
        api_keys: keys that clients must send, each with a cache of its own; no keys let everyone
            in.
        api_key_file: a file with further keys, see ``serving.server.key_file``.
        tls: where its certificate is; None speaks plain HTTP.
        allowed_hosts: further names that a server without keys on a loopback address answers
            under, see ``serving.server.middleware``.
        fim_tokens: the model's FIM sentinels, if midfill doesn't know them.
        window: how much of a long document to show the model; None takes what the model or its
            adapter says.
        document_memory: bytes for the text of documents that is remembered from request to request;
            a quarter of it more for tokens, and an eighth for what prompts begin with.
        max_body_bytes: maximum size of a request body.
        logs: what is logged, and how. ``run_server`` leaves the logs of its own process alone.
        otlp_traces_endpoint: URL of the OpenTelemetry collector that gets a trace of each request;
            None makes none.

    Raises:
        MidfillError: an API key that is empty or that no client could send, an empty alias, or a
            collector whose URL is not one of HTTP.
    """

    host: Annotated[str, Flag(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[
        int,
        Flag(min=0, max=65535, help="Port to listen on; 0 takes a free one."),
    ] = 8080
    served_name: Annotated[
        str | None, Flag(metavar="NAME", help="What clients call the model.")
    ] = None
    aliases: Annotated[
        tuple[str, ...],
        Flag(
            name="--alias",
            metavar="NAME",
            repeated=True,
            help="A further name of the model; may be repeated. Editors that know templates by a"
            " model's name then know this one's.",
        ),
    ] = ()
    api_keys: Annotated[
        tuple[str, ...],
        Flag(
            name="--api-key",
            panel="Network",
            repeated=True,
            envvar=API_KEY_VARIABLE,
            missing=f"{API_KEY_VARIABLE} is set but empty; unset it to serve without API keys",
            help="Key that clients must send; may be repeated (in the variable: separated by"
            " spaces). Each key has its own cache. A line NAME:sha256:DIGEST of 'midfill keys'"
            " stands for its key.",
        ),
    ] = field(default=(), repr=False)
    api_key_file: Annotated[
        Path | None,
        Flag(
            panel="Network",
            metavar="FILE",
            help="Keys that clients must send, as 'midfill keys' writes them; read again on"
            " SIGHUP.",
        ),
    ] = None
    allowed_hosts: Annotated[
        tuple[str, ...],
        Flag(
            name="--allowed-host",
            panel="Network",
            metavar="NAME",
            repeated=True,
            help="A server without API keys that listens on 127.0.0.1 answers under no other names"
            " than its machine's own; this is one more, such as a proxy's. May be repeated.",
        ),
    ] = ()
    tls: TlsFiles | None = None
    fim_tokens: Annotated[
        FimTokens | None,
        Flag(
            kind="fim_tokens",
            metavar="PRE,SUF,MID",
            help="The model's FIM tokens, for models that midfill doesn't know.",
        ),
    ] = None
    window: Annotated[
        WindowSize | None,
        Flag(
            panel="Advanced",
            kind="window",
            metavar="BEFORE,AFTER",
            help="How much of a long document to show the model: about BEFORE characters before the"
            " caret, at most AFTER after it; by default what the model or its adapter names.",
        ),
    ] = None
    snippets: Annotated[
        int | None,
        Flag(
            panel="Advanced",
            metavar="CHARACTERS",
            min=0,
            help="How much to show of the snippets of other text that editor plugins send by"
            " themselves; by default what the model or its adapter names.",
        ),
    ] = None
    document_memory: Annotated[
        int,
        Flag(
            panel="Memory",
            kind="size",
            metavar="SIZE",
            written_default="256MB",
            help="Memory for the texts of documents, which are remembered from request to request;"
            " up to 3/8 of it more for their tokens and for what prompts begin with.",
        ),
    ] = DEFAULT_DOCUMENT_MEMORY
    max_body_bytes: int = 16 * 1024 * 1024
    logs: LogOptions = field(default_factory=LogOptions)
    otlp_traces_endpoint: Annotated[
        str | None,
        Flag(
            panel="Advanced",
            metavar="URL",
            help="Send a trace of each request to this OpenTelemetry collector, with OTLP over"
            " HTTP.",
        ),
    ] = None

    def __post_init__(self) -> None:
        if not all(alias.strip() for alias in self.aliases):
            raise MidfillError("an alias is empty; --alias takes a further name of the model")
        for key in self.api_keys:
            if not key.strip():
                raise MidfillError("an API key is empty; leave it out to serve without keys")
            if key != key.strip() or not key.isprintable():
                raise MidfillError(
                    "an API key begins or ends with a space, or holds a character that can't be"
                    " printed; no client could send it"
                )
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
            raise OptionError(
                f"--otlp-traces-endpoint takes a URL of OTLP over HTTP such as"
                f" http://127.0.0.1:4318/v1/traces, not {endpoint!r}"
            )


@dataclass(frozen=True, kw_only=True)
class ServeOptions(FrontendOptions):
    """What ``midfill serve`` serves and how.

    Attributes:
        model: name or path, see ``midfill models``.
        kv_transfer_key: key of those that may move KV between servers; None lets nobody.
        workers: engine processes, if prompts are computed by other ones than answers.
        listen: what bounds connections, and the server's end.
        stream_interval: seconds for which the tokens of a streamed answer, after its first, may be
            held back to be sent together; 0 sends each at once.
        options: how the model is run.

    Raises:
        MidfillError: see ``FrontendOptions``; or workers that can't serve.
    """

    model: str
    kv_transfer_key: Annotated[
        str | None,
        Flag(
            panel="Network",
            envvar="MIDFILL_KV_TRANSFER_KEY",
            metavar="KEY",
            help="Let whoever sends this key move KV between servers, that of all API keys.",
        ),
    ] = field(default=None, repr=False)
    max_queued_tokens: Annotated[
        int,
        Flag(
            panel="Limits",
            min=1,
            help="Maximum number of prompt tokens whose requests wait for their first token."
            " Requests beyond it are refused with status 429.",
        ),
    ] = DEFAULT_MAX_QUEUED_TOKENS
    max_queued_tokens_per_key: Annotated[
        int | None,
        Flag(
            panel="Limits",
            min=1,
            help="The same for each API key; if not set, half of it where requests of other keys"
            " wait, too.",
        ),
    ] = None
    completion_timeout: Annotated[
        float,
        Flag(
            panel="Limits",
            min=0,
            metavar="SECONDS",
            help="Time for which an infill request waits for its first token (for its answer, if"
            " that is not streamed) unless its client says how long it waits; 0 is for ever.",
        ),
    ] = DEFAULT_COMPLETION_TIMEOUT
    step_timeout: Annotated[
        float,
        Flag(
            panel="Limits",
            min=0,
            metavar="SECONDS",
            help="Restart the engine when it takes no step, and does not say that it is idle, for"
            " so long; 0 never does.",
        ),
    ] = DEFAULT_STEP_TIMEOUT
    workers: Workers = field(default_factory=Workers)
    listen: ListenOptions = field(default_factory=ListenOptions)
    idle_prefill: Annotated[
        bool,
        Flag(
            panel="Advanced",
            help="While the engine is idle, compute the prompts that documents will probably need"
            " next.",
        ),
    ] = True
    stream_interval: Annotated[
        float,
        Flag(
            name="--stream-interval-ms",
            panel="Advanced",
            min=0,
            metavar="MS",
            scale=1e-3,
            former="--stream-interval",
            help="Milliseconds for which tokens of a streamed answer, after its first, may be held"
            " back to be sent together: each message takes time from the model. 0 sends each at"
            " once.",
        ),
    ] = 0.025
    options: ModelOptions = field(default_factory=ModelOptions)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_workers()
        if self.kv_transfer_key is not None and not self.kv_transfer_key.strip():
            raise OptionError("--kv-transfer-key is empty; leave it out to let nobody move KV")

    def _check_workers(self) -> None:
        """Refuse workers that can't serve.

        Raises:
            MidfillError: one kind is missing, or they would have nothing to hand over.
        """
        prefill, decode = self.workers
        if (prefill > 0) != (decode > 0):
            given, missing = ("prefill", "decode") if prefill else ("decode", "prefill")
            raise OptionError(
                f"--{given}-workers needs --{missing}-workers, too: prompts are computed by the"
                " ones, answers by the others; leave both out for one engine that does both"
            )
        if prefill and self.options.method != "none":
            raise OptionError(
                f"--method {self.options.method} and --decode-workers don't go together: KV under a"
                " method stays where it is computed. Leave out one of them; single requests may"
                " choose a method with --allow-method"
            )
