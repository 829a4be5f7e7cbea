"""ServePeers: the other replicas of a deployment, behind a handle of Ray Serve."""

import asyncio
import contextlib
from collections.abc import Sequence

from ray import exceptions as ray_errors
from ray import serve
from ray.serve import exceptions as serve_errors

from midfill.errors import KvTransferError
from midfill.serving.cluster.names import ENGINE

_LOST = (ray_errors.RayError, serve_errors.RayServeException)


class ServePeers:
    """See ``kv_moves.KvPeers``.

    Args:
        app: name of the replicas' application.
    """

    def __init__(self, app: str) -> None:
        # Made known to Serve now, since the first request's patience is short.
        handle = serve.get_deployment_handle(ENGINE, app)
        self._export = handle.options(method_name="export_kv")

    async def export_kv(
        self, replica: str, tenant: str, token_ids: Sequence[int], start: int
    ) -> bytes:
        """Return what a replica has cached; see ``kv_moves.KvPeers``."""
        response = self._export.remote(tenant, list(token_ids), start, replica=replica)
        blob: bytes | None = None
        try:
            blob = await response
        except _LOST as error:
            if _cancels_this_task():  # Serve may say so in its own way
                raise asyncio.CancelledError from error
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise KvTransferError(f"the replica was lost: {reason}") from error
        finally:
            if blob is None:
                with contextlib.suppress(*_LOST):
                    response.cancel()
        if not blob:
            raise KvTransferError("it has nothing of it any more, or has gone")
        return bytes(blob)


def _cancels_this_task() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
