"""open_batches: the endpoints of files and batches, and what answers the rows of batches."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

from midfill.serving.options import ServeOptions
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.batch.api import RowService
from midfill.serving.server.batch.routes import batch_dialect
from midfill.serving.server.batch.store import BatchStore
from midfill.serving.server.batch.worker import BatchWorker
from midfill.serving.server.dialects.dialect import Dialect
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.opened_model import OpenedModel, assemble
from midfill.system.cache import cache_folder
from midfill.system.extras import require


async def open_row_service(options: ServeOptions, opened: OpenedModel) -> RowService:
    """Return the service of a model that answers the rows of batches.

    Args:
        options: what to serve and how. Nothing is computed in idle time, and nobody gives up.
        opened: the model.
    """
    rows = dataclasses.replace(options, idle_prefill=False, completion_timeout=0.0)
    return await assemble(
        RowService, rows, opened.checkpoint, opened.format, opened.engine, opened.info,
        remembers=False,
    )  # fmt: skip


@contextlib.asynccontextmanager
async def open_batches(
    options: ServeOptions, opened: OpenedModel, keys: KeyRing, limits: RateLimits
) -> AsyncIterator[Dialect]:
    """Answer stored batches within the ``with`` block; return their endpoints.

    Raises:
        MidfillError: their folder can't be used, or a library is missing.
    """
    kept = options.batches
    require("--batch-storage", ["python_multipart"], extra="batch")
    folder = cache_folder() / "batches" if kept.folder is None else Path(kept.folder)
    store = BatchStore(folder, kept.storage, kept.files, keys.identity, kept.rows)
    try:
        for tenant in keys.tenants:
            store.of(tenant)  # so that their unfinished batches go on
        service = await open_row_service(options, opened)
        try:
            worker = BatchWorker(store, service, limits.idle, opened.info.slots)
            worker.start()
            try:
                yield batch_dialect(worker)
            finally:
                await worker.close()
        finally:
            service.close()
    finally:
        store.close()
