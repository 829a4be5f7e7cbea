"""GatewayOptions: what stands behind the gateway, and how it is served."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from midfill.config import Flag
from midfill.errors import MidfillError, OptionError
from midfill.serving.options import FrontendOptions

ApiName = Literal["auto", "vllm", "sglang", "llama.cpp", "midfill", "openai"]

_URL = re.compile(r"https?://[^/\s@]+(/\S*)?")


@dataclass(frozen=True, kw_only=True)
class GatewayOptions(FrontendOptions):
    """What ``midfill gateway`` serves and how.

    Each flag says what its field means; what it doesn't say is here.

    Attributes:
        model: the model to use of those that the servers have; None takes their first.
        tokenizer: None does without, unless a server on this machine names one.
        served_name: the model's name for clients; None takes the servers'.

    Raises:
        MidfillError: there is no upstream, or one's URL is none; see ``FrontendOptions``.
    """

    upstreams: Annotated[
        tuple[str, ...],
        Flag(
            name="--upstream",
            metavar="URL",
            repeated=True,
            help="A server to stand in front of; may be repeated, for replicas of one.",
        ),
    ] = ()
    upstream_file: Annotated[
        Path | None,
        Flag(metavar="FILE", help="Further servers, a URL per line; read again on SIGHUP."),
    ] = None
    upstream_api: Annotated[
        ApiName, Flag(help="Which servers they are; by default each is asked.")
    ] = "auto"
    upstream_key: Annotated[
        str | None,
        Flag(envvar="MIDFILL_UPSTREAM_KEY", metavar="KEY", help="API key that the servers want."),
    ] = field(default=None, repr=False)
    upstream_timeout: Annotated[
        float,
        Flag(
            min=0.1, metavar="SECONDS", help="A server that sends nothing for so long has failed."
        ),
    ] = 120.0
    wait: Annotated[
        float,
        Flag(min=0, metavar="SECONDS", help="How long to wait at the start for a server."),
    ] = 30.0
    model: str | None = None
    tokenizer: Annotated[
        Path | None,
        Flag(
            metavar="FOLDER",
            help="Folder of the model's tokenizer.json. Prompts are then sent as token ids.",
        ),
    ] = None
    context: Annotated[
        int | None,
        Flag(min=2, help="Maximum tokens of a prompt and its answer; by default the servers'."),
    ] = None
    idle_prefill: Annotated[
        bool,
        Flag(
            help="While a server has no other request of the gateway, have it compute the prompts"
            " that documents will probably need next."
        ),
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
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
