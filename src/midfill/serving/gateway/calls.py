"""What is asked of an upstream, and what comes back, whatever its API."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from midfill.engine.request import EngineSamplingParams
from midfill.errors import MidfillError

UpstreamPrompt = str | list[int]


class UpstreamFailedError(MidfillError):
    """An upstream can't be reached, or doesn't answer as it should; another one may.

    Attributes:
        busy: whether it is only overloaded.
    """

    def __init__(self, message: str, *, busy: bool = False) -> None:
        super().__init__(message)
        self.busy = busy


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request to an upstream.

    Attributes:
        model: the upstream's name of it.
        prompt: text, in which the upstream parses special tokens, or token ids.
        sampling: how to answer; ``stop_token_ids`` are the model's own.
        answers: how many; ``sampling.n`` or fewer.
        stop: texts of special tokens that end an answer and whose ids are unknown.
        cache_salt: requests with different ones share no KV, where the upstream knows of it; "" for
            all who may.
        begins_with: what the upstream has to make the answer begin with, if it can.
    """

    model: str
    prompt: UpstreamPrompt
    sampling: EngineSamplingParams
    answers: int = 1
    stop: tuple[str, ...] = ()
    cache_salt: str = ""
    begins_with: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new in one answer.

    Attributes:
        index: which of the call's answers; None for what concerns all of them.
        text: new text.
        token_ids: new tokens, where the upstream names them.
        finish_reason: "stop" or "length" at the answer's end.
        prompt_tokens, cached_tokens, completion_tokens: its count so far, over all answers.
    """

    index: int | None = None
    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class UpstreamApi(Protocol):
    """How to ask one kind of server."""

    @property
    def path(self) -> str:
        """Where to POST."""
        ...

    @property
    def max_answers(self) -> int:
        """Maximum number of answers of one call."""
        ...

    @property
    def ends_by_token(self) -> bool:
        """Whether an answer ends with the first of ``stop_token_ids``."""
        ...

    def body(self, call: Call) -> dict[str, Any]:
        """Return the JSON body to send."""
        ...

    def pieces(self, event: Mapping[str, Any]) -> Iterator[Piece]:
        """Yield what a streamed event says.

        Raises:
            UpstreamFailedError: it says that the upstream has failed, or makes no sense.
        """
        ...
