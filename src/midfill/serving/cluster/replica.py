"""EngineReplica: one engine on a Ray cluster, as Serve runs it."""

import asyncio
import os
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from typing import Any

import msgspec
from ray import serve

from midfill.engine.messages import Failed
from midfill.engine.process.client import EngineClient
from midfill.engine.request import EngineRequest
from midfill.errors import MidfillError
from midfill.serving.cluster.kv_moves import KvMoves
from midfill.serving.cluster.messages import (
    Accepted,
    FromReplica,
    KvHint,
    Output,
    ReplicaNumbers,
)
from midfill.serving.cluster.serve_handles import ServePeers
from midfill.serving.cluster.spec import ModelSpec, read_spec
from midfill.system.logs import configure_logs

_MAX_DOCUMENTS = 100_000  # that are counted


class EngineReplica:
    """An engine process and the actor that stands for it.

    Its methods are called by Serve; they take and return plain values and bytes.
    """

    # Serve waits for it.
    async def __init__(self, model: dict[str, Any]) -> None:  # type: ignore[misc]
        """Load the model.

        Args:
            model: the fields of a ``ModelSpec``.

        Raises:
            MidfillError: it can't be loaded. Serve tells whoever deployed it.
        """
        spec = self._spec = read_spec(model, ModelSpec)
        configure_logs(spec.logs, process="replica")
        path, options = await asyncio.to_thread(spec.find)
        self._engine = EngineClient(
            path,
            options.options,
            max_queued_tokens=spec.max_queued_tokens,
            logs=spec.logs,
            step_timeout=spec.step_timeout,
        )
        self._info = await self._engine.start()
        self._documents: OrderedDict[str, None] = OrderedDict()
        context = serve.get_replica_context()
        self._name = context.replica_id.unique_id
        token_bytes = self._info.kv_bytes / max(1, self._info.slots)
        peers = ServePeers(context.app_name)
        self._moves = KvMoves(self._name, self._engine, peers, token_bytes)

    async def describe(self) -> dict[str, Any]:
        """Return the ``ModelSpec`` and the ``EngineInfo`` that the server in front needs."""
        return {
            "model": msgspec.to_builtins(self._spec),
            "info": msgspec.to_builtins(self._info),
        }

    async def generate(
        self,
        payload: bytes,
        *,
        seconds: float | None,
        document: str,
        avoid: list[str],
        background: bool,
        hint: bytes,
    ) -> AsyncIterator[bytes]:
        """Yield the ``FromReplica`` messages of an ``EngineRequest``.

        Args:
            payload: the request as msgpack.
            seconds: until its deadline, which each machine has by a clock of its own.
            document: what the router has gone by.
            avoid, background: for the router alone.
            hint: a ``KvHint`` as msgpack.
        """
        yield _encode(Accepted(self._name))
        self._record(document)
        try:
            request = msgspec.msgpack.decode(payload, type=EngineRequest)
            if seconds is not None:
                deadline = time.monotonic() + seconds
                request = msgspec.structs.replace(request, deadline=deadline)
            self._engine.check_admission(request.tenant, request.deadline)
            where = msgspec.msgpack.decode(hint, type=KvHint)
            await self._moves.fetch(request, document, where)
            with self._engine.submit(request) as outputs:
                async for output in outputs:
                    yield _encode(Output(output))
        except MidfillError as error:
            yield _encode(Failed.of(error))

    async def export_kv(
        self, tenant: str, token_ids: list[int], start: int, *, replica: str
    ) -> bytes:
        """Return an encoded ``KvBlob`` of what is cached of a prompt; nothing if nothing is.

        Args:
            tenant: whose cache.
            token_ids: the prompt.
            start: how many of its tokens are left out.
            replica: which one is asked. Serve calls another one if that has gone.
        """
        if replica != self._name:
            return b""
        try:
            return bytes(await self._engine.export_kv(tenant, token_ids, start))
        except MidfillError:
            return b""

    def _record(self, document: str) -> None:
        self._documents[document] = None
        self._documents.move_to_end(document)
        if len(self._documents) > _MAX_DOCUMENTS:
            self._documents.popitem(last=False)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Return the replica's ``ReplicaNumbers``; Serve hands them to all routers."""
        engine = self._engine
        return ReplicaNumbers(
            state=engine.state,
            documents=len(self._documents),
            queued_tokens=engine.queued_tokens,
            restarts=engine.restarts,
            process_id=os.getpid(),
            stats=engine.stats,
            tenants=engine.tenants,
            moves=self._moves.counts,
        ).plain()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return what ``spec.by_queue`` goes by: without what the engine does when idle."""
        stats = self._engine.stats
        return {"requests": float(stats.running + stats.waiting)}

    async def check_health(self) -> None:
        """Have Serve replace the replica if its engine has gone for good.

        Raises:
            RuntimeError: it has.
        """
        if self._engine.state == "dead":
            raise RuntimeError("the engine was stopped")


def _encode(message: FromReplica) -> bytes:
    return msgspec.msgpack.encode(message)
