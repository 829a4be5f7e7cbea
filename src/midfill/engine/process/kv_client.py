"""KvClient: what an engine process is asked about the KV in its cache."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress

from midfill.engine.kv_transfer.transfers import TransferAnswer, Transfers
from midfill.engine.messages import (
    EndTransfer,
    ExportKv,
    FindKv,
    ImportKv,
    KvExported,
    KvFound,
    KvImported,
    ToEngine,
)
from midfill.engine.process.process_handle import EngineProcess
from midfill.errors import EngineDeadError


class KvClient(ABC):
    """Exports and imports of KV. Whoever reads the process's messages ends ``_transfers``."""

    def __init__(self) -> None:
        self._transfers = Transfers()

    @abstractmethod
    def _running_process(self) -> EngineProcess:
        """Return the process.

        Raises:
            EngineDeadError: the engine is not ready.
        """

    async def cached_tokens(self, tenant: str, token_ids: Sequence[int]) -> int:
        """Return how many of a prompt's tokens are cached, from the first on.

        Raises:
            EngineDeadError: the engine is not ready, or died.
        """
        tokens = list(token_ids)
        found = await self._transfer(lambda number: FindKv(number, tenant, tokens))
        assert isinstance(found, KvFound)
        return found.tokens

    async def export_kv(self, tenant: str, token_ids: Sequence[int], start: int = 0) -> bytes:
        """Return an encoded ``KvBlob`` of what is cached of a prompt's first tokens.

        Without the first ``start``, which the receiver has.

        Raises:
            EngineDeadError: the engine is not ready, or died.
            KvTransferError: nothing of it is cached, or nothing after ``start``.
        """
        tokens = list(token_ids)
        exported = await self._transfer(lambda number: ExportKv(number, tenant, tokens, start))
        assert isinstance(exported, KvExported)
        return exported.blob

    async def import_kv(self, tenant: str, blob: bytes, before: Sequence[int] = ()) -> int:
        """Put an encoded ``KvBlob`` into a tenant's prefix cache.

        A prompt that is submitted meanwhile and begins with its tokens waits for them. ``before``
        are the tokens that an export has left out.

        Returns:
            How many tokens are cached then, from the first on, those before included.

        Raises:
            EngineDeadError: the engine is not ready, or died.
            KvTransferError: the blob is damaged, or of another model or tenant.
        """
        tokens = list(before)
        imported = await self._transfer(lambda number: ImportKv(number, tenant, blob, tokens))
        assert isinstance(imported, KvImported)
        return imported.tokens

    async def _transfer(self, message: Callable[[str], ToEngine]) -> TransferAnswer:
        """Send a message with a new transfer's id; return its answer. A cancelled one is ended."""
        process = self._running_process()
        transfer_id, result = self._transfers.start()
        process.send(message(transfer_id))
        try:
            return await result
        except asyncio.CancelledError:
            self._transfers.forget(transfer_id)
            with suppress(EngineDeadError):
                if self._running_process() is process:
                    process.send(EndTransfer(transfer_id))
            raise
