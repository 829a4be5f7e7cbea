"""IdlePrefill: computes the prompts that documents will probably need next, while it costs nothing.

A prefill is a background request: it waits until the engine is idle, any other request interrupts
it within one step, and it changes nothing but how long the next answer takes.
"""

import asyncio
import contextvars
import logging
import uuid
from collections.abc import Awaitable, Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from midfill.engine.request import EngineRequest
from midfill.frontend.prompt import ExpectedPrompt, Prompt
from midfill.frontend.prompts import PromptEncoder
from midfill.frontend.sampling import SamplingParams
from midfill.infill.request import InfillRequest
from midfill.serving.server.served_engine import ServedEngine

_log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")


class Encode(Protocol):
    """``ModelService.encode``: calls a function of the PromptEncoder on its thread."""

    async def __call__(
        self,
        function: Callable[Concatenate[PromptEncoder, P], T],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T: ...


class IdlePrefill:
    """At most one prefill per document, and per tenant that asks: a new one replaces the last.

    Args:
        engine: computes the prompts.
        encode: reaches the PromptEncoder.
    """

    def __init__(self, engine: ServedEngine, encode: Encode) -> None:
        self._engine = engine
        self._encode = encode
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by document, or by tenant

    def start(self, document: str | None, tenant: str, inexact: Prompt | None = None) -> None:
        """Start to prefill what a document will probably need next.

        Args:
            document: ``LayoutReport.document``.
            tenant: whose prefix cache to use.
            inexact: its last prompt, if its KV was taken from elsewhere: it is computed first.
        """
        key = f"tenant-{tenant}" if document is None else document
        self._start(key, lambda: self._prefill_document(document, tenant, inexact))

    def start_context(self, request: InfillRequest) -> None:
        """Start to prefill what a client will probably need next with the request's context."""
        tenant, find = request.tenant, PromptEncoder.expected_with_snippets
        self._start(f"tenant-{tenant}", lambda: self._prefill(find, request, tenant))

    def start_prompt(self, prompt: Prompt, tenant: str) -> None:
        """Start to prefill a prompt for which a client will ask soon."""
        document = None if prompt.report is None else prompt.report.document
        self._start(f"tenant-{tenant}", lambda: self._compute(prompt.token_ids, tenant, document))

    async def finish(self) -> None:
        """Wait until all prefills that have been started are done."""
        while self._tasks:
            await asyncio.wait(list(self._tasks.values()))

    def close(self) -> None:
        """Cancel all prefills."""
        for key in list(self._tasks):
            self._cancel(key)

    def _start(self, key: str, work: Callable[[], Awaitable[object]]) -> None:
        self._cancel(key)
        # In a context of its own: it is no part of the request that caused it.
        task = asyncio.create_task(
            _log_errors(work), name="idle prefill", context=contextvars.Context()
        )
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._forget(key, task))

    async def _prefill_document(
        self, document: str | None, tenant: str, inexact: Prompt | None
    ) -> None:
        if inexact is not None:
            await self._compute(inexact.token_ids, tenant, document)
        if document is not None:
            await self._prefill(PromptEncoder.expected_prompt, document, tenant)

    async def _prefill(
        self, find: Callable[[PromptEncoder, T], ExpectedPrompt | None], what: T, tenant: str
    ) -> None:
        expected = await self._encode(find, what)
        if expected is None:
            return
        document = expected.layout.document
        if await self._compute(expected.token_ids, tenant, document):
            await self._encode(PromptEncoder.record_computed, expected)

    async def _compute(self, token_ids: list[int], tenant: str, document: str | None) -> bool:
        """Have a prompt computed where its document's KV is; return whether it was."""
        request = EngineRequest(
            request_id=f"prefill-{uuid.uuid4().hex}",
            token_ids=token_ids,
            sampling=SamplingParams().for_engine(),
            tenant=tenant,
            background=True,
            document=document or "",
        )
        with self._engine.submit(request) as outputs:
            return "stop" in {output.finish_reason async for output in outputs}

    def _cancel(self, key: str) -> None:
        task = self._tasks.pop(key, None)
        if task is not None:
            task.cancel()

    def _forget(self, key: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(key) is task:
            del self._tasks[key]


async def _log_errors(work: Callable[[], Awaitable[object]]) -> None:
    """Do the work. No client waits for it, so errors are not reported to one."""
    try:
        await work()
    except Exception as error:
        _log.debug("idle prefill failed: %s", error)
