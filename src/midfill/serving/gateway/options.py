"""GatewayOptions: what stands behind the gateway, and how it is served."""

import re
from dataclasses import dataclass, field
from pathlib import Path

from midfill.config import DEFAULT_DOCUMENT_MEMORY, FimTokens, LogOptions
from midfill.errors import MidfillError, OptionError
from midfill.serving.gateway.upstream import ApiName
from midfill.serving.options import TlsFiles, WindowSize

DEFAULT_UPSTREAM_TIMEOUT = 120.0
DEFAULT_WAIT = 30.0
_URL = re.compile(r"https?://[^/\s@]+(/\S*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """What ``midfill gateway`` serves and how.

    Attributes:
        upstreams: URLs of the servers.
        upstream_file: a file with further URLs, one per line, read again on SIGHUP.
        upstream_api: which servers they are; "auto" finds out.
        upstream_key: API key that they want; None sends none.
        upstream_timeout: seconds without a byte after which a server counts as failed.
        wait: seconds to wait at the start until one of them answers.
        model: the model to use of those that they serve; None takes their first.
        tokenizer: folder of the model's tokenizer; None does without, unless a server on this
            machine names one.
        context: maximum tokens of a prompt and its answer; None takes what they say.
        served_name: the model's name for clients; None takes the servers'.
        idle_prefill: have servers without other work compute the prompts that documents will
            probably need next.
        aliases, host, port, api_keys, api_key_file, tls, allowed_hosts, fim_tokens, window,
        snippets, document_memory, max_body_bytes, logs, otlp_traces_endpoint: see ``ServeOptions``.

    Raises:
        MidfillError: there is no upstream, or one's URL is none.
    """

    upstreams: tuple[str, ...] = ()
    upstream_file: Path | None = None
    upstream_api: ApiName = "auto"
    upstream_key: str | None = field(default=None, repr=False)
    upstream_timeout: float = DEFAULT_UPSTREAM_TIMEOUT
    wait: float = DEFAULT_WAIT
    model: str | None = None
    tokenizer: Path | None = None
    context: int | None = None
    served_name: str | None = None
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: Path | None = None
    tls: TlsFiles | None = None
    allowed_hosts: tuple[str, ...] = ()
    fim_tokens: FimTokens | None = None
    window: WindowSize | None = None
    snippets: int | None = None
    idle_prefill: bool = False
    document_memory: int = DEFAULT_DOCUMENT_MEMORY
    max_body_bytes: int = 16 * 1024 * 1024
    logs: LogOptions = field(default_factory=LogOptions)
    otlp_traces_endpoint: str | None = None

    def __post_init__(self) -> None:
        self.addresses()

    def addresses(self) -> list[str]:
        """Return the servers' addresses, those of the file as it is now.

        Raises:
            MidfillError: there is none, one is no URL, or the file can't be read.
        """
        given = [*self.upstreams]
        if self.upstream_file is not None:
            try:
                lines = self.upstream_file.read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                reason = getattr(error, "strerror", None) or "not UTF-8"
                raise MidfillError(f"{self.upstream_file}: can't be read ({reason})") from None
            given += [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
        found = list(dict.fromkeys(map(address_of, given)))
        if not found:
            raise MidfillError(
                "name a server to stand in front of: --upstream http://127.0.0.1:8000"
            )
        return found


def address_of(url: str) -> str:
    """Return a server's address of its URL, which may end in /v1.

    Raises:
        MidfillError: it is no URL of HTTP.
    """
    if not _URL.fullmatch(url):
        raise OptionError(
            f"--upstream takes a URL such as http://127.0.0.1:8000, not {url!r}"
            " (keys belong in --upstream-key)"
        )
    return url.rstrip("/").removesuffix("/v1").rstrip("/")
