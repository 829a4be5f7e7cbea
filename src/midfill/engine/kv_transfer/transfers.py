"""Transfers: exports and imports of KV that the server waits for."""

import asyncio
import itertools

from midfill.engine.messages import KvExported, KvFound, KvImported
from midfill.errors import MidfillError

TransferAnswer = KvExported | KvImported | KvFound


class Transfers:
    """The unfinished transfers of one engine."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._waiting: dict[str, asyncio.Future[TransferAnswer]] = {}

    def start(self) -> tuple[str, asyncio.Future[TransferAnswer]]:
        """Return a new transfer's id and the future of its answer."""
        transfer_id = f"kv-transfer-{next(self._numbers)}"
        future: asyncio.Future[TransferAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[transfer_id] = future
        return transfer_id, future

    def forget(self, transfer_id: str) -> None:
        """Await a transfer's answer no more."""
        self._waiting.pop(transfer_id, None)

    def end(self, transfer_id: str, answer: TransferAnswer) -> None:
        """Give a transfer its answer; one that nobody awaits is ignored."""
        future = self._waiting.pop(transfer_id, None)
        if future is not None and not future.done():
            future.set_result(answer)

    def fail(self, transfer_id: str, error: MidfillError) -> None:
        """End a transfer with an error; one that nobody awaits is ignored."""
        future = self._waiting.pop(transfer_id, None)
        if future is not None and not future.done():
            future.set_exception(error)

    def fail_all(self, error: MidfillError) -> None:
        """End all transfers with an error."""
        for transfer_id in list(self._waiting):
            self.fail(transfer_id, error)
