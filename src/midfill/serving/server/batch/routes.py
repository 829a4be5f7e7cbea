"""/v1/files and /v1/batches: OpenAI's API of batches."""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from fastapi.responses import FileResponse, Response

from midfill.errors import InvalidRequestError
from midfill.serving.server.batch.rows import ROW_URLS, count_rows
from midfill.serving.server.batch.store import (
    BatchObject,
    FileObject,
    RequestCounts,
    TenantBatches,
    no_room,
)
from midfill.serving.server.batch.upload import receive_upload
from midfill.serving.server.batch.worker import BatchWorker
from midfill.serving.server.bodies import body_reference, json_response, read_json
from midfill.serving.server.dialects.dialect import Dialect, TenantOf
from midfill.serving.server.responses import ApiError
from midfill.serving.server.service import ModelService

_WINDOW = "24h"
_MAX_METADATA, _MAX_KEY, _MAX_VALUE = 16, 64, 512
_MAX_UNFINISHED = 20
_UPLOAD = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["purpose", "file"],
                    "properties": {
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "file": {"type": "string", "format": "binary"},
                    },
                }
            }
        },
    }
}
_Limit = Annotated[int, Query(ge=1, le=100)]


class BatchRequest(msgspec.Struct, kw_only=True):
    """The body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str = _WINDOW
    metadata: dict[str, str] | None = None


def batch_dialect(worker: BatchWorker) -> Dialect:
    """Return the dialect of the endpoints of files and batches."""
    return Dialect(routes=partial(_routes, worker), bodies=(BatchRequest,))


def _routes(worker: BatchWorker, service: ModelService, tenant_of: TenantOf) -> APIRouter:
    async def stored_of(tenant: Annotated[str, Depends(tenant_of)]) -> TenantBatches:
        return worker.store.of(tenant)

    router = APIRouter()
    stored = Depends(stored_of)
    _add_files(router, stored)
    _add_batches(router, stored, worker, service)
    return router


def _add_files(router: APIRouter, stored_of: object) -> None:
    Stored = Annotated[TenantBatches, stored_of]

    @router.post("/v1/files", openapi_extra=_UPLOAD)
    async def upload(request: Request, stored: Stored) -> Response:
        """Store a file of requests."""
        return json_response(await receive_upload(request, stored))

    @router.get("/v1/files")
    async def files(stored: Stored, limit: _Limit = 100, after: str | None = None) -> Response:
        """List stored files, the newest first."""
        return json_response(_page(stored.files, limit, after))

    @router.get("/v1/files/{file_id}")
    async def file(file_id: str, stored: Stored) -> Response:
        """Describe a file."""
        return json_response(_find(stored.files, file_id, "file"))

    @router.get("/v1/files/{file_id}/content")
    async def content(file_id: str, stored: Stored) -> Response:
        """Send a file's content."""
        found = _find(stored.files, file_id, "file")
        return FileResponse(stored.content(found.id), media_type="application/jsonl")

    @router.delete("/v1/files/{file_id}")
    async def delete(file_id: str, stored: Stored) -> Response:
        """Remove a file that no unfinished batch reads."""
        found = _find(stored.files, file_id, "file")
        for batch in stored.batches.values():
            if batch.is_unfinished and batch.input_file_id == found.id:
                raise ApiError(
                    409, f"batch {batch.id} reads this file; cancel it first", code="file_in_use"
                )
        stored.delete_file(found.id)
        return json_response({"id": found.id, "object": "file", "deleted": True})


