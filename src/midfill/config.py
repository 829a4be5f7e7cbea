"""Options: how a model is loaded and run, and how it is served."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

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

    prefill: int = 0
    decode: int = 0


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

    memory: int = 0
    disk: int = 0
    folder: str | None = None
    memory_folder: str | None = None
    scope: str = ""
    codec: str = "none"


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
        kv_dtype: how the CPU kernels store KV: "auto" is float32 with float32 weights, otherwise
            bfloat16 on chips that multiply it and float16 on others; with "bf16" queries and
            softmax weights are rounded, too; "i8" has one scale per token and head.
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

    backend: Backend = "auto"
    device: str | None = None
    weights: WeightsOption = "auto"
    threads: int | None = None
    context: int | None = None
    kv_memory: int | None = None
    memory_share: float = 1.0
    kv_dtype: KvDtype = "auto"
    token_budget: int = 128
    scheduler: SchedulerName = "sarathi-serve"
    max_running: int = 128
    adapter: str | None = None
    speculation: bool = True
    method: str = "none"
    allow_methods: tuple[str, ...] = ()
    warm_tier: WarmTierOptions = WarmTierOptions()

    @property
    def adapter_path(self) -> Path | None:
        """``adapter`` as a path."""
        return None if self.adapter is None else Path(self.adapter)


class LogOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the server and its engine process log, and how. Crosses the process boundary.

    Attributes:
        format: "text" for people, "json" for programs: an object per line.
        level: what is less urgent is not logged. Each finished request is a line of level "info".
        redact: leave out whatever a client could have chosen: its request ids, unknown paths,
            messages of exceptions, and what libraries log.
    """

    format: LogFormat = "text"
    level: LogLevel = "info"
    redact: bool = False


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The files of a server that speaks TLS, all in PEM.

    Attributes:
        certificate: its certificate, and those between it and a root.
        key: the private key; None if it is in ``certificate``.
        client_authorities: certificates of those who sign the certificates that clients must
            have; None asks clients for none.
    """

    certificate: Path
    key: Path | None = None
    client_authorities: Path | None = None


@dataclass(frozen=True, kw_only=True)
class ListenOptions:
    """What bounds a server's connections, and its end.

    Attributes:
        max_connections: how many may be open; beyond it, idle ones are closed and then new ones
            refused with status 503.
        client_timeout: seconds in which a client must have sent a request, and after which one that
            takes nothing of its answer is disconnected; 0 is for ever.
        drain_timeout: seconds for which answers in progress may go on when the server is told to
            stop.
    """

    max_connections: int = 2048
    client_timeout: float = 30.0
    drain_timeout: float = 8.0


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """What ``midfill serve`` serves and how.

    Attributes:
        model: name or path, see ``midfill models``.
        served_name: the model's name for clients; None takes ``model``, or the last part of a path.
        aliases: further names of the model for clients. Editors choose a FIM template by them.
        host, port: where to listen; port 0 takes a free one.
        api_keys: keys that clients must send, each with a cache of its own; no keys let everyone
            in.
        api_key_file: a file with further keys, see ``serving.server.key_file``.
        kv_transfer_key: key of those that may move KV between servers; None lets nobody.
        tls: where its certificate is; None speaks plain HTTP.
        allowed_hosts: further names that a server without keys on a loopback address answers
            under, see ``serving.server.middleware``.
        fim_tokens: the model's FIM sentinels, if midfill doesn't know them.
        window: how much of a long document to show the model; None takes what the model or its
            adapter says.
        snippets: how many characters to show of the snippets of other text that editor plugins send
            by themselves; None takes what the model or its adapter says.
        document_memory: bytes for the text of documents that is remembered from request to request;
            a quarter of it more for tokens, and an eighth for what prompts begin with.
        max_body_bytes: maximum size of a request body.
        max_queued_tokens: maximum number of prompt tokens whose requests wait for their first
            token; requests beyond it are refused with status 429.
        max_queued_tokens_per_key: the same per API key; None is half of it where requests of other
            keys wait, too.
        completion_timeout: seconds for which an infill request waits for its first token, or for
            its answer if that is not streamed, unless the client says how long it waits; 0 is for
            ever.
        step_timeout: seconds that a step of the engine may take, after which it is taken to hang
            and restarted; 0 lets it take for ever.
        workers: engine processes, if prompts are computed by other ones than answers.
        listen: what bounds connections, and the server's end.
        idle_prefill: compute the prompts that documents will probably need next while the engine
            is idle.
        stream_interval: seconds for which the tokens of a streamed answer, after its first, may be
            held back to be sent together; 0 sends each at once.
        logs: what is logged, and how. ``run_server`` leaves the logs of its own process alone.
        otlp_traces_endpoint: URL of the OpenTelemetry collector that gets a trace of each request;
            None makes none.
        options: how the model is run.

    Raises:
        MidfillError: an API key that is empty or that no client could send, an empty alias, a
            collector whose URL is not one of HTTP, or workers that can't serve.
    """

    model: str
    served_name: str | None = None
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    kv_transfer_key: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None
    allowed_hosts: tuple[str, ...] = ()
    fim_tokens: FimTokens | None = None
    window: WindowSize | None = None
    snippets: int | None = None
    document_memory: int = DEFAULT_DOCUMENT_MEMORY
    max_body_bytes: int = 16 * 1024 * 1024
    max_queued_tokens: int = DEFAULT_MAX_QUEUED_TOKENS
    max_queued_tokens_per_key: int | None = None
    completion_timeout: float = DEFAULT_COMPLETION_TIMEOUT
    step_timeout: float = DEFAULT_STEP_TIMEOUT
    workers: Workers = field(default_factory=Workers)
    listen: ListenOptions = field(default_factory=ListenOptions)
    idle_prefill: bool = True
    stream_interval: float = 0.025
    logs: LogOptions = field(default_factory=LogOptions)
    otlp_traces_endpoint: str | None = None
    options: ModelOptions = field(default_factory=ModelOptions)

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
        self._check_workers()
        if self.kv_transfer_key is not None and not self.kv_transfer_key.strip():
            raise OptionError("--kv-transfer-key is empty; leave it out to let nobody move KV")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not re.fullmatch(r"https?://[^/\s]+(/\S*)?", endpoint):
            raise OptionError(
                f"--otlp-traces-endpoint takes a URL of OTLP over HTTP such as"
                f" http://127.0.0.1:4318/v1/traces, not {endpoint!r}"
            )

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
