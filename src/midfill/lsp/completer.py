"""Completer: from a request at a caret to suggestions."""

import asyncio
import contextlib
import uuid
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from msgspec.structs import replace

from midfill.errors import MidfillError
from midfill.lsp.documents import Change, Document
from midfill.lsp.server_access import ServerAccess
from midfill.lsp.settings import Settings
from midfill.lsp.statistics import Statistics
from midfill.lsp.suggestions import Caret, CompletionQuery, LastSuggestions, Suggestion

_MAX_TYPED = 200  # characters; longer insertions are formatting, or text from elsewhere

Kind = Literal["inline", "menu"]
T = TypeVar("T")
_ALTERNATIVES_TEMPERATURE = 0.5


@dataclass(frozen=True)
class CaretPlace:
    """Where a caret is: in a line of a document."""

    uri: str
    line: int

    def near(self, other: "CaretPlace | None") -> bool:
        """Whether the text around both is the same, but for what is typed."""
        return other is not None and self.uri == other.uri and abs(self.line - other.line) <= 1


def caret_after(before: Document, changes: list[Change]) -> int | None:
    """Return the index that the caret probably has after changes; None if they tell nothing.

    Args:
        before: the document before them.
        changes: from one message.
    """
    if len(changes) != 1:
        return None
    change = changes[0]
    if change.range is None or len(change.text) > _MAX_TYPED:
        return None
    return min(map(before.index_at, (change.range.start, change.range.end))) + len(change.text)


@dataclass(frozen=True)
class Request:
    """A request for completions.

    Attributes:
        number: requests are numbered as they arrive.
        uri: the document.
        revision: how often the document had been changed.
        index: the caret's, in the document's text.
        kind: "inline" for ``textDocument/inlineCompletion``, "menu" for
            ``textDocument/completion``.
        invoked: whether the user asked for completions, rather than the editor by itself.
    """

    number: int
    uri: str
    revision: int
    index: int
    kind: Kind
    invoked: bool

    def same_place(self, other: "Request") -> bool:
        """Whether both were made at one caret in one state of a document."""
        return (self.uri, self.revision, self.index) == (other.uri, other.revision, other.index)

    def supersedes(self, earlier: "Request") -> bool:
        """Whether an earlier request needs no answer once this one has arrived.

        An editor shows one answer per document. What the user asked for is not given up for a
        request that the editor makes by itself at the same place.
        """
        if self.uri != earlier.uri or self.kind != earlier.kind:
            return False
        return self.invoked or not earlier.invoked or not self.same_place(earlier)

    def delay(self, debounce: float) -> float:
        """Return the seconds to wait for further changes before the model is asked."""
        return 0.0 if self.invoked else debounce


@dataclass(frozen=True)
class PendingRequests:
    """Requests that are not answered yet."""

    requests: tuple[Request, ...] = ()

    def arrived(self, request: Request) -> "PendingRequests":
        """Return what is pending once a request has arrived."""
        kept = self._without(request.supersedes)
        return PendingRequests((*kept.requests, request))

    def changed(self, uri: str) -> "PendingRequests":
        """Return what is pending once a document was changed, opened or closed."""
        return self._without(lambda request: request.uri == uri)

    def answered(self, request: Request) -> "PendingRequests":
        """Return what is pending once a request was answered or cancelled."""
        return self._without(lambda pending: pending == request)

    def _without(self, obsolete: Callable[[Request], bool]) -> "PendingRequests":
        return PendingRequests(tuple(each for each in self.requests if not obsolete(each)))


