"""IdlePrefill: computes the prompts that documents will probably need next, while it costs nothing.

A prefill is a background request: it waits until the engine is idle, any other request interrupts
it within one step, and it changes nothing but how long the next answer takes.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from midfill.engine.client import EngineClient
from midfill.frontend.prompts import PromptEncoder

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
    """At most one prefill per document: a new one replaces the one before.

    Args:
        engine: computes the prompts.
        encode: reaches the PromptEncoder.
    """

    def __init__(self, engine: EngineClient, encode: Encode) -> None:
        self._engine = engine
        self._encode = encode
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by document

    def start(self, document: str, tenant: str) -> None:
        """Start to prefill what a document will probably need next.

        Args:
            document: ``LayoutReport.document``.
            tenant: whose prefix cache to use.
        """
        self._cancel(document)
        task = asyncio.create_task(self._prefill(document, tenant), name="idle prefill")
        self._tasks[document] = task
        task.add_done_callback(lambda _: self._forget(document, task))

    def close(self) -> None:
        """Cancel all prefills."""
        for document in list(self._tasks):
            self._cancel(document)

    async def _prefill(self, document: str, tenant: str) -> None:
        try:
            expected = await self._encode(PromptEncoder.expected_prompt, document)
            if expected is None:
                return
            request = expected.request(f"prefill-{uuid.uuid4().hex}", tenant)
            with self._engine.submit(request) as outputs:
                reasons = {output.finish_reason async for output in outputs}
            if "stop" in reasons:
                await self._encode(PromptEncoder.record_computed, expected)
        except Exception as error:
            # No client waits for a prefill, so the error is not reported to one.
            _log.debug("idle prefill failed: %s", error)

    def _cancel(self, document: str) -> None:
        task = self._tasks.pop(document, None)
        if task is not None:
            task.cancel()

    def _forget(self, document: str, task: "asyncio.Task[None]") -> None:
        if self._tasks.get(document) is task:
            del self._tasks[document]
