"""RemoteEngine: replicas on other machines, as the engine of midfill's server.

The way of a request:

1. ``submit`` starts a task for each prompt, and returns the stream that its outputs go to.
2. ``ServeReplicas.ask`` sends it to the replica that holds the document's KV, or the next best one.
3. What the replica answers goes through a ``Resumption``, and then to the stream.
4. If the replica is lost, another one is asked, and continues where the first one ended.

A task that is cancelled closes the replica's stream, by which the engine ends the request.
"""

import contextlib
import logging
import secrets
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import msgspec

from midfill.engine.messages import EngineInfo, Failed
from midfill.engine.process.aggregate import RequestTasks, total_stats, total_tenants
from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats, TenantStats
from midfill.engine.routing import request_key
from midfill.errors import EngineDeadError, QueueFullError
from midfill.kv.tiers.load_policy import MeasuredRate
from midfill.serving.cluster.kv_moves import Holdings
from midfill.serving.cluster.messages import (
    Accepted,
    KvHint,
    KvMoveCounts,
    Output,
    ReplicaNumbers,
    total_moves,
)

if TYPE_CHECKING:  # imports Ray
    from midfill.serving.cluster.serve_handles import ServeReplicas

_log = logging.getLogger(__name__)

_MAX_ATTEMPTS = 4  # replicas that may fail on a request before it fails
_RETRY_SECONDS = 2
_MIN_PREFILL_TOKENS = 32  # of a prompt that tells how fast prompts are computed


