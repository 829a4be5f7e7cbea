"""SharedAnswer: an answer that several engines have a part in, as its client sees it."""

import math
import time

import msgspec

from midfill.engine.process.output_stream import OutputStream
from midfill.engine.request import EngineOutput, EngineRequest, FinishReason
from midfill.engine.scheduling.admission import Admission


def hands_over(request: EngineRequest) -> bool:
    """Whether another engine can go on with an answer after its first tokens.

    Not with what more than tokens and KV belongs to: several answers, scores of the prompt, KV
    under a method.
    """
    sampling = request.sampling
    plain = not request.background and request.method in (None, "none")
    return plain and sampling.n == 1 and sampling.prompt_logprobs is None


class SharedAnswer:
    """A request, and what its client has of the answer.

    Args:
        request: the request.
        stream: where outputs go.
        admission: counts the request as queued until its first output.
        context: maximum tokens of a prompt and its answer.

    Attributes:
        tokens: of the answer, as far as they were sent.
        begun: whether anything was.
    """

    def __init__(
        self, request: EngineRequest, stream: OutputStream, admission: Admission, context: int
    ) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.begun = False
        self._stream = stream
        self._admission = admission
        self._first: EngineOutput | None = None
        self._room = min(request.sampling.max_tokens, context - len(request.token_ids))

    @property
    def can_go_on(self) -> bool:
        """Whether another engine can serve what is left."""
        return not self.begun or hands_over(self.request)

    @property
    def deadline(self) -> float | None:
        """When nobody waits for what comes next; None is never."""
        whole = self.request.stream_interval == math.inf
        return self.request.deadline if whole or not self.begun else None

    def first_part(self) -> EngineRequest:
        """Return the request to an engine that computes the prompt and hands over the answer.

        The answer's first token; or, where it has to be found out first whether the answer is empty
        after the bytes it has to begin with, as many as these bytes may be.
        """
        request = self.request
        tokens = 1 + (len(request.begins_with) if request.empty_threshold > 0 else 0)
        sampling = msgspec.structs.replace(
            request.sampling, max_tokens=min(tokens, request.sampling.max_tokens)
        )
        return msgspec.structs.replace(request, sampling=sampling, stream_interval=0.0)

    def rest(self) -> EngineRequest:
        """Return the request to an engine that goes on where the answer stands."""
        return msgspec.structs.replace(self.request, answered=self.tokens, deadline=self.deadline)

    def put_first(self, output: EngineOutput) -> bool:
        """Send on the first output to ``first_part``; return whether the answer goes on."""
        goes_on = output.finish_reason is None or (
            output.finish_reason == "length" and len(output.token_ids) < self._room
        )
        self.put(msgspec.structs.replace(output, finish_reason=None) if goes_on else output)
        return goes_on

    def put(self, output: EngineOutput) -> None:
        """Send an output on; what is told of the prompt is what its first engine says."""
        self._admission.record(output, time.monotonic())
        if hands_over(self.request):
            first = self._first = self._first or output
            if output is not first:
                output = msgspec.structs.replace(
                    output,
                    cached_tokens=first.cached_tokens,
                    reused_tokens=first.reused_tokens,
                    prefill_seconds=None,
                )
            self.tokens += output.token_ids
        self.begun = True
        self._stream.put(output)

    def end(self, reason: FinishReason) -> None:
        """End all answers, whatever is missing of them."""
        for index in range(self.request.sampling.n):
            self._stream.put(
                EngineOutput(
                    request_id=self.request.request_id,
                    index=index,
                    token_ids=[],
                    finish_reason=reason,
                )
            )