def _add_batches(
    router: APIRouter, stored_of: object, worker: BatchWorker, service: ModelService
) -> None:
    Stored = Annotated[TenantBatches, stored_of]

    @router.post("/v1/batches", openapi_extra=body_reference(BatchRequest))
    async def create(request: Request, stored: Stored) -> Response:
        """Begin a batch."""
        body = await read_json(request, BatchRequest, service.max_body_bytes)
        _check(body, stored)
        rows = await asyncio.to_thread(count_rows, stored.content(body.input_file_id))
        _check_rows(rows, stored, worker.store.max_rows)
        now = int(time.time())
        batch = BatchObject(
            id=f"batch_{uuid.uuid4().hex}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            metadata=body.metadata,
            request_counts=RequestCounts(total=rows),
        )
        try:
            await stored.save(batch)
        except OSError:  # the disk is full
            stored.batches.pop(batch.id, None)
            raise no_room() from None
        worker.wake()
        return json_response(batch)

    @router.get("/v1/batches")
    async def batches(stored: Stored, limit: _Limit = 20, after: str | None = None) -> Response:
        """List batches, the newest first."""
        return json_response(_page(stored.batches, limit, after))

    @router.get("/v1/batches/{batch_id}")
    async def batch(batch_id: str, stored: Stored) -> Response:
        """Say how far a batch is."""
        return json_response(_find(stored.batches, batch_id, "batch"))

    @router.post("/v1/batches/{batch_id}/cancel")
    async def cancel(batch_id: str, stored: Stored) -> Response:
        """End a batch with the results that are there."""
        found = _find(stored.batches, batch_id, "batch")
        if found.status not in ("validating", "in_progress"):
            raise ApiError(
                409, f"the batch is {found.status} already", code="batch_not_cancellable"
            )
        await worker.cancel(stored, found)
        return json_response(found)


def _check(body: BatchRequest, stored: TenantBatches) -> None:
    """Refuse a batch that can't be begun."""
    if body.endpoint not in ROW_URLS:
        raise InvalidRequestError(f"endpoint must be {' or '.join(ROW_URLS)}", param="endpoint")
    if body.completion_window != _WINDOW:
        raise InvalidRequestError(f"completion_window must be {_WINDOW}", param="completion_window")
    file = _find(stored.files, body.input_file_id, "file")
    if file.purpose != "batch":
        raise InvalidRequestError(
            "input_file_id must be a file with purpose batch", param="input_file_id"
        )
    metadata = body.metadata or {}
    if len(metadata) > _MAX_METADATA or any(
        len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in metadata.items()
    ):
        raise InvalidRequestError(
            f"metadata has at most {_MAX_METADATA} entries, keys up to {_MAX_KEY} characters and"
            f" values up to {_MAX_VALUE}",
            param="metadata",
        )
    if sum(batch.is_unfinished for batch in stored.batches.values()) >= _MAX_UNFINISHED:
        raise ApiError(
            429, f"{_MAX_UNFINISHED} batches are unfinished, as many as may be",
            code="too_many_batches", headers={"retry-after": "60"},
        )  # fmt: skip


def _check_rows(rows: int, stored: TenantBatches, most: int) -> None:
    """Refuse a batch whose rows are too many, alone or beside those of unfinished batches."""
    if rows > most:
        raise InvalidRequestError(
            f"the file has {rows} rows; a batch has at most {most}", param="input_file_id"
        )
    queued = sum(
        batch.request_counts.total for batch in stored.batches.values() if batch.is_unfinished
    )
    if queued + rows > most:
        raise ApiError(
            429, f"{rows} rows beside {queued} of unfinished batches are more than {most}",
            code="too_many_rows", headers={"retry-after": "60"},
        )  # fmt: skip


T = TypeVar("T", FileObject, BatchObject)


def _find(known: Mapping[str, T], name: str, kind: str) -> T:
    found = known.get(name)
    if found is None:
        raise ApiError(404, f"there is no {kind} {name[:100]!r}", code=f"{kind}_not_found")
    return found


def _page(known: Mapping[str, T], limit: int, after: str | None) -> dict[str, object]:
    """Return OpenAI's page of a list, the newest first."""
    newest: Sequence[T] = list(known.values())[::-1]
    ids = [each.id for each in newest]
    start = ids.index(after) + 1 if after in ids else 0
    shown = newest[start : start + limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": start + limit < len(newest),
    }
