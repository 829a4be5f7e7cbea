"""GatewayEngine: other servers, as the engine of midfill's server.

``submit`` starts a task for each prompt and returns the stream that its outputs go to. What the
task does is ``PromptAnswers``'s. A task that is cancelled closes its connection, by which upstreams
know that nobody waits.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from functools import partial
from typing import Literal

from midfill.engine.messages import EngineInfo
from midfill.engine.process.output_stream import OutputStream
from midfill.engine.request import EngineRequest, EngineStats
from midfill.engine.request import TenantStats as Numbers
from midfill.errors import GenerationError, InvalidRequestError, MidfillError, QueueFullError
from midfill.serving.gateway.pool import UpstreamPool
from midfill.serving.gateway.prompt_answers import AnswerCounts, PromptAnswers
from midfill.serving.gateway.upstream_calls import UpstreamCalls

_log = logging.getLogger(__name__)

_MAX_RUNNING = 1024  # requests; beyond it they are refused


@dataclass(slots=True)
class _Tenant:
    """Counts one tenant's requests."""

    running: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0

    def numbers(self) -> Numbers:
        return Numbers(
            running=self.running,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generated_tokens=self.generated_tokens,
        )


class GatewayEngine:
    """See ``serving.server.served_engine.ServedEngine``.

    Args:
        pool: the upstreams.
        calls: makes what they are asked.
        context: maximum tokens of a prompt and its answer, in the tokenizer's tokens.

    Attributes:
        counts: what went otherwise than hoped.
    """

    def __init__(self, pool: UpstreamPool, calls: UpstreamCalls, context: int) -> None:
        self.restarts = 0
        self.counts = AnswerCounts()
        self._pool = pool
        self._calls = calls
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._tenants: dict[str, _Tenant] = {}
        self._info = EngineInfo(
            backend=f"gateway to {len(pool.upstreams)} servers",
            layers=0,
            weight_bytes=0,
            kv_bytes=0,
            slots=0,
            context=context,
            max_running=sum(each.slots for each in pool.upstreams),
            load_seconds=0.0,
        )

    @property
    def state(self) -> Literal["ready", "restarting"]:
        """ "ready" while an upstream may be used."""
        return "ready" if self._pool.ready else "restarting"

    @property
    def info(self) -> EngineInfo:
        """What there is to say of the upstreams together."""
        return self._info

    @property
    def tenants(self) -> dict[str, Numbers]:
        """The numbers by tenant."""
        return {name: tenant.numbers() for name, tenant in self._tenants.items()}

    @property
    def stats(self) -> EngineStats:
        """The sums over tenants."""
        fields = ("running", "prompt_tokens", "cached_tokens", "generated_tokens")
        each = self._tenants.values()
        return EngineStats(**{name: sum(getattr(one, name) for one in each) for name in fields})

    @property
    def queued_tokens(self) -> int:
        """0: upstreams queue."""
        return 0

    @property
    def retry_after(self) -> int:
        """Seconds after which a refused request may succeed."""
        return self._pool.retry_after

    def check_admission(self, tenant: str, deadline: float | None, document: str = "") -> None:
        """Do nothing: upstreams queue."""

    def submit(self, *requests: EngineRequest) -> OutputStream:
        """Start requests, all or none; the stream yields their outputs.

        Raises:
            InvalidRequestError: the gateway can't serve what one of them asks for.
            QueueFullError: too many are in progress.
            UpstreamError: no upstream can be used now.
        """
        for request in requests:
            _check(request)
        if len(self._tasks) + len(requests) > _MAX_RUNNING:
            raise QueueFullError(
                f"{len(self._tasks)} requests are in progress; try again in a moment",
                retry_after=1,
            )
        if not self._pool.ready:
            raise self._pool.error(())
        stream = OutputStream(self, requests)
        for request in requests:
            task = asyncio.create_task(self._answer(request, stream), name="upstream request")
            self._tasks[request.request_id] = task
            # Not in the task itself: one that is cancelled before it starts would stay.
            task.add_done_callback(partial(self._forget_task, request.request_id))
        return stream

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request. One of several answers is not ended, only ignored."""
        if index is None and (task := self._tasks.get(request_id)) is not None:
            task.cancel()

    def forget(self, request_id: str) -> None:
        """Do nothing: a task that has told the last of its outputs ends by itself."""

    async def close(self) -> None:
        """End all requests."""
        for task in list(self._tasks.values()):
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _answer(self, request: EngineRequest, stream: OutputStream) -> None:
        """Generate all answers to a prompt; errors go to the stream."""
        tenant = self._tenants.setdefault(request.tenant, _Tenant())
        tenant.running += 1
        work = PromptAnswers(request, stream, self._pool, self._calls, self.counts)
        try:
            await work.run()
        except MidfillError as error:
            stream.put(error)
        except Exception:
            _log.exception("the gateway failed on a request")
            stream.put(GenerationError("the gateway failed on this request; its log says why"))
        finally:
            tenant.running -= 1
            tenant.prompt_tokens += work.prompt_tokens or 0
            tenant.cached_tokens += work.cached_tokens or 0
            tenant.generated_tokens += work.completion_tokens

    def _forget_task(self, request_id: str, _: object) -> None:
        del self._tasks[request_id]


def _check(request: EngineRequest) -> None:
    """Refuse what the gateway can't serve.

    Raises:
        InvalidRequestError: names the field.
    """
    sampling = request.sampling
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None:
            raise InvalidRequestError(
                "log probabilities can't be had through the gateway", param="logprobs"
            )
    if request.method is not None:
        raise InvalidRequestError(
            "methods are the engine's; the gateway has none", param="midfill.method"
        )
    if request.empty_threshold > 0:
        raise InvalidRequestError(
            "the gateway can't decide by the probability of an empty answer",
            param="midfill.empty_threshold",
        )
