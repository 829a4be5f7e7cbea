"""PromptAnswers: the answers to one prompt, on their way from upstreams to a stream.

The upstream that holds the document's KV is asked first, then, as long as nothing was passed on,
the next best ones. What arrives are ``Piece``s; each becomes an ``EngineOutput`` whose tokens are
given by what they stand for, since not all upstreams name tokens.

Answers that have to begin with a half word are held until they do (``HealedStart``). Upstreams that
can be made to begin with it are (``pool.forces_start``); of others, answers that begin otherwise
are asked for again, with the half word in the prompt.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from midfill.engine.process.outputs import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams
from midfill.serving.gateway.pool import UpstreamPool
from midfill.serving.gateway.upstream import Upstream
from midfill.serving.gateway.upstream_api import Call, Piece, UpstreamFailedError
from midfill.serving.gateway.upstream_calls import UpstreamCalls, document_of

_log = logging.getLogger(__name__)

_BACKGROUND_SECONDS = 300.0  # no client ends one by going away
_UNKNOWN = -1  # a token without an id, see EngineOutput.token_bytes


class HealedStart:
    """Whether an answer begins with the half word that was taken off its prompt.

    A server that only continues text can't be told what its answer has to begin with. The prompt
    ends before the half word, and in most cases the model writes it again. Where it doesn't, the
    answer is useless, and has to be asked for with the half word in the prompt.

    Args:
        required: what it has to begin with.

    Attributes:
        matches: whether it does; None while that is open.
        inside: whether the text that was added last is a part of it, and nothing more.
    """

    def __init__(self, required: str) -> None:
        self._required = required
        self._held = ""
        self.matches: bool | None = None if required else True
        self.inside = False

    def push(self, text: str) -> str:
        """Add text; return what is decided: everything so far, nothing, or the new text."""
        if self.matches is not None:
            self.inside = False
            return text if self.matches else ""
        self._held += text
        self.inside = self._required.startswith(self._held)
        if self._held.startswith(self._required):
            self.matches = True
            return self._held
        if not self._required.startswith(self._held):
            self.matches = False
        return ""

    def finish(self) -> None:
        """Record that the answer has ended."""
        if self.matches is None:
            self.matches = False


@dataclass(slots=True)
class AnswerCounts:
    """Counts over all prompts.

    Attributes:
        retries: requests that were sent to another upstream after one had failed.
        asked_again: answers that began otherwise than with their half word.
    """

    retries: int = 0
    asked_again: int = 0


@dataclass(slots=True)
class _Ask:
    """Some answers that are asked for together.

    Attributes:
        indices: which.
        healed: whether they have to begin with the half word.
        starts: of the answers, by index.
        unfinished: those that have not ended.
        unwritten: those whose half word is in the prompt, and has to be put in front of them.
        again: those that begin otherwise.
        last: the output that ends the last of them, held until the upstream has reported the cost
            of all.
    """

    indices: tuple[int, ...]
    healed: bool
    starts: dict[int, HealedStart]
    unfinished: set[int]
    unwritten: set[int]
    again: list[int] = field(default_factory=list)
    last: EngineOutput | None = None


class PromptAnswers:
    """See the module's text.

    Args:
        request: the prompt, and how to answer it.
        stream: gets the outputs.
        pool: the upstreams.
        calls: makes what they are asked.
        counts: counts what goes otherwise than hoped.

    Attributes:
        prompt_tokens: tokens of the prompt, as an upstream counts them; None until it has.
        cached_tokens: those that it has found in its cache; None until it has reported that.
        completion_tokens: tokens of all answers so far.
    """

    def __init__(
        self,
        request: EngineRequest,
        stream: OutputStream,
        pool: UpstreamPool,
        calls: UpstreamCalls,
        counts: AnswerCounts,
    ) -> None:
        self._request = request
        self._pool = pool
        self._calls = calls
        self._counts = counts
        self._stream = stream
        self._started = time.perf_counter()
        self._passed_on = False  # whether the client may have seen anything
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.completion_tokens = 0
        self._healed = 0  # tokens that wrote the half word and nothing else
        self._counted: dict[tuple[int, ...], int] = {}  # completion tokens of each ask's answers

    async def run(self) -> None:
        """Get all answers, and put them into the stream."""
        request = self._request
        if request.background:
            await self._compute()
            return
        try:
            request.begins_with.decode()
            healed = bool(request.begins_with)
        except UnicodeDecodeError:  # the rest of a character: no text begins with it
            healed = False
        size = self._pool.max_answers
        indices = range(request.sampling.n)
        asks = [tuple(indices[start : start + size]) for start in range(0, len(indices), size)]
        await _together(self._get(each, healed=healed) for each in asks)

    async def _compute(self) -> None:
        """Have the prompt computed, if an upstream has nothing else to do."""
        request = self._request
        upstream = self._pool.choose(document_of(request))
        reason: Literal["stop", "cancelled"] = "cancelled"
        if upstream is not None and not upstream.running:
            one_token = EngineSamplingParams(max_tokens=1, temperature=0.0)
            call = await self._calls.of(request, request.token_ids, (0,), upstream)
            call = dataclasses.replace(call, sampling=one_token)
            with contextlib.suppress(TimeoutError):
                async with (
                    asyncio.timeout(_BACKGROUND_SECONDS),
                    contextlib.aclosing(upstream.pieces(call)) as pieces,
                ):
                    async for _ in pieces:
                        reason = "stop"
        self._stream.put(
            EngineOutput(request_id=request.request_id, index=0, token_ids=[], finish_reason=reason)
        )

    async def _get(self, indices: tuple[int, ...], *, healed: bool) -> None:
        """Get some answers from the first upstream that gives them."""
        document = document_of(self._request)
        failed: list[tuple[Upstream, UpstreamFailedError]] = []
        while True:
            upstream = self._pool.choose(document, [each for each, _ in failed])
            if upstream is None:
                raise self._pool.error(failed)
            ask = self._new_ask(indices, healed=healed)
            try:
                await self._ask(ask, upstream)
                break
            except UpstreamFailedError as failure:
                _log.warning("%s %s", upstream.address, failure)
                failed.append((upstream, failure))
                if self._passed_on:
                    raise self._pool.error(failed) from None
                self._counts.retries += 1
        if ask.again:
            self._counts.asked_again += len(ask.again)
            await _together(self._get((each,), healed=False) for each in ask.again)

    def _new_ask(self, indices: tuple[int, ...], *, healed: bool) -> _Ask:
        required = self._request.begins_with.decode() if healed else ""
        starts = {index: HealedStart(required) for index in indices}
        unwritten = set(indices) if self._request.begins_with and not healed else set[int]()
        return _Ask(indices, healed, starts, set(indices), unwritten)

    async def _ask(self, ask: _Ask, upstream: Upstream) -> None:
        """Ask one upstream.

        Raises:
            UpstreamFailedError: it fails, or ends before its answers do.
        """
        request = self._request
        unhealed = bool(request.begins_with) and not ask.healed
        ids = self._calls.unhealed(request) if unhealed else request.token_ids
        forced = request.begins_with.decode() if ask.healed and upstream.forces_start else ""
        call = await self._calls.of(request, ids, ask.indices, upstream, forced)
        try:
            async with contextlib.aclosing(upstream.pieces(call)) as pieces:
                async for piece in pieces:
                    self._count(piece, ask, call)
                    taken = _ended(piece, call, upstream)
                    if piece.index is not None:
                        self._take(taken, ask)
                    if piece.completion_tokens is not None:
                        self._tell_last(ask)
                    if taken is not piece and not ask.unfinished:
                        break  # the upstream would go on
                    # Read to the end all the same: the connection can then be used again.
        except UpstreamFailedError:
            if ask.unfinished:
                raise
        if ask.unfinished:
            failure = UpstreamFailedError("ended the stream before the answer's end")
            upstream.record_failure(failure)
            raise failure
        self._tell_last(ask)

    def _tell_last(self, ask: _Ask) -> None:
        """Put the output that ends the last answer, if it is there, with what all have cost."""
        if ask.last is None:
            return
        counted = None
        if ask.indices in self._counted:
            counted = max(0, sum(self._counted.values()) - self._healed)
        output = msgspec.structs.replace(
            ask.last,
            cached_tokens=self.cached_tokens,
            prompt_tokens=self._known_prompt_tokens(),
            completion_tokens=counted,
        )
        ask.last = None
        self._put(output)

    def _count(self, piece: Piece, ask: _Ask, call: Call) -> None:
        """Take note of what an upstream says that its answers cost, which is charged to tenants."""
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.cached_tokens is not None:
            self.cached_tokens = max(self.cached_tokens or 0, piece.cached_tokens)
        if piece.completion_tokens is not None:
            most = call.answers * call.sampling.max_tokens
            self._counted[ask.indices] = min(piece.completion_tokens, most)
            self.completion_tokens = sum(self._counted.values())

    def _take(self, piece: Piece, ask: _Ask) -> None:
        """Take what is new in an answer."""
        assert piece.index is not None
        if piece.index >= len(ask.indices):
            raise UpstreamFailedError("sent more answers than were asked for")
        index = ask.indices[piece.index]
        if index not in ask.unfinished:
            return
        start = ask.starts[index]
        text = start.push(piece.text)
        if start.inside:
            self._healed += len(piece.token_ids) or bool(piece.text)
        if piece.finish_reason is not None:
            start.finish()
        if start.matches is False:
            ask.unfinished.discard(index)
            ask.again.append(index)
            return
        if start.matches is None:
            return
        output = self._output(index, text, piece, ask)
        if piece.finish_reason is not None:
            ask.unfinished.discard(index)
            if not ask.unfinished:
                ask.last = output
                return
        if output.token_ids or output.finish_reason is not None:
            self._put(output)

    def _output(self, index: int, text: str, piece: Piece, ask: _Ask) -> EngineOutput:
        """Return what the frontend gets of a piece."""
        ids = list(piece.token_ids) or ([_UNKNOWN] if text else [])
        written = [text.encode(), *[b""] * (len(ids) - 1)] if ids else []
        if index in ask.unwritten:
            # The answer continues the half word, which whoever reads it expects.
            ask.unwritten.discard(index)
            ids, written = [_UNKNOWN, *ids], [self._request.begins_with, *written]
        if piece.finish_reason == "stop" and (not ids or written[-1]):
            # The token that ended the answer, which is never shown.
            ids, written = [*ids, _UNKNOWN], [*written, b""]
        reason = piece.finish_reason
        return EngineOutput(
            request_id=self._request.request_id,
            index=index,
            token_ids=ids,
            token_bytes=written,
            finish_reason="length" if reason == "length" else "stop" if reason else None,
            prompt_tokens=self._known_prompt_tokens(),
            cached_tokens=self.cached_tokens,
        )

    def _known_prompt_tokens(self) -> int:
        if self.prompt_tokens is not None:
            return self.prompt_tokens
        return self._calls.estimate_tokens(self._request.token_ids)

    def _put(self, output: EngineOutput) -> None:
        if not self._passed_on and output.index == 0:
            seconds = time.perf_counter() - self._started
            output = msgspec.structs.replace(output, prefill_seconds=seconds)
        self._passed_on = True
        self._stream.put(output)


def _ended(piece: Piece, call: Call, upstream: Upstream) -> Piece:
    """Return a piece, which ends its answer where it holds a token that the upstream can't see."""
    if upstream.api.ends_by_token or piece.finish_reason is not None:
        return piece
    ends = set(call.sampling.stop_token_ids).intersection(piece.token_ids)
    return dataclasses.replace(piece, finish_reason="stop") if ends else piece


async def _together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Do all of this at once; the first error ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
