"""RemoteEngine: replicas on other machines, as the engine of midfill's server.

The way of a request:

1. ``submit`` starts a task for each prompt, and returns the stream that its outputs go to.
2. ``Replicas.ask`` sends it to the replica that holds the document's KV, or the next best one.
3. What the replica answers goes through a ``Resumption``, and then to the stream.
4. If the replica is lost, another one is asked, and continues where the first one ended.

A task that is cancelled closes the replica's stream, by which the engine ends the request.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Mapping
from typing import Literal, Protocol

import msgspec

from midfill.engine.messages import EngineInfo
from midfill.engine.process.output_stream import OutputStream
from midfill.engine.process.totals import total_stats, total_tenants
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats, TenantStats
from midfill.engine.routing import request_key
from midfill.errors import (
    EngineDeadError,
    GenerationError,
    MidfillError,
    QueueFullError,
)
from midfill.kv.tiers.load_policy import MeasuredRate
from midfill.serving.cluster.holdings import Holdings
from midfill.serving.cluster.kv_moves import KvMoveCounts
from midfill.serving.cluster.messages import Accepted, Failed, FromReplica, KvHint, Output
from midfill.serving.cluster.numbers import ReplicaNumbers, total_moves
from midfill.serving.cluster.resumption import Resumption, with_seed

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 4  # replicas that may fail on a request before it fails
_RETRY_SECONDS = 2
_MIN_PREFILL_TOKENS = 32  # of a prompt that tells how fast prompts are computed


class Replicas(Protocol):
    """The replicas of one model, however they are reached."""

    def ask(
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
        ...

    def numbers(self) -> Mapping[str, ReplicaNumbers]:
        """Return the last numbers of each replica, by its name."""
        ...


class RemoteEngine:
    """See ``serving.server.served_engine.ServedEngine``.

    Args:
        replicas: those of one model.
        info: what the first of them said of itself.
        holdings: where documents' KV is, so that it follows them to other replicas; None has them
            computed there.

    Attributes:
        resumed: requests that went on at another replica after one was lost.
    """

    def __init__(
        self, replicas: Replicas, info: EngineInfo, holdings: Holdings | None = None
    ) -> None:
        self.resumed = 0
        self._holdings = holdings
        self._prefill = MeasuredRate()
        self._replicas = replicas
        self._info = info
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, ReplicaNumbers] = {}

    @property
    def state(self) -> Literal["ready", "restarting"]:
        """ "ready" while there is a replica."""
        return "ready" if self.numbers else "restarting"

    @property
    def info(self) -> EngineInfo:
        """What one replica is."""
        return self._info

    @property
    def numbers(self) -> Mapping[str, ReplicaNumbers]:
        """What each replica that is there has told last."""
        present = self._replicas.numbers()
        self._known.update(present)
        return present

    @property
    def stats(self) -> EngineStats:
        """The sums over replicas; counters never fall, also if one goes."""
        present, past = self._split()
        return total_stats((each.stats for each in present), (each.stats for each in past))

    @property
    def tenants(self) -> dict[str, TenantStats]:
        """The same by tenant."""
        present, past = self._split()
        return total_tenants((each.tenants for each in present), (each.tenants for each in past))

    def _split(self) -> tuple[list[ReplicaNumbers], list[ReplicaNumbers]]:
        """Return the replicas that are there, and those that have gone."""
        present = self.numbers
        past = [each for name, each in self._known.items() if name not in present]
        return list(present.values()), past

    @property
    def moves(self) -> KvMoveCounts:
        """What replicas fetched from each other."""
        self.numbers  # noqa: B018 - brings _known up to date
        return total_moves(self._known.values())

    @property
    def restarts(self) -> int:
        """How often engines were restarted within their replicas."""
        self.numbers  # noqa: B018 - brings _known up to date
        return sum(each.restarts for each in self._known.values())

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that wait at all replicas."""
        return sum(each.queued_tokens for each in self.numbers.values())

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused request may succeed."""
        return _RETRY_SECONDS

    def check_admission(self, tenant: str, deadline: float | None, document: str = "") -> None:
        """Do nothing: replicas queue, and refuse."""

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Start requests; the stream yields their outputs."""
        stream = OutputStream(self, requests)
        # Another machine's clock counts from another time.
        requests = tuple(msgspec.structs.replace(one, deadline=None) for one in requests)
        for request in requests:
            task = asyncio.create_task(self._answer(request, stream), name="replica request")
            self._tasks[request.request_id] = task
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request. One of several answers is not ended, only ignored."""
        if index is None and (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def forget(self, request_id: str) -> None:
        """Do nothing: a task that has told the last of its outputs ends by itself."""

    async def close(self) -> None:
        """End all requests."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer(self, request: EngineRequest, stream: OutputStream) -> None:
        """Generate all answers to a prompt; errors go to the stream."""
        try:
            await self._ask_until_answered(with_seed(request), stream)
        except MidfillError as error:
            stream.put(error)
        except Exception:
            _log.exception("a request to the replicas failed")
            stream.put(GenerationError("the server failed on this request; its log says why"))
        finally:
            del self._tasks[request.request_id]

    async def _ask_until_answered(self, request: EngineRequest, stream: OutputStream) -> None:
        """Ask one replica after another.

        Raises:
            MidfillError: the request can't be answered, or not now.
        """
        document = request_key(request.tenant, request.document, request.token_ids)
        answers, failed = Resumption(request.sampling.n), list[str]()
        while True:
            attempt = _Attempt()
            try:
                await self._read(request, document, failed, attempt, answers, stream)
                return
            except (EngineDeadError, QueueFullError) as error:
                if request.background:
                    stream.put(_cancelled(request))
                    return
                known = attempt.replica is not None and attempt.replica not in failed
                if not known or len(failed) + 1 >= _MAX_ATTEMPTS:
                    raise
                assert attempt.replica is not None
                failed.append(attempt.replica)
                if self._holdings is not None and isinstance(error, EngineDeadError):
                    self._holdings.forget(document, attempt.replica)
                if isinstance(error, QueueFullError) and len(failed) >= len(self.numbers):
                    raise
                _log.warning("replica %s: %s; asking another one", attempt.replica, error)
                self.resumed += 1
                answers.restart()

    async def _read(
        self,
        request: EngineRequest,
        document: str,
        failed: list[str],
        attempt: "_Attempt",
        answers: Resumption,
        stream: OutputStream,
    ) -> None:
        """Pass on what one replica answers.

        Raises:
            MidfillError: it refuses the request, or is lost before all answers have ended.
        """
        hint = self._hint(request, document)
        asked = self._replicas.ask(request, document, failed, hint)
        async with contextlib.aclosing(asked) as messages:
            async for message in messages:
                match message:
                    case Accepted(replica):
                        attempt.replica = replica
                    case Output(output):
                        self._record(request, document, attempt, output)
                        if (new := answers.take(output)) is not None:
                            stream.put(new)
                    case Failed():
                        raise message.as_error()
        if not answers.finished:
            raise EngineDeadError("the replica's answer ended too early", retry_after=1)

    def _hint(self, request: EngineRequest, document: str) -> KvHint:
        """Return where a request's KV is."""
        if self._holdings is None:
            return KvHint()
        held = self._holdings.held(document, request.token_ids, self.numbers)
        return KvHint(held, self._prefill.per_second)

    def _record(
        self, request: EngineRequest, document: str, attempt: "_Attempt", output: EngineOutput
    ) -> None:
        """Learn from a replica's first output that it has the prompt's KV, and how fast it was."""
        if self._holdings is None or attempt.answers or attempt.replica is None:
            return
        if output.finish_reason in ("cancelled", "expired", "error"):
            return
        attempt.answers = True
        self._holdings.record(document, attempt.replica, request.token_ids)
        computed = len(request.token_ids) - (output.cached_tokens or 0)
        if output.prefill_seconds is not None and computed >= _MIN_PREFILL_TOKENS:
            self._prefill.record(computed, output.prefill_seconds)


class _Attempt:
    """One replica's turn at a request.

    Attributes:
        replica: its name, once it has said it.
        answers: whether it has begun to answer.
    """

    replica: str | None = None
    answers: bool = False


def _cancelled(request: EngineRequest) -> EngineOutput:
    """Return what ends a background request that nobody computes."""
    return EngineOutput(
        request_id=request.request_id, index=0, token_ids=[], finish_reason="cancelled"
    )
