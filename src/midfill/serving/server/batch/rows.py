"""Rows of a batch: OpenAI's format of requests and results, a JSON object per line."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from midfill.errors import MidfillError

ROW_URLS = ("/v1/completions", "/v1/chat/completions")
"""Endpoints that a row may name."""

ID_PREFIX = "batch_req_"
_DIGEST_BYTES = 8
_ROW_BYTES = 1 << 16  # of a row beside its body
_MAX_QUOTED = 200


class RowRequest(msgspec.Struct, kw_only=True):
    """A row of the input.

    Attributes:
        custom_id: the client's name for it, unique in the file.
        url: the endpoint.
        body: what the endpoint gets.
        method: of HTTP; POST.
    """

    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class RowError(msgspec.Struct, kw_only=True):
    """Why a row has no response.

    Attributes:
        code: for programs.
        message: for people.
    """

    code: str
    message: str


class RowResponse(msgspec.Struct, kw_only=True):
    """What the endpoint has answered.

    Attributes:
        status_code: of HTTP.
        request_id: names this response alone.
        body: the body, as over HTTP; an error's, too.
    """

    status_code: int
    request_id: str
    body: msgspec.Raw


class RowResult(msgspec.Struct, kw_only=True):
    """A row of the output.

    Attributes:
        id: names the row of the input, see ``RowPlace``.
        custom_id: the client's name; None where the row has none that can be read.
        response: what the endpoint has answered; None if it wasn't asked.
        error: why it wasn't; None if it was.
    """

    id: str
    custom_id: str | None
    response: RowResponse | None = None
    error: RowError | None = None

    @property
    def succeeded(self) -> bool:
        """Whether there is an answer."""
        return self.response is not None and self.response.status_code < 400


class InvalidRowError(MidfillError):
    """A row that no endpoint can be asked with.

    Attributes:
        code: for programs.
        custom_id: of the row, if it can be read.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.custom_id = custom_id


class RowPlace(NamedTuple):
    """Where a row is in its file.

    Attributes:
        number: of its line, from 1.
        offset, size: of its bytes.
        id: made of its number and content, so that a result is known to be this row's.
    """

    number: int
    offset: int
    size: int
    id: str


class RowFile:
    """The rows of an input file, which are read when they are needed.

    Args:
        path: the file.
        max_body_bytes: maximum size of a body.
        urls: endpoints that rows may name.

    Raises:
        MidfillError: the file can't be read.
    """

    def __init__(self, path: Path, max_body_bytes: int, urls: Sequence[str] = ROW_URLS) -> None:
        self.path = path
        self._urls = urls
        self._max_bytes = max_body_bytes + _ROW_BYTES
        try:
            self._file = path.open("rb")
        except OSError as error:
            raise MidfillError(f"{path}: {error.strerror}") from None

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def places(self) -> Iterator[RowPlace]:
        """Yield where each row is; empty lines are none.

        Raises:
            MidfillError: the file can't be read.
        """
        offset = number = 0
        try:
            while line := self._file.readline(self._max_bytes + 1):
                number, size, is_empty = number + 1, len(line), not line.strip()
                digest = _digest(line)
                while not line.endswith(b"\n") and (line := self._file.readline(self._max_bytes)):
                    size, is_empty = size + len(line), is_empty and not line.strip()
                after = self._file.tell()
                if not is_empty:
                    yield RowPlace(number, offset, size, f"{ID_PREFIX}{number}_{digest}")
                offset = after
                self._file.seek(after)  # rows may have been read meanwhile
        except OSError as error:
            raise MidfillError(f"{self.path}: {error.strerror}") from None

    def request(self, place: RowPlace) -> RowRequest:
        """Return a row's request.

        Raises:
            InvalidRowError: it is too long, no JSON, or lacks a field.
            MidfillError: the file can't be read, or has changed.
        """
        if place.size > self._max_bytes:
            raise InvalidRowError(
                "row_too_large", f"line {place.number} is longer than {self._max_bytes} bytes"
            )
        try:
            self._file.seek(place.offset)
            line = self._file.read(place.size).rstrip(b"\r\n")
        except OSError as error:
            raise MidfillError(f"{self.path}: {error.strerror}") from None
        if not place.id.endswith(_digest(line)):
            raise MidfillError(f"{self.path}: line {place.number} has changed while it was read")
        return parse_row(line, place.number, self._urls)


def count_rows(path: Path) -> int:
    """Count the rows of a file, valid or not: its lines that aren't empty.

    Raises:
        MidfillError: it can't be read.
    """
    try:
        with path.open("rb") as file:
            return sum(bool(line.strip()) for line in file)
    except OSError as error:
        raise MidfillError(f"{path}: {error.strerror}") from None


def _digest(line: bytes) -> str:
    return hashlib.blake2b(line.rstrip(b"\r\n"), digest_size=_DIGEST_BYTES).hexdigest()


def parse_row(line: bytes, number: int, urls: Sequence[str] = ROW_URLS) -> RowRequest:
    """Return the request of a line.

    Args:
        line: its bytes.
        number: from 1.
        urls: endpoints that it may name.

    Raises:
        InvalidRowError: it is no JSON, lacks a field, or asks what no batch can.
    """
    try:
        row = msgspec.json.decode(line, type=RowRequest)
    except msgspec.ValidationError as error:
        reason = str(error).replace("`", "")[:_MAX_QUOTED]
        raise InvalidRowError(
            "invalid_row", f"line {number} is no request: {reason}", _custom_id(line)
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        reason = str(error)[:_MAX_QUOTED]
        raise InvalidRowError(
            "invalid_json_line", f"line {number} is not valid JSON: {reason}"
        ) from None
    if row.method != "POST":
        raise InvalidRowError(
            "invalid_method", f"method must be POST, not {row.method[:_MAX_QUOTED]}", row.custom_id
        )
    if row.url not in urls:
        known = " or ".join(urls)
        raise InvalidRowError(
            "invalid_url", f"url must be {known}, not {row.url[:_MAX_QUOTED]}", row.custom_id
        )
    return row


class _Named(msgspec.Struct):
    custom_id: str | None = None


def _custom_id(line: bytes) -> str | None:
    """Return what names a row that has another fault, if it is there."""
    try:
        return msgspec.json.decode(line, type=_Named).custom_id
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
