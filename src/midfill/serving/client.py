"""A client of a midfill server, for commands: which models it serves, and an infill as a stream.

It follows no redirects: a key, and a text with it, goes to the address that its owner named.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import TypeVar
from urllib.parse import urlsplit

import msgspec

from midfill.errors import MidfillError

T = TypeVar("T")

_ANSWER_SECONDS = 120.0  # between two pieces of an answer
_MAX_LINE = 2**24  # bytes


class NoServerError(MidfillError):
    """No midfill server answers."""


class KeyRefusedError(MidfillError):
    """The server wants another API key, or one at all."""


class _ModelDetails(msgspec.Struct):
    sentinels: bool = True


class ServedModel(msgspec.Struct):
    """A name that a server has for its model.

    Attributes:
        id: the name.
        midfill: whether the model has FIM tokens.
    """

    id: str
    midfill: _ModelDetails = msgspec.field(default_factory=_ModelDetails)

    @property
    def infills(self) -> bool:
        """Whether it sees what stands after the caret."""
        return self.midfill.sentinels


class _Models(msgspec.Struct):
    data: list[ServedModel]


class _Choice(msgspec.Struct):
    text: str


class _Error(msgspec.Struct):
    message: str


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None


@dataclass(frozen=True)
class ServerClient:
    """A server at a URL, asked with a key if there is one."""

    url: str
    api_key: str | None = None

    def models(self, timeout: float = _ANSWER_SECONDS) -> list[ServedModel]:
        """Return the names of what is served.

        Args:
            timeout: seconds to wait.

        Raises:
            NoServerError: nothing answers there, or it is no server of models.
            KeyRefusedError: the server wants another key.
            MidfillError: it refuses the request.
        """
        with self._answer("GET", "/v1/models", None, timeout) as answer:
            return self._decoded(answer.read(), _Models).data

    def complete(self, body: Mapping[str, object]) -> Iterator[str]:
        """Yield the pieces of a completion's text as they arrive.

        Args:
            body: of ``POST /v1/completions``, without ``stream``.

        Raises:
            NoServerError, KeyRefusedError: see ``models``; also if the answer breaks off.
            MidfillError: it refuses the request, or fails amid the answer.
        """
        sent = json.dumps({**body, "stream": True}).encode()
        with self._answer("POST", "/v1/completions", sent, _ANSWER_SECONDS) as answer:
            while line := answer.readline(_MAX_LINE):
                field, _, data = line.strip().partition(b": ")
                if data == b"[DONE]":
                    return
                if field != b"data":
                    continue
                event = self._decoded(data, _Event)
                if event.error is not None:
                    raise MidfillError(f"{self.url}: {event.error.message}")
                yield from (choice.text for choice in event.choices)
            raise NoServerError(f"the answer of {self.url} breaks off")

    @contextmanager
    def _answer(
        self, method: str, path: str, body: bytes | None, timeout: float
    ) -> Iterator[HTTPResponse]:
        """Send a request; yield its answer, which has status 200."""
        headers = {} if body is None else {"content-type": "application/json"}
        if self.api_key is not None:
            headers["authorization"] = f"Bearer {self.api_key}"
        connection: HTTPConnection | None = None
        try:
            parts = urlsplit(self.url)
            kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
            connection = kind(parts.hostname or "", parts.port, timeout=timeout)
            connection.request(method, parts.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            if answer.status != 200:
                self._raise_for(answer)
            yield answer
        except (OSError, HTTPException, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise NoServerError(f"no server answers at {self.url} ({reason})") from None
        finally:
            if connection is not None:
                connection.close()

    def _raise_for(self, answer: HTTPResponse) -> None:
        try:
            event = msgspec.json.decode(answer.read(_MAX_LINE), type=_Event)
        except msgspec.DecodeError:
            event = _Event()
        said = answer.reason if event.error is None else event.error.message
        if answer.status in (401, 403):
            raise KeyRefusedError(f"{self.url} refuses the API key: {said}")
        raise MidfillError(f"{self.url} answers {answer.status}: {said}")

    def _decoded(self, data: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise NoServerError(
                f"what answers at {self.url} is no midfill server ({error})"
            ) from None
