"""KnownTokens: what a decode worker has of a prompt, asked for while that is computed."""

import asyncio

from midfill.engine.disaggregated.worker_queues import DecodeQueue
from midfill.engine.request import EngineRequest
from midfill.errors import EngineDeadError


class KnownTokens:
    """What a decode worker has cached of a prompt, asked for beside its prefill.

    Args:
        worker: who is asked; None for nobody.
        request: the prompt's.
    """

    def __init__(self, worker: DecodeQueue | None, request: EngineRequest) -> None:
        self._worker = worker
        self._request = request
        self._task: asyncio.Task[int] | None = None

    def __enter__(self) -> "KnownTokens":
        if self._worker is not None:
            engine, request = self._worker.engine, self._request
            asked = engine.cached_tokens(request.tenant, request.token_ids)
            self._task = asyncio.create_task(asked, name="asking for cached tokens")
            self._task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return self

    def __exit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()

    async def of(self, worker: DecodeQueue) -> int:
        """Return how many tokens a worker has; 0 if it was not asked, or died."""
        if self._task is None or worker is not self._worker:
            return 0
        try:
            return await self._task
        except EngineDeadError:
            return 0