class Completer:
    """Answers requests; obsolete ones at once, with nothing.

    Args:
        access: the server that is asked.
        settings: how to complete.
        statistics: counts what happens.
        on_trouble: called when there is no answer from a server.
        on_answer: called when there is one.
    """

    def __init__(
        self,
        access: ServerAccess,
        settings: Settings,
        statistics: Statistics,
        on_trouble: Callable[[MidfillError], None],
        on_answer: Callable[[], None],
    ) -> None:
        self._access = access
        self._settings = settings
        self._statistics = statistics
        self._on_trouble = on_trouble
        self._on_answer = on_answer
        self._pending = PendingRequests()
        self._work: dict[Request, asyncio.Task[list[Suggestion]]] = {}
        self._last = LastSuggestions()
        self._place: CaretPlace | None = None  # of the last request or change
        self._warming: tuple[Caret, asyncio.Task[None]] | None = None
        self._started = asyncio.Event()

    def start(self) -> None:
        """Begin to ask: the client's settings are known. Earlier requests have waited."""
        self._started.set()

    def configure(self, access: ServerAccess, settings: Settings) -> None:
        """Use other settings from now on; what another server was asked becomes obsolete."""
        if access is not self._access and self._started.is_set():
            self.end()
        self._access, self._settings = access, settings
        self._last.forget()

    def end(self) -> None:
        """Give up all requests."""
        self._keep(PendingRequests())
        self._stop_warming()

    def document_changed(self, uri: str) -> None:
        """Give up requests for a document that has changed, or was opened or closed."""
        self._keep(self._pending.changed(uri))

    def caret_moved(self, document: Document, index: int) -> None:
        """Have the server compute the text around a caret, if it is elsewhere than the last one.

        The editor has not asked for completions there yet, but it probably will.
        """
        if self._place is None:  # nothing was asked for yet; perhaps nothing will be
            return
        before, self._place = self._place, CaretPlace(document.uri, document.line_at(index))
        if self._place.near(before):
            return
        self._stop_warming()
        caret = Caret.in_text(document.uri, document.text, index)
        self._warming = caret, asyncio.create_task(self._warm(caret))

    def document_closed(self, uri: str) -> None:
        """Forget a document."""
        self._last.forget(uri)
        self.document_changed(uri)

    async def complete(self, request: Request, document: Document) -> list[Suggestion] | None:
        """Return suggestions; None if the request has become obsolete.

        Must be called in the order in which requests and changes arrive, and as they do.
        """
        counts = self._statistics.counts
        counts.requests += 1
        self._place = CaretPlace(document.uri, document.line_at(request.index))
        work = self._work[request] = asyncio.create_task(self._suggest(request, document))
        self._keep(self._pending.arrived(request))
        try:
            suggestions = await work
            if request in self._pending.requests:
                return suggestions
        except asyncio.CancelledError:
            if request in self._pending.requests:  # by the client
                counts.cancelled += 1
                raise
        finally:
            self._pending = self._pending.answered(request)
            del self._work[request]
        counts.obsolete += 1
        return None

    def _keep(self, pending: PendingRequests) -> None:
        """End the work for requests that are no longer pending."""
        self._pending = pending
        for request, work in self._work.items():
            if request not in pending.requests:
                work.cancel()

    async def _warm(self, caret: Caret) -> None:
        # What is wrong, the request that follows will tell.
        with contextlib.suppress(MidfillError):
            await self._access.complete(CompletionQuery(caret, "single", max_tokens=1))

    def _stop_warming(self) -> None:
        if self._warming is not None:
            self._warming[1].cancel()
            self._warming = None

    async def _suggest(self, request: Request, document: Document) -> list[Suggestion]:
        await self._started.wait()
        caret = Caret.in_text(document.uri, document.text, request.index)
        rest = None if request.invoked else self._last.rest(caret)
        if rest is not None:
            self._statistics.counts.continued += 1
            return [rest]
        await asyncio.sleep(request.delay(self._settings.debounce_ms / 1000))
        suggestions = [
            Suggestion(uuid.uuid4().hex, text) for text in await self._texts(caret, request.invoked)
        ]
        if suggestions:
            self._last.remember(caret, suggestions[0])
        else:
            self._last.forget(caret.uri)
        return suggestions

    async def _texts(self, caret: Caret, invoked: bool) -> list[str]:
        """Return different completions, the most likely first; none where there is trouble."""
        if self._warming is not None and self._warming[0] == caret:
            # Asked at the same time, the server would compute the prompt twice.
            await asyncio.wait({self._warming[1]})
        settings = self._settings
        lines = settings.lines if caret.at_line_end else "single"
        query = CompletionQuery(
            caret, lines, settings.max_tokens,
            suggestion=settings.min_confidence != 0,
            # Whoever asks for completions gets them, sure or not.
            min_confidence=0.0 if invoked else settings.min_confidence,
        )  # fmt: skip
        queries = [query]
        if invoked and settings.alternatives > 1:
            count = settings.alternatives - 1
            queries.append(replace(query, count=count, temperature=_ALTERNATIVES_TEMPERATURE))
        try:
            answers = await _all(*(self._access.complete(query) for query in queries))
        except MidfillError as trouble:
            self._statistics.counts.failed += 1
            self._on_trouble(trouble)
            return []
        self._on_answer()
        for answer in answers:
            self._statistics.record_prompt(answer.prompt_tokens, answer.cached_tokens)
        texts = [text for answer in answers for text in answer.texts if text.strip()]
        if caret.at_line_end:
            texts = [text.rstrip() for text in texts]
        self._statistics.counts.empty += not texts
        return list(dict.fromkeys(texts))


async def _all(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Return the results of all; the first error ends the others.

    Raises:
        Exception: the first error.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(each) for each in work]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]
