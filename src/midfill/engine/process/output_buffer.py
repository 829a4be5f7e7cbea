"""OutputBuffer: gathers outputs that no client is waiting for into fewer messages."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf

import msgspec

from midfill.engine.request import EngineOutput, EngineRequest, TokenLogprobs

_SECONDS_PER_STREAM = 0.003
"""Tokens are held at least this long per stream. Sending a message to all streams then takes the
server and the clients about a tenth of the time, measured on two cores."""


@dataclass
class _BufferedAnswer:
    """One unfinished answer.

    Attributes:
        hidden: how many healed bytes it has yet to write before the client sees any text.
        urgent: how many of its next tokens are sent at once.
        held: outputs not yet sent, oldest first.
        held_since: time of the oldest of them, in seconds.
    """

    hidden: int
    urgent: int
    held: list[EngineOutput] = field(default_factory=list)
    held_since: float = 0.0


@dataclass
class _BufferedRequest:
    """One unfinished request; see EngineRequest for ``interval`` and ``stop_bytes``."""

    interval: float
    stop_bytes: frozenset[int]
    answers: dict[int, _BufferedAnswer]


class OutputBuffer:
    """The outputs of all requests on their way to the server.

    Args:
        token_bytes: returns the bytes of a token, b"" for ids that stand for no text.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._requests: dict[str, _BufferedRequest] = {}
        self._ready: list[EngineOutput] = []

    def register(self, request: EngineRequest) -> None:
        """Prepare for a request's outputs. Outputs of unknown requests are not held."""
        if request.stream_interval > 0.0 and not request.background:
            hidden = len(request.begins_with)
            self._requests[request.request_id] = _BufferedRequest(
                request.stream_interval,
                frozenset(request.stop_bytes),
                {
                    index: _BufferedAnswer(hidden, request.sent_at_once)
                    for index in range(request.sampling.n)
                },
            )

    def add(self, outputs: Sequence[EngineOutput], now: float) -> None:
        """Add a step's outputs at time ``now``, in seconds of any clock."""
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
                self._release(answer)
            if output.finish_reason is not None:
                del request.answers[output.index]
                if not request.answers:
                    del self._requests[output.request_id]

    def take(self, now: float) -> list[EngineOutput]:
        """Return what is to be sent now, and forget it.

        Once one streamed answer has been held long enough, all of them are sent: the server is
        woken anyway.
        """
        waiting = [
            (request.interval, answer)
            for request in self._requests.values()
            if request.interval < inf
            for answer in request.answers.values()
        ]
        minimum = _SECONDS_PER_STREAM * len(waiting)
        if any(
            answer.held and now - answer.held_since >= max(interval, minimum)
            for interval, answer in waiting
        ):
            for _, answer in waiting:
                self._release(answer)
        ready, self._ready = self._ready, []
        return ready

    def _is_urgent(
        self, output: EngineOutput, request: _BufferedRequest, answer: _BufferedAnswer
    ) -> bool:
        """Whether an output has to be sent at once; counts down what is hidden and urgent."""
        if output.finish_reason is not None:
            return True
        texts = [self._token_bytes(token_id) for token_id in output.token_ids]
        is_first = answer.hidden >= 0 or answer.urgent > 0
        answer.urgent -= len(texts)
        if answer.hidden >= 0:
            answer.hidden -= sum(map(len, texts))
        if is_first:
            return True
        return any(not request.stop_bytes.isdisjoint(text) for text in texts)

    def _release(self, answer: _BufferedAnswer) -> None:
        """Let what an answer holds be sent."""
        if answer.held:
            self._ready.append(_join(answer.held))
            answer.held = []


def _join(outputs: list[EngineOutput]) -> EngineOutput:
    """Return consecutive outputs of one answer as one."""
    last = outputs[-1]
    if len(outputs) == 1:
        return last
    logprobs: list[TokenLogprobs] | None = None
    if any(output.logprobs is not None for output in outputs):
        logprobs = [entry for output in outputs for entry in output.logprobs or ()]
    return msgspec.structs.replace(
        last,
        token_ids=[token_id for output in outputs for token_id in output.token_ids],
        logprobs=logprobs,
        prompt_logprobs=outputs[0].prompt_logprobs,
        prefill_seconds=outputs[0].prefill_seconds,
    )
