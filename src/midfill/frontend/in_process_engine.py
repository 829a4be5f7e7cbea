"""InProcessEngine: an engine in the calling process, whose callers take turns in running steps."""

import itertools
import threading
from collections import deque
from collections.abc import Generator, Iterable, Sequence

from midfill.engine.engine import Engine
from midfill.engine.request import EngineOutput, EngineStats
from midfill.frontend.answer import AnswerDelta
from midfill.frontend.prompt import Prompt
from midfill.frontend.response import Response
from midfill.frontend.sampling import SamplingParams


class InProcessEngine:
    """An engine that any number of threads may call. No thread is dedicated to running it.

    A thread that waits for an answer runs the next step. The step may also produce outputs for
    other threads, which find them in their requests' mailboxes.

    Args:
        engine: must not be used by anything else.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = itertools.count()
        self._mailboxes: dict[str, deque[EngineOutput]] = {}
        self._lock = threading.Lock()

    @property
    def stats(self) -> EngineStats:
        """The engine's gauges and counters."""
        with self._lock:
            return self._engine.stats()

    def answer(
        self, responses: Sequence[Response], sampling: SamplingParams
    ) -> Generator[tuple[int, AnswerDelta], None, None]:
        """Generate answers; yield (index in ``responses``, delta) until all are complete.

        The requests are queued at the first ``next``, and end when the generator is closed.

        Raises:
            InvalidRequestError: a prompt can never run.
            GenerationError: the engine failed on one.
        """
        places = {f"{next(self._numbers)}": place for place in range(len(responses))}
        try:
            for request_id, place in places.items():
                self._add(request_id, responses[place].prompt, sampling)
            while not all(response.finished for response in responses):
                for output in self._next_outputs(places):
                    place = places[output.request_id]
                    delta = responses[place].push(output)
                    if delta is not None:
                        yield place, delta
                        if delta.finish_reason is not None and output.finish_reason is None:
                            self._end(output.request_id, output.index)
                    if responses[place].finished:
                        self._drop(output.request_id)
        finally:
            for request_id in places:
                self._drop(request_id)

    def _add(self, request_id: str, prompt: Prompt, sampling: SamplingParams) -> None:
        with self._lock:
            self._engine.add(prompt.request(request_id, sampling))
            self._mailboxes[request_id] = deque()

    def _end(self, request_id: str, index: int) -> None:
        """End an answer in which a stop string was found, of which the engine doesn't know."""
        with self._lock:
            self._engine.cancel(request_id, index)

    def _drop(self, request_id: str) -> None:
        """End a request, whether or not it is complete."""
        with self._lock:
            if self._mailboxes.pop(request_id, None) is not None:
                self._engine.cancel(request_id)

    def _next_outputs(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Return outputs of these requests; run a step if there are none yet."""
        with self._lock:
            outputs = self._collect(request_ids)
            if not outputs:
                for output in self._engine.step():
                    mailbox = self._mailboxes.get(output.request_id)
                    if mailbox is not None:
                        mailbox.append(output)
                outputs = self._collect(request_ids)
            return outputs

    def _collect(self, request_ids: Iterable[str]) -> list[EngineOutput]:
        """Empty the mailboxes of these requests."""
        outputs: list[EngineOutput] = []
        for request_id in request_ids:
            mailbox = self._mailboxes.get(request_id)
            if mailbox:
                outputs += mailbox
                mailbox.clear()
        return outputs
