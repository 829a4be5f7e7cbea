"""Options of a command that asks a running server, or else loads the model by itself."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from midfill.errors import MidfillError, OptionError
from midfill.serving.options import API_KEY_VARIABLE, DEFAULT_URL

if TYPE_CHECKING:
    from midfill.serving.client import ServedModel, ServerClient

_LOOK_SECONDS = 0.5  # that a server on this machine has to say what it serves

UrlOption = Annotated[
    str | None,
    typer.Option(
        metavar="URL",
        help=f"Ask this server. By default the one at {DEFAULT_URL}, if it serves the model;"
        " otherwise the model is loaded here.",
    ),
]
KeyOption = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", help=f"Key for the server at --url; by default {API_KEY_VARIABLE}'s first."
    ),
]
NoServerOption = Annotated[
    bool, typer.Option("--no-server", help="Load the model here, whatever server is running.")
]


@dataclass(frozen=True)
class ServerFlags:
    """Which server is asked."""

    url: UrlOption = None
    api_key: KeyOption = None
    no_server: NoServerOption = False

    def find(
        self, model: str | None, own: Sequence[str]
    ) -> "tuple[ServerClient, ServedModel] | None":
        """Return the server to ask and the model that it serves; None where one is loaded here.

        A server that nobody has named is told no key, and said on standard error.

        Args:
            model: what the user names; None for the default model.
            own: given options that are about a model that is loaded here.

        Raises:
            OptionError: options that don't go together.
            MidfillError: no server answers at ``url``, or it refuses the key or the model.
        """
        if self.api_key is not None and self.url is None:
            raise OptionError("--api-key is the key of a server: name that with --url")
        if self.url is not None:
            if self.no_server:
                raise OptionError("--url names a server and --no-server wants none: give only one")
            if own:
                raise OptionError(
                    f"{own[0]} is for a model that is loaded here, and --url names a server, which"
                    " has its own: give only one"
                )
            return self._named(self.url, model)
        is_file = model is not None and Path(model).expanduser().exists()
        return None if self.no_server or own or is_file else _running(model)

    def _named(self, url: str, model: str | None) -> "tuple[ServerClient, ServedModel]":
        from midfill.serving.client import ServerClient

        url = (url if "://" in url else f"http://{url}").rstrip("/").removesuffix("/v1")
        key = self.api_key or next(iter(os.environ.get(API_KEY_VARIABLE, "").split()), None)
        client = ServerClient(url, key)
        models = client.models()
        for each in models:
            if model in (None, each.id):
                return client, each
        served = ", ".join(each.id for each in models) or "nothing"
        raise MidfillError(f"{url} serves {served}, and not {model}")


def _running(model: str | None) -> "tuple[ServerClient, ServedModel] | None":
    """Return the server at the default address, if there is one and it serves the model."""
    from midfill.models.checkpoints.model_store import DEFAULT_MODEL
    from midfill.serving.client import KeyRefusedError, ServerClient

    client = ServerClient(DEFAULT_URL)
    try:
        models = client.models(_LOOK_SECONDS)
    except KeyRefusedError:
        _say(f"the server at {client.url} wants an API key; --url {client.url} sends it yours")
        return None
    except MidfillError:
        return None
    for each in models:
        if each.id == (model or DEFAULT_MODEL):
            _say(f"asking the server at {client.url}; --no-server loads the model here")
            return client, each
    return None


def _say(text: str) -> None:
    typer.echo(f"midfill: {text}", err=True)
