"""Options of servers: their connections and certificates, and all that ``midfill serve`` takes.

As in ``config``, an option is declared once: as an annotated field, whose ``Flag`` says how the
command line takes it.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

from midfill.config import (
    DEFAULT_DOCUMENT_MEMORY,
    DEFAULT_MAX_QUEUED_TOKENS,
    DEFAULT_STEP_TIMEOUT,
    FimTokens,
    Flag,
    LogOptions,
    ModelOptions,
    Workers,
)
from midfill.errors import MidfillError, OptionError
from midfill.infill.candidates import MAX_CANDIDATES

RouterName = Literal["document", "round-robin"]
DEFAULT_COMPLETION_TIMEOUT = 120.0
API_KEY_VARIABLE = "MIDFILL_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8080"  # of a server that is given neither host nor port


class WindowSize(NamedTuple):
    """How many characters of a long document to show the model: ``WindowRule``'s fields."""

    before: int
    after: int


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
class BatchOptions:
    """What a server keeps for ``/v1/files`` and ``/v1/batches``; each flag says what it means.

    Off by default: whoever may send a request could otherwise fill a part of the disk, and have the
    machine compute all night.
    """

    storage: Annotated[
        int,
        Flag(
            name="--batch-storage",
            panel="Limits",
            kind="size",
            metavar="SIZE",
            help="Answer batches (/v1/files, /v1/batches) while nobody else waits, with so much"
            " disk space for the files of each API key, like 200MB; 0 has no batches.",
        ),
    ] = 0
    files: Annotated[
        int,
        Flag(
            name="--batch-files",
            panel="Limits",
            min=1,
            metavar="N",
            help="Maximum number of files that an API key may have uploaded, results included.",
        ),
    ] = 100
    rows: Annotated[
        int,
        Flag(
            name="--batch-rows",
            panel="Limits",
            min=1,
            metavar="N",
            help="Maximum number of rows in the unfinished batches of an API key. Rows count for"
            " no other limit.",
        ),
    ] = 50_000
    folder: Annotated[
        str | None,
        Flag(
            name="--batch-folder",
            panel="Advanced",
            kind="folder",
            metavar="FOLDER",
            help="Where --batch-storage keeps its files; by default in midfill's cache folder.",
        ),
    ] = None


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

    @property
    def key_header(self) -> str:
        """What curl takes beside a request, so that it has a key; "" where it needs none."""
        needs_key = self.api_keys or self.api_key_file is not None
        return " -H 'Authorization: Bearer KEY'" if needs_key else ""

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
class SeveralModels:
    """How several models share a server; each flag says what its field means.

    Attributes:
        others: further models beside ``ServeOptions.model``, names or paths.
    """

    others: tuple[str, ...] = ()
    pinned: Annotated[
        tuple[str, ...],
        Flag(
            name="--pin",
            panel="Memory",
            metavar="MODEL",
            repeated=True,
            help="Of several models, keep this one in memory; may be repeated. Others are loaded"
            " when a request names them.",
        ),
    ] = ()
    memory: Annotated[
        int | None,
        Flag(
            name="--model-memory",
            panel="Memory",
            kind="size",
            metavar="SIZE",
            help="Memory for several models, weights and KV; where it is short, the model unused"
            " longest is unloaded. By default most of what is free at the start.",
        ),
    ] = None


@dataclass(frozen=True, kw_only=True)
class ServeOptions(FrontendOptions):
    """What ``midfill serve`` serves and how.

    Attributes:
        model: name or path, see ``midfill models``; the first of several.
        several: the others, and how they share the memory.
        kv_transfer_key: key of those that may move KV between servers; None lets nobody.
        workers: engine processes, if prompts are computed by other ones than answers.
        listen: what bounds connections, and the server's end.
        stream_interval: seconds for which the tokens of a streamed answer, after its first, may be
            held back to be sent together; 0 sends each at once.
        batches: what is kept for batches.
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
    min_confidence: Annotated[
        float | None,
        Flag(
            panel="Limits",
            min=0,
            max=1,
            metavar="P",
            help="Give editors no answer whose first line is right with a lower probability than"
            " this; 0 gives them all answers as they are. If not set, what held-out files have"
            " chosen for the model.",
        ),
    ] = None
    candidates: Annotated[
        int,
        Flag(
            panel="Limits",
            min=1,
            max=MAX_CANDIDATES,
            metavar="N",
            help="Where the model is undecided, try up to N answers for editors and give them the"
            " one whose first line is the most probable; streamed answers excepted. 1 tries no"
            " others and is the fastest.",
        ),
    ] = 1
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
    several: SeveralModels = field(default_factory=SeveralModels)
    listen: ListenOptions = field(default_factory=ListenOptions)
    batches: BatchOptions = field(default_factory=BatchOptions)
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
        self._check_several()
        if self.kv_transfer_key is not None and not self.kv_transfer_key.strip():
            raise OptionError("--kv-transfer-key is empty; leave it out to let nobody move KV")

    def _check_several(self) -> None:
        """Refuse what several models can't share.

        Raises:
            MidfillError: an option is of one model, or one is pinned that isn't served.
        """
        several = self.several
        if not several.others:
            if several.pinned or several.memory is not None:
                given = "--pin" if several.pinned else "--model-memory"
                raise OptionError(f"{given} is for several models: midfill serve MODEL MODEL ...")
            return
        for model in several.pinned:
            if model not in (self.model, *several.others):
                served = ", ".join((self.model, *several.others))
                raise OptionError(f"--pin {model} is none of the models to serve: {served}")
        of_one = {
            "--served-name": self.served_name is not None,
            "--alias": bool(self.aliases),
            "--fim-tokens": self.fim_tokens is not None,
            "--adapter": self.options.adapter is not None,
            "--batch-storage": bool(self.batches.storage),
            "--decode-workers": bool(sum(self.workers)),
            "--kv-transfer-key": self.kv_transfer_key is not None,
        }
        for name, is_given in of_one.items():
            if is_given:
                raise OptionError(f"{name} is for one model; serve one, or leave it out")

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
        if prefill and self.candidates > 1:
            raise OptionError(
                "--candidates and --decode-workers don't go together: an answer begins and ends"
                " on one worker; leave out one of them"
            )
        if prefill and self.batches.storage:
            raise OptionError(
                "--batch-storage and --decode-workers don't go together: rows of batches give way"
                " to other requests on one engine alone; leave out one of them"
            )
        if prefill and self.options.method != "none":
            raise OptionError(
                f"--method {self.options.method} and --decode-workers don't go together: KV under a"
                " method stays where it is computed. Leave out one of them; single requests may"
                " choose a method with --allow-method"
            )
        if prefill and self.options.reuse not in ("auto", "off"):
            raise OptionError(
                f"--reuse {self.options.reuse} and --decode-workers don't go together: KV under a"
                " method stays where it is computed. Leave out one of them"
            )
