"""GatewayEngine: other servers, as the engine of midfill's server.

``submit`` starts a task for each prompt and returns the stream that its outputs go to. What the
task does is ``PromptAnswers``'s. A task that is cancelled closes its connection, by which upstreams
know that nobody waits.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Literal

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from midfill.engine.messages import EngineInfo
from midfill.engine.process.aggregate import RequestTasks
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineRequest, EngineStats, TenantStats
from midfill.errors import InvalidRequestError, QueueFullError
from midfill.serving.gateway.pool import UpstreamPool
from midfill.serving.gateway.prompt_answers import AnswerCounts, PromptAnswers
from midfill.serving.gateway.upstream import Upstream
from midfill.serving.gateway.upstream_calls import UpstreamCalls
from midfill.serving.server.limits import Charge
from midfill.serving.server.metrics import Families, families

_MAX_RUNNING = 1024  # requests; beyond it they are refused

_GAUGES: dict[str, tuple[str, Callable[[Upstream], float]]] = {
    "upstream_up": ("Whether requests may be sent to it.", lambda each: each.usable),
    "upstream_requests_running": ("Requests in progress there.", lambda each: each.running),
}
_COUNTERS: dict[str, tuple[str, Callable[[Upstream], float]]] = {
    "upstream_requests": ("Requests sent to it.", lambda each: each.requests),
    "upstream_failures": ("Of these, failed ones.", lambda each: each.failures),
}
_ANSWER_COUNTERS: dict[str, tuple[str, Callable[[AnswerCounts], float]]] = {
    "upstream_retries": (
        "Requests sent to another upstream after one had failed.",
        lambda counts: counts.retries,
    ),
    "answers_asked_again": (
        "Answers that did not begin with the half word before the caret.",
        lambda counts: counts.asked_again,
    ),
}


class GatewayEngine:
    """See ``serving.server.served_engine.ServedEngine``.

    Args:
        pool: the upstreams.
        calls: makes what they are asked.
        context: maximum tokens of a prompt and its answer, in the tokenizer's tokens.

    Attributes:
        info: what there is to say of the upstreams together.
        tenants: the numbers by tenant.
        counts: what went otherwise than hoped.
    """

    def __init__(self, pool: UpstreamPool, calls: UpstreamCalls, context: int) -> None:
        self.restarts = 0
        self.counts = AnswerCounts()
        self.tenants: dict[str, TenantStats] = {}
        self._pool = pool
        self._calls = calls
        failure = "the gateway failed on this request; its log says why"
        self._tasks = RequestTasks(self._answer, failure)
        self._relayed = 0  # chats in progress
        self.info = EngineInfo(
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
    def stats(self) -> EngineStats:
        """The sums over tenants."""
        tenants = self.tenants.values()
        fields = TenantStats.__struct_fields__
        return EngineStats(
            **{name: sum(getattr(each, name) for each in tenants) for name in fields}
        )

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
        self._check_room(len(requests))
        return self._tasks.start(requests)

    @contextlib.contextmanager
    def relaying(self, tenant: str, prompt_tokens: int) -> Iterator[Charge]:
        """Count a request that is passed on as it is; its charge may be set until it ends.

        Raises:
            QueueFullError: too many are in progress.
            UpstreamError: no upstream can be used now.
        """
        self._check_room(1)
        self._relayed += 1
        self._count(tenant, running=1)
        charge = Charge()
        try:
            yield charge
        finally:
            self._relayed -= 1
            self._count(
                tenant, running=-1, prompt_tokens=prompt_tokens, generated_tokens=charge.tokens
            )

    def _check_room(self, more: int) -> None:
        running = len(self._tasks) + self._relayed
        if running + more > _MAX_RUNNING:
            raise QueueFullError(
                f"{running} requests are in progress; try again in a moment", retry_after=1
            )
        if not self._pool.ready:
            raise self._pool.error(())

    async def close(self) -> None:
        """End all requests."""
        await self._tasks.close()

    async def _answer(self, request: EngineRequest, stream: OutputStream) -> None:
        """Generate all answers to a prompt."""
        self._count(request.tenant, running=1)
        work = PromptAnswers(request, stream, self._pool, self._calls, self.counts)
        try:
            await work.run()
        finally:
            self._count(
                request.tenant,
                running=-1,
                prompt_tokens=work.prompt_tokens or 0,
                cached_tokens=work.cached_tokens or 0,
                generated_tokens=work.completion_tokens,
            )

    def _count(self, tenant: str, **more: int) -> None:
        """Add to a tenant's numbers."""
        stats = self.tenants.get(tenant, TenantStats())
        sums = {name: getattr(stats, name) + number for name, number in more.items()}
        self.tenants[tenant] = msgspec.structs.replace(stats, **sums)


def _check(request: EngineRequest) -> None:
    """Refuse what the gateway can't serve.

    Raises:
        InvalidRequestError: names the field.
    """
    sampling = request.sampling
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None:
            raise InvalidRequestError(
                "log probabilities, and how sure an answer is, can't be had through the gateway",
                param="logprobs",
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


def upstream_metrics(pool: UpstreamPool, counts: AnswerCounts) -> Families:
    """Yield gauges and counters of the upstreams, and what went otherwise than hoped, as of now."""
    rows = [((each.address,), each) for each in pool.upstreams]
    yield from families(GaugeMetricFamily, _GAUGES, rows, ("upstream",))
    yield from families(CounterMetricFamily, _COUNTERS, rows, ("upstream",))
    yield from families(CounterMetricFamily, _ANSWER_COUNTERS, [((), counts)])
