"""OutputBuffer: what a step produced, until the server is told.

A message to the server costs it, and then its client, about as much time as a small model's step
takes, on the same cores. So a token that nobody waits for is told together with the next ones.
At once go the first of an answer that the client can see, the last, and every one that may
complete a stop string, since the server alone knows text and ends the answer there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

from midfill.engine.request import EngineOutput, EngineRequest, TokenLogprobs

_SECONDS_A_STREAM = 0.003
"""Held at least so long for each stream: sending a message to all then takes the server and the
clients about a tenth of the time, measured on two cores."""


@dataclass
class _Answer:
    """One answer that goes on.

    Attributes:
        hidden: bytes that it writes yet before the client sees any.
        held: not told yet, oldest first.
        held_since: when the oldest of them came.
    """

    hidden: int
    held: list[EngineOutput] = field(default_factory=list)
    held_since: float = 0.0


@dataclass
class _Request:
    interval: float
    stop_bytes: frozenset[int]
    answers: dict[int, _Answer]


class OutputBuffer:
    """The outputs of all requests on their way out."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        """``token_bytes``: the bytes of a token, b"" for ids that stand for no text."""
        self._token_bytes = token_bytes
        self._requests: dict[str, _Request] = {}
        self._ready: list[EngineOutput] = []

    def expect(self, request: EngineRequest) -> None:
        """A request was queued. Outputs of requests that were never named are not held."""
        if request.stream_interval > 0.0 and not request.background:
            hidden = len(request.begins_with)
            self._requests[request.request_id] = _Request(
                request.stream_interval,
                frozenset(request.stop_bytes),
                {index: _Answer(hidden) for index in range(request.sampling.n)},
            )

    def add(self, outputs: Sequence[EngineOutput], now: float) -> None:
        """Take a step's outputs, at time ``now`` in seconds of any clock."""
        for output in outputs:
            request = self._requests.get(output.request_id)
            if request is None:
                self._ready.append(output)
                continue
            answer = request.answers[output.index]
            if not answer.held:
                answer.held_since = now
            answer.held.append(output)
            if self._is_urgent(output, request, answer):
                self._tell(answer)
            if output.finish_reason is not None:
                del request.answers[output.index]
                if not request.answers:
                    del self._requests[output.request_id]

    def take(self, now: float) -> list[EngineOutput]:
        """What the server is told now.

        Once one answer has waited long enough, all that stream are told: the server is woken
        anyway.
        """
        waiting = [
            (request.interval, answer)
            for request in self._requests.values()
            if request.interval < inf
            for answer in request.answers.values()
        ]
        least = _SECONDS_A_STREAM * len(waiting)
        if any(
            answer.held and now - answer.held_since >= max(interval, least)
            for interval, answer in waiting
        ):
            for _, answer in waiting:
                self._tell(answer)
        ready, self._ready = self._ready, []
        return ready

    def _is_urgent(self, output: EngineOutput, request: _Request, answer: _Answer) -> bool:
        if output.finish_reason is not None:
            return True
        texts = [self._token_bytes(token_id) for token_id in output.token_ids]
        if answer.hidden >= 0:
            answer.hidden -= sum(map(len, texts))
            return True
        return any(not request.stop_bytes.isdisjoint(text) for text in texts)

    def _tell(self, answer: _Answer) -> None:
        if answer.held:
            self._ready.append(_joined(answer.held))
            answer.held = []


def _joined(outputs: list[EngineOutput]) -> EngineOutput:
    """Outputs of one answer, in order, as one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    logprobs: list[TokenLogprobs] | None = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = [one for output in outputs for one in output.logprobs or ()]
    return EngineOutput(
        request_id=last.request_id,
        index=last.index,
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=logprobs,
        finish_reason=last.finish_reason,
        cached_tokens=last.cached_tokens,
        error=last.error,
    )
