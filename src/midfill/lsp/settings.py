"""Settings: from the command line, then from the client, which may change them at any time."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec

from midfill.serving.options import DEFAULT_URL

SECTION = "midfill"


class Settings(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How to complete. Clients write the names in camel case: ``maxTokens``.

    Attributes:
        url: of the server that is asked.
        api_key: a key that a server wants.
        key_url: whose key that is, the one at this ``url``. A key stays bound to the URL that it
            was first given with: the settings of a folder that is opened may name another one.
        model: serve this model in a process of its own instead of asking ``url``.
        start: if no server answers at ``url``, serve the default model in a process of its own.
        max_tokens: maximum tokens of a completion.
        lines: "single" completes lines, "block" also the rest of a block where the caret is at the
            end of its line.
        alternatives: number of completions to offer when the user asks for them.
        min_confidence: offer no completion by itself whose first line is right with a lower
            probability; None leaves that to the server. 0 offers them all, just as the model wrote
            them.
        debounce_ms: milliseconds without a change before the model is asked for a completion that
            the user has not asked for.
        menu: whether to answer ``textDocument/completion`` as well: "auto" does so if the client
            does not know inline completion. Read when the client connects.
    """

    url: str = DEFAULT_URL
    api_key: str | None = None
    key_url: str | None = None
    model: str | None = None
    start: bool = False
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 64
    lines: Literal["single", "block"] = "block"
    alternatives: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    min_confidence: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    debounce_ms: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 50
    menu: Literal["auto", "always", "never"] = "auto"

    @property
    def access(self) -> tuple[object, ...]:
        """What decides which server is asked."""
        return self.url, self.sent_key, self.model, self.start

    @property
    def sent_key(self) -> str | None:
        """The key to send to ``url``: only its own."""
        return self.api_key if self.key_url == self.url else None

    def updated(self, given: object) -> tuple["Settings", list[str]]:
        """Return the settings with those that a client has sent, and what is wrong with others.

        What is wrong keeps its present value.

        Args:
            given: the client's value, of whatever shape: settings, or settings in a section
                ``midfill``. Unknown settings are ignored, null means the present one.
        """
        if isinstance(given, Mapping) and isinstance(given.get(SECTION), Mapping):
            given = given[SECTION]
        if given is None:
            return self, []
        if not isinstance(given, Mapping):
            return self, ["expected an object of settings"]
        values: dict[str, Any] = {}
        problems = []
        for field in msgspec.structs.fields(Settings):
            value = given.get(field.encode_name)
            if value is None or field.name == "key_url":
                continue
            try:
                values[field.name] = msgspec.convert(value, field.type)
                if field.name == "url":
                    values[field.name] = checked_url(value)
                if field.name == "api_key":
                    check_api_key(value)
            except (msgspec.ValidationError, ValueError) as error:
                values.pop(field.name, None)
                problems.append(f"{field.encode_name}: {_reason(field.type, error)}")
        url = values.get("url", self.url)
        if values.get("api_key", self.api_key) != self.api_key:
            values["key_url"] = url
        updated = msgspec.structs.replace(self, **values)
        if updated.api_key is not None and updated.sent_key is None:
            problems.append(
                f"apiKey: the key is for {updated.key_url}, and expected nowhere else; it is not"
                f" sent to {url}. Give the key of {url} or, if it is the same, start again"
            )
        return updated, problems


def check_api_key(key: str) -> None:
    """Refuse a key that no HTTP header can hold.

    Raises:
        ValueError: it can't be sent; the message doesn't quote it.
    """
    if not (key.isascii() and key.isprintable()):
        raise ValueError("expected printable ASCII characters")


def checked_url(url: str) -> str:
    """Return a server's URL without the API's path.

    Raises:
        ValueError: it is no HTTP URL.
    """
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"expected a URL like {DEFAULT_URL}")
    return url.rstrip("/").removesuffix("/v1")


def _reason(kind: Any, error: Exception) -> str:
    if get_origin(kind) is Literal:
        return f"expected one of {', '.join(get_args(kind))}"
    return str(error).replace("Expected", "expected")
