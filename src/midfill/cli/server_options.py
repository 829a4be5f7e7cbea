"""Options of the commands that listen for clients: serve, gateway and cluster."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.cli.options import FimTokensOption, SnippetsOption, WindowOption
from midfill.config import LogFormat, LogLevel

if TYPE_CHECKING:
    from midfill.config import LogOptions, TlsFiles

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
OtlpTracesOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help="Send a trace of each request to this OpenTelemetry collector, with OTLP over HTTP.",
    ),
]


@dataclass(frozen=True)
class NameFlags:
    """What clients call the model."""

    served_name: ServedNameOption = None
    alias: AliasOption = None

    @property
    def aliases(self) -> tuple[str, ...]:
        """Further names of the model."""
        return tuple(self.alias or ())


@dataclass(frozen=True)
class AccessFlags:
    """Who is let in, and under which names of the server."""

    api_key: ApiKeyOption = None
    api_key_file: ApiKeyFileOption = None
    allowed_host: AllowedHostOption = None

    @property
    def api_keys(self) -> tuple[str, ...]:
        """The API keys of the command line or, without any, of the environment.

        Raises:
            MidfillError: the variable is set but holds no key.
        """
        from midfill.errors import MidfillError

        if not self.api_key and API_KEY_VARIABLE in os.environ:
            raise MidfillError(
                f"{API_KEY_VARIABLE} is set but empty; unset it to serve without API keys"
            )
        return tuple(self.api_key or ())

    @property
    def allowed_hosts(self) -> tuple[str, ...]:
        """Further names that a server without keys on a loopback address answers under."""
        return tuple(self.allowed_host or ())


@dataclass(frozen=True)
class TlsFlags:
    """The files of a server that speaks TLS."""

    ssl_certfile: SslCertfileOption = None
    ssl_keyfile: SslKeyfileOption = None
    ssl_ca_certs: SslCaCertsOption = None

    @property
    def files(self) -> "TlsFiles | None":
        """The files that are named, if any.

        Raises:
            MidfillError: there is no certificate among them.
        """
        from midfill.config import TlsFiles
        from midfill.errors import MidfillError

        if self.ssl_certfile is not None:
            return TlsFiles(self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs)
        if self.ssl_keyfile is not None or self.ssl_ca_certs is not None:
            raise MidfillError("TLS needs a certificate, too: --ssl-certfile FILE")
        return None


@dataclass(frozen=True)
class PromptFlags:
    """How prompts are laid out where a request doesn't say it."""

    fim_tokens: FimTokensOption = None
    window: WindowOption = None
    snippets: SnippetsOption = None


@dataclass(frozen=True)
class LogFlags:
    """What is logged, and how."""

    log_format: LogFormatOption = "text"
    log_level: LogLevelOption = "info"
    redact: RedactOption = False

    @property
    def options(self) -> "LogOptions":
        """The same for the processes that log."""
        from midfill.config import LogOptions

        return LogOptions(format=self.log_format, level=self.log_level, redact=self.redact)
