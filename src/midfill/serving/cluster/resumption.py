"""Resumption: an answer that one replica began and another one continues.

Replicas of one model give the same tokens to the same request, whatever else they do (see the
invariants in docs/architecture.md), if its sampling has a seed. So a request whose replica is lost
is asked again as a whole, and of the second answer only what the client has not seen is passed on.
What it has seen is compared: where the answers differ after all (a runner that rounds differently,
a method that depends on the cache), the request fails.
"""

import secrets
from dataclasses import dataclass, field

import msgspec

from midfill.engine.request import EngineOutput, EngineRequest
from midfill.errors import EngineDeadError


def with_seed(request: EngineRequest) -> EngineRequest:
    """Return the request with a seed, so that it can be asked twice."""
    sampling = request.sampling
    if sampling.temperature == 0 or sampling.seed is not None or request.background:
        return request
    seeded = msgspec.structs.replace(sampling, seed=secrets.randbits(63))
    return msgspec.structs.replace(request, sampling=seeded)


@dataclass(slots=True)
class _Answer:
    """One answer: the tokens that were passed on, and how many of them the replica has repeated."""

    tokens: list[int] = field(default_factory=list)
    repeated: int = 0
    begun: bool = False
    ended: bool = False


class Resumption:
    """The answers to one request, over all replicas that it was sent to.

    Args:
        answers: how many there are.
    """

    def __init__(self, answers: int) -> None:
        self._answers = [_Answer() for _ in range(answers)]

    @property
    def finished(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.ended for answer in self._answers)

    def restart(self) -> None:
        """Begin to read the same answers from another replica."""
        for answer in self._answers:
            answer.repeated = 0

    def take(self, output: EngineOutput) -> EngineOutput | None:
        """Return what is new in an output; None if it says nothing new.

        Raises:
            EngineDeadError: the answer differs from what was passed on before.
        """
        answer = self._answers[output.index]
        if answer.ended:
            return None
        skipped = min(len(output.token_ids), len(answer.tokens) - answer.repeated)
        seen = answer.tokens[answer.repeated : answer.repeated + skipped]
        ends_early = output.finish_reason is not None and (
            answer.repeated + len(output.token_ids) < len(answer.tokens)
        )
        if output.token_ids[:skipped] != seen or ends_early:
            raise EngineDeadError(
                "the replica that was answering is lost, and another one would go on differently;"
                " send the request again",
                retry_after=1,
            )
        answer.repeated += skipped
        new = output.token_ids[skipped:]
        if answer.begun and not new and output.finish_reason is None:
            return None
        taken = _without(output, skipped, first=not answer.begun)
        answer.tokens += new
        answer.repeated += len(new)
        answer.begun = True
        answer.ended = output.finish_reason is not None
        return taken


def _without(output: EngineOutput, skipped: int, *, first: bool) -> EngineOutput:
    """Return an output without its first tokens, and without what only a first one tells."""
    if not skipped and first:
        return output
    return msgspec.structs.replace(
        output,
        token_ids=output.token_ids[skipped:],
        logprobs=None if output.logprobs is None else output.logprobs[skipped:],
        token_bytes=None if output.token_bytes is None else output.token_bytes[skipped:],
        prompt_logprobs=output.prompt_logprobs if first else None,
        prefill_seconds=output.prefill_seconds if first else None,
    )
