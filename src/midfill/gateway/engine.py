"""GatewayEngine: other servers, as the engine of midfill's server.

The way of a request:

1. ``submit`` starts a task for each prompt, and returns the stream that its outputs go to.
2. The pool chooses the upstream that holds the document's KV, or the next best one.
3. ``UpstreamPrompts`` makes what is sent of the prompt's ids.
4. The upstream's answer arrives as ``Piece``s. Each becomes an ``EngineOutput`` whose tokens are
   given by what they stand for, since not all upstreams name tokens.
5. If an upstream fails before anything was passed on, the next one is asked.

Answers that have to begin with a half word are held until they do (``HealedStart``), and asked for
again, with the half word in the prompt, where they don't. A task that is cancelled closes its
connection, by which upstreams know that nobody waits.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import time
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from midfill.engine.messages import EngineInfo
from midfill.engine.output_stream import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest, EngineSamplingParams, EngineStats
from midfill.engine.request import TenantStats as Numbers
from midfill.errors import GenerationError, InvalidRequestError, MidfillError, QueueFullError
from midfill.gateway.calls import Call, Piece, UpstreamFailedError
from midfill.gateway.character_tokenizer import CHARACTERS_PER_TOKEN, CharacterTokenizer
from midfill.gateway.healed_start import HealedStart
from midfill.gateway.pool import UpstreamPool
from midfill.gateway.prompt_text import UpstreamPrompts
from midfill.gateway.routing import document_key
from midfill.gateway.upstream import Upstream
from midfill.tokens.tokenizer import Tokenizer

_log = logging.getLogger(__name__)

_MAX_RUNNING = 1024  # requests; beyond it they are refused
_FIRST_IDS = 64  # of a prompt without a document, which say where it goes
_UNKNOWN = -1  # a token without an id, see EngineOutput.token_bytes


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
    """See ``server.served_engine.ServedEngine``.

    Args:
        pool: the upstreams.
        tokenizer: the one that makes prompts.
        prompts: turns their ids into what upstreams take.
        context: maximum tokens of a prompt and its answer, in the tokenizer's tokens.
        salts: secret from which each tenant's cache salt is made; b"" makes none.
    """

    def __init__(
        self,
        pool: UpstreamPool,
        tokenizer: Tokenizer,
        prompts: UpstreamPrompts,
        context: int,
        salts: bytes = b"",
    ) -> None:
        self.restarts = 0
        self.retries = 0
        self.asked_again = 0
        self._pool = pool
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._salts = salts
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
        work = _Answers(self, request, stream)
        try:
            await work.run()
        except MidfillError as error:
            stream.put(error)
        except Exception:
            _log.exception("the gateway failed on a request")
            stream.put(GenerationError("the gateway failed on this request; its log says why"))
        finally:
            del self._tasks[request.request_id]
            tenant.running -= 1
            tenant.prompt_tokens += work.prompt_tokens or 0
            tenant.cached_tokens += work.cached_tokens
            tenant.generated_tokens += work.completion_tokens

    def estimate_tokens(self, ids: Sequence[int]) -> int:
        """Return about how many tokens a prompt has."""
        if isinstance(self._tokenizer, CharacterTokenizer):
            return max(1, round(len(ids) / CHARACTERS_PER_TOKEN))
        return len(ids)

    def document_of(self, request: EngineRequest) -> str:
        """Return what a request's upstream is chosen by."""
        document = request.document
        if not document:
            first = str(request.token_ids[:_FIRST_IDS])
            document = hashlib.blake2b(first.encode(), digest_size=8).hexdigest()
        return document_key(request.tenant, document)

    async def call(
        self, request: EngineRequest, ids: Sequence[int], indices: Sequence[int], upstream: Upstream
    ) -> Call:
        """Return what to ask an upstream.

        Args:
            request: what it is for.
            ids: the prompt.
            indices: which of its answers.
            upstream: the server.
        """
        sampling, stop = request.sampling, list[str]()
        if isinstance(self._tokenizer, CharacterTokenizer):
            known, stop = self._tokenizer.model_ids(sampling.stop_token_ids)
            sampling = msgspec.structs.replace(sampling, stop_token_ids=tuple(known))
        spare = _spare_tokens(request, ids, upstream)
        sampling = msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - len(request.begins_with) + spare
        )
        if sampling.seed is not None:
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + indices[0])
        salt = ""
        if self._salts:
            tenant = request.tenant.encode()
            salt = hashlib.blake2b(tenant, key=self._salts, digest_size=16).hexdigest()
        return Call(
            model=upstream.model,
            prompt=await self._prompts.of(ids, upstream),
            sampling=sampling,
            answers=len(indices),
            stop=tuple(stop),
            cache_salt=salt,
        )

    def unhealed(self, request: EngineRequest) -> list[int]:
        """Return a prompt with the half word that was taken off its end."""
        return [*request.token_ids, *self._tokenizer.spell(request.begins_with)]

    @property
    def pool(self) -> UpstreamPool:
        """The upstreams."""
        return self._pool


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
        last: the output that ends the last of them, held until the upstream has told what all cost.
    """

    indices: tuple[int, ...]
    healed: bool
    starts: dict[int, HealedStart]
    unfinished: set[int]
    unwritten: set[int]
    again: list[int] = field(default_factory=list)
    last: EngineOutput | None = None


class _Answers:
    """The answers to one prompt, on their way from upstreams to a stream."""

    def __init__(self, engine: GatewayEngine, request: EngineRequest, stream: OutputStream) -> None:
        self._engine = engine
        self._request = request
        self._stream = stream
        self._started = time.perf_counter()
        self._passed_on = False  # whether the client may have seen anything
        self.prompt_tokens: int | None = None
        self.cached_tokens = 0
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
        size = self._engine.pool.max_answers
        indices = range(request.sampling.n)
        asks = [tuple(indices[start : start + size]) for start in range(0, len(indices), size)]
        await _together(self._get(each, healed=healed) for each in asks)

    async def _compute(self) -> None:
        """Have the prompt computed, if an upstream has nothing else to do."""
        request, engine = self._request, self._engine
        upstream = engine.pool.choose(engine.document_of(request))
        reason: Literal["stop", "cancelled"] = "cancelled"
        if upstream is not None and not upstream.running:
            one = EngineSamplingParams(max_tokens=1, temperature=0.0)
            call = await engine.call(request, request.token_ids, (0,), upstream)
            call = dataclasses.replace(call, sampling=one)
            async with contextlib.aclosing(upstream.pieces(call)) as pieces:
                async for _ in pieces:
                    reason = "stop"
        self._stream.put(
            EngineOutput(request_id=request.request_id, index=0, token_ids=[], finish_reason=reason)
        )

    async def _get(self, indices: tuple[int, ...], *, healed: bool) -> None:
        """Get some answers from the first upstream that gives them."""
        engine, request = self._engine, self._request
        document = engine.document_of(request)
        failed: list[tuple[Upstream, UpstreamFailedError]] = []
        while True:
            upstream = engine.pool.choose(document, [each for each, _ in failed])
            if upstream is None:
                raise engine.pool.error(failed)
            ask = self._new_ask(indices, healed=healed)
            try:
                await self._ask(ask, upstream)
                break
            except UpstreamFailedError as failure:
                _log.warning("%s %s", upstream.address, failure)
                failed.append((upstream, failure))
                if self._passed_on:
                    raise engine.pool.error(failed) from None
                engine.retries += 1
        if ask.again:
            engine.asked_again += len(ask.again)
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
        engine, request = self._engine, self._request
        unhealed = bool(request.begins_with) and not ask.healed
        ids = engine.unhealed(request) if unhealed else request.token_ids
        call = await engine.call(request, ids, ask.indices, upstream)
        try:
            async with contextlib.aclosing(upstream.pieces(call)) as pieces:
                async for piece in pieces:
                    self._count(piece, ask)
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

    def _count(self, piece: Piece, ask: _Ask) -> None:
        """Take note of what an upstream says that its answers cost."""
        if piece.prompt_tokens is not None:
            self.prompt_tokens = piece.prompt_tokens
        if piece.cached_tokens is not None:
            self.cached_tokens = max(self.cached_tokens, piece.cached_tokens)
        if piece.completion_tokens is not None:
            self._counted[ask.indices] = piece.completion_tokens
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
        return self._engine.estimate_tokens(self._request.token_ids)

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


def _spare_tokens(request: EngineRequest, ids: Sequence[int], upstream: Upstream) -> int:
    """Return how many tokens an answer may have for the half word, beside its own.

    A server that names tokens may write one per byte, and the answer is cut where it has enough.
    Otherwise that can't be seen, and a half word has one or two.
    """
    if len(ids) > len(request.token_ids):
        return 0
    if upstream.kind in ("vllm", "llama.cpp", "midfill"):
        return len(request.begins_with)
    return min(len(request.begins_with), 2)


async def _together(works: Iterable[Coroutine[None, None, None]]) -> None:
    """Do all of this at once; the first error ends the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None


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
