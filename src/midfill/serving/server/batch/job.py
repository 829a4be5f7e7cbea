"""BatchJob: answers all rows of a file, in the order of BatchLLM, as many at a time as KV fits.

The way of a batch:

1. The results that are there already are read; their rows are left out.
2. Every other row is planned: its prompt is encoded as it will be for its answer. A row that can't
   be has its error as its result at once.
3. ``prefix_groups`` finds shared prefixes and orders the groups.
4. Rows are asked in that order. What bounds those in progress is KV memory (``RowBudget``): the
   rest of each prompt, its expected answer, and each group's prefix once (the paper's
   memory-centric batching, section 4.3). Members of a group so run together, and the engine keeps
   their prefix as long as one of them runs.
5. Each result is appended as soon as it is there.
"""

import asyncio
import math
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from midfill.arrays import Int32Array
from midfill.serving.server.batch.prefix_groups import (
    PrefixGroup,
    find_prefix_groups,
    order_groups,
)
from midfill.serving.server.batch.results import ResultFile
from midfill.serving.server.batch.row_budget import RowBudget, RowShare
from midfill.serving.server.batch.rows import (
    InvalidRowError,
    RowError,
    RowFile,
    RowPlace,
    RowRequest,
    RowResponse,
    RowResult,
)

_MAX_TRIES = 6  # of a row that meets an engine that isn't ready
_TRY_AGAIN = (429, 503)
_RETRY_SECONDS = 1.0
_FIRST_REORDER = 16  # finished rows after which groups are ordered anew; then twice as many
_REPORT_SECONDS = 0.25


class Answered(NamedTuple):
    """What an endpoint answers.

    Attributes:
        status: of HTTP.
        body: JSON.
        retry_after: seconds after which to try again, if it says so.
    """

    status: int
    body: bytes
    retry_after: float | None = None


class PlannedPrompt(NamedTuple):
    """What a row will have computed.

    Attributes:
        tokens: [n] int32, its prompt; the first one, if it has several.
        prompt_tokens: of all its prompts.
        output_tokens: of all its answers, at most.
    """

    tokens: Int32Array
    prompt_tokens: int
    output_tokens: int


class RowApi(Protocol):
    """Answers rows, see ``api.InProcessApi``."""

    async def plan(self, url: str, body: bytes) -> PlannedPrompt | Answered:
        """Return what a row will have computed, or the error that it gets."""
        ...

    async def answer(self, url: str, body: bytes) -> Answered:
        """Return a row's answer, or its error."""
        ...