def with_seed(request: EngineRequest) -> EngineRequest:
    """Return the request with a seed, so that it can be asked twice."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is not None or request.background:
        return request
    seeded = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
    return msgspec.structs.replace(request, sampling=seeded)


@dataclass(slots=True)
class _Answer:
    """One answer: the tokens that were passed on, and how many of them the replica has repeated."""

    tokens: list[int] = field(default_factory=list)
    repeated: int = 0
    begun: bool = False
    ended: bool = False


class Resumption:
    """The answers to one request, over all replicas that it was sent to.

    Args:
        answers: how many there are.
    """

    def __init__(self, answers: int) -> None:
        self._answers = [_Answer() for _ in range(answers)]

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.ended for answer in self._answers)

    def restart(self) -> None:
        """Begin to read the same answers from another replica."""
        for answer in self._answers:
            answer.repeated = 0

    def take(self, output: EngineOutput) -> EngineOutput | None:
        """Return what is new in an output; None if it says nothing new.

        Raises:
            EngineDeadError: the answer differs from what was passed on before.
        """
        answer = self._answers[output.index]
        if answer.ended:
            return None
        skipped = min(len(output.token_ids), len(answer.tokens) - answer.repeated)
        seen = answer.tokens[answer.repeated : answer.repeated + skipped]
        ends_early = output.finish_reason is not None and (
            answer.repeated + len(output.token_ids) < len(answer.tokens)
        )
        if output.token_ids[:skipped] != seen or ends_early:
            raise EngineDeadError(
                "the replica that was answering is lost, and another one would go on differently;"
                " send the request again",
                retry_after=1,
            )
        answer.repeated += skipped
        new = output.token_ids[skipped:]
        if answer.begun and not new and output.finish_reason is None:
            return None
        taken = _without(output, skipped, first=not answer.begun)
        answer.tokens += new
        answer.repeated += len(new)
        answer.begun = True
        answer.ended = output.finish_reason is not None
        return taken


def _without(output: EngineOutput, skipped: int, *, first: bool) -> EngineOutput:
    """Return an output without its first tokens, and without what only a first one tells."""
    if not skipped and first:
        return output
    return msgspec.structs.replace(
        output,
        token_ids=output.token_ids[skipped:],
        logprobs=None if output.logprobs is None else output.logprobs[skipped:],
        token_bytes=None if output.token_bytes is None else output.token_bytes[skipped:],
        prompt_logprobs=output.prompt_logprobs if first else None,
        prefill_seconds=output.prefill_seconds if first else None,
    )


class RemoteEngine:
    """See ``serving.server.served_engine.ServedEngine``.

    Args:
        replicas: those of one model.
        info: what the first of them said of itself.
        holdings: where documents' KV is, so that it follows them to other replicas; None has them
            computed there.

    Attributes:
        info: the same.
        resumed: requests that went on at another replica after one was lost.
    """

    def __init__(
        self, replicas: "ServeReplicas", info: EngineInfo, holdings: Holdings | None = None
    ) -> None:
        self.resumed = 0
        self._holdings = holdings
        self._prefill = MeasuredRate()
        self._replicas = replicas
        self.info = info
        failure = "the server failed on this request; its log says why"
        self._tasks = RequestTasks(self._answer, failure)
        self._known: dict[str, ReplicaNumbers] = {}

    @property
    def state(self) -> Literal["ready", "restarting"]:
        """ "ready" while there is a replica."""
        return "ready" if self.numbers else "restarting"

    @property
    def numbers(self) -> Mapping[str, ReplicaNumbers]:
        """What each replica that is there has reported last."""
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
        return self._tasks.start(requests)

    async def close(self) -> None:
        """End all requests."""
        await self._tasks.close()

    async def _answer(self, request: EngineRequest, stream: OutputStream) -> None:
        """Generate all answers to a prompt: ask one replica after another.

        Raises:
            MidfillError: the request can't be answered, or not now.
        """
        request = with_seed(request)
        document = request_key(
            request.tenant, request.document, request.token_ids, request.hints.program
        )
        answers, failed = Resumption(request.sampling.n), list[str]()
        while True:
            attempt = _Attempt(request, document)
            try:
                async with contextlib.aclosing(self._outputs(attempt, failed)) as outputs:
                    async for output in outputs:
                        if (new := answers.take(output)) is not None:
                            stream.put(new)
                if not answers.finished:
                    raise EngineDeadError("the replica's answer ended too early", retry_after=1)
                return
            except (EngineDeadError, QueueFullError) as error:
                if request.background:
                    stream.put(_cancelled(request))
                    return
                replica = attempt.replica
                if replica is None or replica in failed or len(failed) + 1 >= _MAX_ATTEMPTS:
                    raise
                failed.append(replica)
                if self._holdings is not None and isinstance(error, EngineDeadError):
                    self._holdings.forget(document, replica)
                if isinstance(error, QueueFullError) and len(failed) >= len(self.numbers):
                    raise
                _log.warning("replica %s: %s; asking another one", replica, error)
                self.resumed += 1
                answers.restart()

    async def _outputs(
        self, attempt: "_Attempt", failed: list[str]
    ) -> AsyncGenerator[EngineOutput, None]:
        """Yield what one replica answers, none of those that have failed.

        Raises:
            MidfillError: it refuses the request, or is lost.
        """
        request, document = attempt.request, attempt.document
        hint = self._hint(request, document)
        asked = self._replicas.ask(request, document, failed, hint)
        async with contextlib.aclosing(asked) as messages:
            async for message in messages:
                match message:
                    case Accepted(replica):
                        attempt.replica = replica
                    case Output(output):
                        self._record(attempt, output)
                        yield output
                    case Failed():
                        raise message.as_error()

    def _hint(self, request: EngineRequest, document: str) -> KvHint:
        """Return where a request's KV is."""
        if self._holdings is None:
            return KvHint()
        held = self._holdings.held(document, request.token_ids, self.numbers)
        return KvHint(held, self._prefill.per_second)

    def _record(self, attempt: "_Attempt", output: EngineOutput) -> None:
        """Learn from a replica's first output that it has the prompt's KV, and how fast it was."""
        if self._holdings is None or attempt.answers or attempt.replica is None:
            return
        if output.finish_reason in ("cancelled", "expired", "error"):
            return
        attempt.answers = True
        token_ids = attempt.request.token_ids
        self._holdings.record(attempt.document, attempt.replica, token_ids)
        computed = len(token_ids) - (output.cached_tokens or 0)
        if output.prefill_seconds is not None and computed >= _MIN_PREFILL_TOKENS:
            self._prefill.record(computed, output.prefill_seconds)


@dataclass(slots=True)
class _Attempt:
    """One replica's turn at a request.

    Attributes:
        request: the request.
        document: ``engine.routing.request_key``.
        replica: its name, once it has said it.
        answers: whether it has begun to answer.
    """

    request: EngineRequest
    document: str
    replica: str | None = None
    answers: bool = False


def _cancelled(request: EngineRequest) -> EngineOutput:
    """Return what ends a background request that nobody computes."""
    return EngineOutput(
        request_id=request.request_id, index=0, token_ids=[], finish_reason="cancelled"
    )
