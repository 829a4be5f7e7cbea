"""receive_upload: a multipart body, whose file goes to disk as it arrives.

python-multipart splits the body; nothing of it is held but the piece that has just come.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from fastapi import Request

from midfill.errors import InvalidRequestError
from midfill.serving.server.batch.store import FileObject, TenantBatches, no_room
from midfill.serving.server.responses import ApiError

if TYPE_CHECKING:  # needs an extra
    from python_multipart.multipart import MultipartCallbacks

_MAX_PARTS = 16
_MAX_FIELD_BYTES = 1024
_MAX_NAME = 200  # characters of a file's name
_WRITE_BYTES = 1 << 20
_PURPOSE = "batch"


async def receive_upload(request: Request, stored: TenantBatches) -> FileObject:
    """Store the file of a multipart body.

    Args:
        request: whose body is unread.
        stored: the tenant's files.

    Raises:
        ApiError: 413 for a file that there is no room for, 415 for another kind of body.
        InvalidRequestError: the body is damaged, or a field is missing.
    """
    boundary = _boundary(request)
    path = stored.begin_file()
    upload = _Upload(boundary, path, stored)
    try:
        async for chunk in request.stream():
            upload.write(chunk)
            await asyncio.sleep(0)  # others' turn, however fast the body comes
            if upload.pending >= _WRITE_BYTES:
                await asyncio.to_thread(upload.flush)
        upload.finish()
        await asyncio.to_thread(upload.flush)
        upload.file.close()
        return await stored.add_file(path, upload.filename, _PURPOSE)
    except OSError:
        raise no_room() from None
    finally:
        upload.file.close()
        path.unlink(missing_ok=True)
        stored.reserve(-upload.reserved)


def _boundary(request: Request) -> bytes:
    """Return what separates the parts of a multipart body.

    Raises:
        ApiError: the body is another one, or a web page sends it: pages can send such bodies
            anywhere without asking first.
    """
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary or "origin" in request.headers:
        raise ApiError(
            415,
            "the body must be a form with a file: Content-Type: multipart/form-data, and not from"
            " a web page",
            code="unsupported_media_type",
        )
    return boundary


class _Upload:
    """A multipart body that is being received.

    Attributes:
        file: where the file's content goes.
        pending: how many bytes of it are not written yet.
        reserved: how many bytes of the tenant's room it takes.
        filename: the client's name for it.
    """

    def __init__(self, boundary: bytes, path: Path, stored: TenantBatches) -> None:
        from python_multipart.multipart import MultipartParser

        self.file: IO[bytes] = path.open("wb")
        self.pending = self.reserved = 0
        self.filename = ""
        self._chunks: list[bytes] = []
        self._stored = stored
        self._parts = 0
        self._fields: dict[bytes, bytes] = {}
        self._headers: dict[bytes, bytes] = {}
        self._header = (b"", b"")
        self._name = b""
        self._has_file = self._in_file = self._is_whole = False
        callbacks: MultipartCallbacks = {
            "on_part_begin": self._begin_part,
            "on_header_field": self._header_name,
            "on_header_value": self._header_value,
            "on_header_end": self._end_header,
            "on_headers_finished": self._end_headers,
            "on_part_data": self._data,
            "on_end": self._end,
        }
        self._parser = MultipartParser(boundary, callbacks)

    def write(self, chunk: bytes) -> None:
        """Take the next piece of the body.

        Raises:
            InvalidRequestError: it is damaged.
            ApiError: there is no room for it.
        """
        self._parse(lambda: self._parser.write(chunk))

    def finish(self) -> None:
        """Check that all is there.

        Raises:
            InvalidRequestError: it isn't.
        """
        self._parse(self._parser.finalize)
        if not self._is_whole:
            raise InvalidRequestError("the body ends before its form does")
        purpose = self._fields.get(b"purpose")
        if purpose is None:
            raise InvalidRequestError("purpose is missing", param="purpose")
        if purpose != _PURPOSE.encode():
            raise InvalidRequestError(f"purpose must be {_PURPOSE}", param="purpose")
        if not self._has_file:
            raise InvalidRequestError("file is missing", param="file")

    def flush(self) -> None:
        """Write what is pending; may be called on another thread."""
        self.file.writelines(self._chunks)
        self.file.flush()
        self._chunks, self.pending = [], 0

    def _parse(self, call: Callable[[], object]) -> None:
        from python_multipart.exceptions import FormParserError

        try:
            call()
        except FormParserError as error:
            raise InvalidRequestError(f"the body is no valid form: {error}") from None

    def _begin_part(self) -> None:
        self._parts += 1
        if self._parts > _MAX_PARTS:
            raise InvalidRequestError(f"the form has more than {_MAX_PARTS} parts")
        self._headers, self._header = {}, (b"", b"")

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = name + data[start:end], value

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        name, value = self._header
        self._header = name, value + data[start:end]

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = (b"", b"")

    def _end_headers(self) -> None:
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        self._name = options.get(b"name", b"")
        self._in_file = self._name == b"file"
        if self._in_file:
            if self._has_file:
                raise InvalidRequestError("the form has several files", param="file")
            self._has_file = True
            filename = options.get(b"filename", b"").decode("utf-8", "replace")
            self.filename = filename[:_MAX_NAME] or "upload.jsonl"
        else:
            self._fields[self._name] = b""

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._in_file:
            self._stored.reserve(end - start)
            self.reserved += end - start
            self.pending += end - start
            self._chunks.append(data[start:end])
        elif self._name in self._fields:
            value = self._fields[self._name] + data[start:end]
            self._fields[self._name] = value[:_MAX_FIELD_BYTES]

    def _end(self) -> None:
        self._is_whole = True