@dataclass(frozen=True, slots=True)
class BatchProgress:
    """How far a batch is.

    Attributes:
        stage: "planning" or "answering".
        rows, done, failed: how many there are, have a result, and have an error as their result.
        prompt_tokens, cached_tokens, output_tokens: of the rows that were answered by this run;
            cached ones were not computed.
        seconds: since this run began to answer.
        seconds_left: until all rows are answered; None as long as nobody can tell.
    """

    stage: str
    rows: int
    done: int
    failed: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0
    seconds_left: float | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens of prompts, cached ones included, and of answers."""
        return (self.prompt_tokens + self.output_tokens) / max(self.seconds, 1e-9)


class RowKind(NamedTuple):
    """Rows whose answers are taken to be alike.

    Attributes:
        url: the endpoint.
        max_output: maximum number of tokens of the answers.
    """

    url: str
    max_output: int


class OutputLengths:
    """How long answers get: on average as long as those of their kind that are there."""

    def __init__(self) -> None:
        self._sums: dict[RowKind, tuple[int, int]] = {}

    def record(self, kind: RowKind, tokens: int) -> None:
        """Note how long an answer got."""
        total, count = self._sums.get(kind, (0, 0))
        self._sums[kind] = total + tokens, count + 1

    def expected(self, kind: RowKind) -> float:
        """Return how long an answer will probably get: its maximum where nothing is known."""
        total, count = self._sums.get(kind, (0, 0))
        return total / count if count else float(kind.max_output)


class _Row(NamedTuple):
    place: RowPlace
    kind: RowKind
    prompt_tokens: int


class BatchJob:
    """One run over a batch. See the module for what it does.

    Args:
        source: the rows.
        results: where results go; those that are there stay.
        api: answers rows.
        budget: what bounds the rows in progress.
        report: called with the progress, a few times a second.
        clock: seconds, for tests.
    """

    def __init__(
        self,
        source: RowFile,
        results: ResultFile,
        api: RowApi,
        budget: RowBudget,
        report: Callable[[BatchProgress], None] = lambda progress: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._source = source
        self._results = results
        self._api = api
        self._budget = budget
        self._report = report
        self._clock = clock
        self._total = 0
        self._rows: list[_Row] = []
        self._lengths = OutputLengths()
        self._answered = self._reorder_at = 0
        self._prompts_left = 0  # tokens
        self._answers_left: Counter[RowKind] = Counter()  # rows
        self._prompt_tokens = self._cached_tokens = self._output_tokens = 0
        self._started = self._reported = -math.inf

    async def run(self) -> BatchProgress:
        """Answer all rows that have no result; return how it went.

        Raises:
            MidfillError: the input can't be read, or the results can't be written.
        """
        prompts = await self._plan()
        # On a thread, as all that grows with a file: a server's event loop has others to serve.
        groups = await asyncio.to_thread(find_prefix_groups, prompts)
        self._prompts_left = sum(row.prompt_tokens for row in self._rows)
        self._answers_left = Counter(row.kind for row in self._rows)
        self._started, self._reorder_at = self._clock(), _FIRST_REORDER
        try:
            with self._budget.share() as share:
                async with asyncio.TaskGroup() as tasks:
                    await self._start_all(self._ordered(groups), share, tasks)
        except ExceptionGroup as failures:  # all rows end with the first that fails
            raise failures.exceptions[0] from None
        return self.progress("answering")

    def progress(self, stage: str) -> BatchProgress:
        """Return how far it is."""
        seconds = max(self._clock() - self._started, 0.0) if self._started > -math.inf else 0.0
        done = self._prompt_tokens + self._output_tokens
        left = self._prompts_left + sum(
            rows * self._lengths.expected(kind) for kind, rows in self._answers_left.items()
        )
        return BatchProgress(
            stage=stage,
            rows=self._total,
            done=len(self._results.done),
            failed=self._results.failed,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=self._output_tokens,
            seconds=seconds,
            seconds_left=left * seconds / done if done and seconds else None,
        )

    # --- planning ---

    async def _plan(self) -> list[Int32Array]:
        """Plan the rows that have no result, and return their prompts."""
        places = await asyncio.to_thread(lambda: list(self._source.places()))
        self._total = len(places)
        self._results.check_belongs({place.id for place in places})
        prompts: list[Int32Array] = []
        custom_ids: dict[str, int] = {}
        for place in places:
            try:
                request = self._source.request(place)
                first = custom_ids.setdefault(request.custom_id, place.number)
                if place.id in self._results.done:
                    continue
                if first != place.number:
                    raise InvalidRowError(
                        "duplicate_custom_id",
                        f"custom_id is that of line {first}, too",
                        request.custom_id,
                    )
                planned = await self._api.plan(request.url, bytes(request.body))
                if isinstance(planned, PlannedPrompt):
                    prompts.append(planned.tokens)
                    kind = RowKind(request.url, planned.output_tokens)
                    self._rows.append(_Row(place, kind, planned.prompt_tokens))
                else:
                    self._results.append(_result(place, request, planned))
            except InvalidRowError as error:
                if place.id not in self._results.done:
                    self._results.append(_error_result(place, error))
            self._report_progress("planning")
            await asyncio.sleep(0)
        return prompts

    def _ordered(self, groups: list[PrefixGroup]) -> list[PrefixGroup]:
        """Return groups in reverse order: the next one is the last."""
        ordered = order_groups(
            groups, lambda number: self._rows[number].prompt_tokens, self._output
        )
        return ordered[::-1]

    def _output(self, number: int) -> float:
        return self._lengths.expected(self._rows[number].kind)

    # --- answering ---

    async def _start_all(
        self, groups: list[PrefixGroup], share: RowShare, tasks: asyncio.TaskGroup
    ) -> None:
        """Ask the rows of all groups, the last group first, each once there is room for it."""
        while groups:
            if self._answered >= self._reorder_at:
                self._reorder_at *= 2
                groups = self._ordered(groups)
            group = groups.pop()
            prefix = _SharedPrefix(group.prefix, len(group.members))
            for number in group.members:
                row = self._rows[number]
                own = row.prompt_tokens - group.prefix + self._output(number)
                await share.acquire(own + prefix.needed)
                prefix.needed = 0
                task = tasks.create_task(self._answer(number), name=f"row {row.place.number}")
                task.add_done_callback(partial(_release, share, own, prefix))

    async def _answer(self, number: int) -> None:
        """Have a row answered, and append its result."""
        row = self._rows[number]
        request = self._source.request(row.place)
        for _ in range(_MAX_TRIES):
            answered = await self._api.answer(row.kind.url, bytes(request.body))
            if answered.status not in _TRY_AGAIN:
                break
            await asyncio.sleep(
                _RETRY_SECONDS if answered.retry_after is None else answered.retry_after
            )
        self._results.append(_result(row.place, request, answered))
        self._answered += 1
        self._prompts_left -= row.prompt_tokens
        self._answers_left[row.kind] -= 1
        if answered.status < 400:
            self._record_usage(row, answered.body)
        self._report_progress("answering")

    def _record_usage(self, row: _Row, body: bytes) -> None:
        usage = msgspec.json.decode(body, type=_Body).usage
        self._prompt_tokens += usage.prompt_tokens
        self._cached_tokens += usage.prompt_tokens_details.cached_tokens
        self._output_tokens += usage.completion_tokens
        self._lengths.record(row.kind, usage.completion_tokens)

    def _report_progress(self, stage: str) -> None:
        now = self._clock()
        if now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            self._report(self.progress(stage))


@dataclass(slots=True)
class _SharedPrefix:
    """A group's prefix, which takes memory from its first member's start to its last one's end."""

    tokens: int
    users: int
    needed: int = field(init=False)

    def __post_init__(self) -> None:
        self.needed = self.tokens

    def leave(self) -> int:
        """Note that a member has ended; return how many tokens are free then."""
        self.users -= 1
        return 0 if self.users else self.tokens


def _release(share: RowShare, own: float, prefix: _SharedPrefix, _: "asyncio.Task[None]") -> None:
    """Note that a row has ended, and that its memory is free."""
    share.release(own + prefix.leave())


class _CachedTokens(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _CachedTokens = msgspec.field(default_factory=_CachedTokens)


class _Body(msgspec.Struct):
    usage: _Usage = msgspec.field(default_factory=_Usage)


def _result(place: RowPlace, request: RowRequest, answered: Answered) -> RowResult:
    """Return a row's result."""
    response = RowResponse(
        status_code=answered.status,
        request_id=f"req_{uuid.uuid4().hex}",
        body=msgspec.Raw(answered.body),
    )
    return RowResult(id=place.id, custom_id=request.custom_id, response=response)


def _error_result(place: RowPlace, error: InvalidRowError) -> RowResult:
    """Return the result of a row that no endpoint could be asked with."""
    return RowResult(
        id=place.id,
        custom_id=error.custom_id,
        error=RowError(code=error.code, message=str(error)),
    )
