"""Replicas behind handles of Ray Serve: for the server in front, and for the other replicas."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import msgspec
from ray import exceptions as ray_errors
from ray import serve
from ray.serve import exceptions as serve_errors

from midfill.engine.request import EngineRequest
from midfill.errors import EngineDeadError, KvTransferError
from midfill.serving.cluster.messages import FromReplica, KvHint, ReplicaNumbers
from midfill.serving.cluster.observed_router import numbers_of
from midfill.serving.cluster.spec import ENGINE

_ACCEPT_SECONDS = 10.0  # until a replica takes a request; they take hundreds at a time
_LOST = (ray_errors.RayError, serve_errors.RayServeException)

_decoder: msgspec.msgpack.Decoder[FromReplica] = msgspec.msgpack.Decoder(FromReplica)


class ServeReplicas:
    """The replicas of one model.

    Args:
        handle: of the deployment of ``EngineReplica``.
        app: its application's name.
    """

    def __init__(self, handle: Any, app: str) -> None:
        self._generate = handle.options(stream=True).generate
        self._app = app

    def numbers(self) -> Mapping[str, ReplicaNumbers]:
        """Return the last numbers of each replica, by its name."""
        return numbers_of(self._app)

    async def ask(
        self, request: EngineRequest, document: str, avoid: list[str], hint: KvHint
    ) -> AsyncGenerator[FromReplica, None]:
        """Yield what the replica that gets the request answers; closing it cancels the request.

        Args:
            request: what to ask.
            document: ``engine.routing.request_key``.
            avoid: replicas that have failed on it.
            hint: where its KV is.

        Raises:
            EngineDeadError: there is no replica, or it was lost.
        """
        # Another machine's clock counts from another time.
        left = None if request.deadline is None else request.deadline - time.monotonic()
        messages = self._generate.remote(
            msgspec.msgpack.encode(msgspec.structs.replace(request, deadline=None)),
            seconds=left,
            document=document,
            avoid=list(avoid),
            background=request.background,
            hint=msgspec.msgpack.encode(hint),
        )
        ended = False
        try:
            yield _decoder.decode(await self._first(messages))
            async for message in messages:
                yield _decoder.decode(message)
            ended = True
        except (*_LOST, asyncio.CancelledError) as error:
            if _cancels_this_task():
                raise
            raise EngineDeadError(
                f"the replica was lost: {_reason(error)}", retry_after=1
            ) from error
        finally:
            if not ended:
                with contextlib.suppress(*_LOST, asyncio.CancelledError):
                    messages.cancel()

    async def _first(self, messages: Any) -> bytes:
        """Return the first message.

        Raises:
            EngineDeadError: no replica takes the request.
        """
        try:
            async with asyncio.timeout(_ACCEPT_SECONDS):
                return bytes(await anext(messages))
        except TimeoutError:
            raise EngineDeadError(
                "no replica takes requests now; try again in a moment", retry_after=5
            ) from None
        except StopAsyncIteration:
            raise EngineDeadError("the replica was lost", retry_after=1) from None


class ServePeers:
    """The other replicas.

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
        """Return an encoded ``KvBlob`` of what a replica has cached of a prompt from ``start`` on.

        Raises:
            KvTransferError: it has nothing, or it can't be reached.
        """
        response = self._export.remote(tenant, list(token_ids), start, replica=replica)
        blob: bytes | None = None
        try:
            blob = await response
        except _LOST as error:
            if _cancels_this_task():  # Serve may say so in its own way
                raise asyncio.CancelledError from error
            raise KvTransferError(f"the replica was lost: {_reason(error)}") from error
        finally:
            if blob is None:
                with contextlib.suppress(*_LOST):
                    response.cancel()
        if not blob:
            raise KvTransferError("it has nothing of it any more, or has gone")
        return bytes(blob)


def _reason(error: BaseException) -> str:
    """Return the first line of what went wrong."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _cancels_this_task() -> bool:
    """Whether it was this task that was cancelled, rather than a call that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
