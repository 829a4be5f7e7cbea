"""What is asked of a server, what it answers, and how that fails."""

from typing import Literal

import msgspec

from midfill.errors import MidfillError
from midfill.lsp.suggestions import Caret


class ServerUnreachableError(MidfillError):
    """No server answers."""


class ServerBusyError(MidfillError):
    """The server can't answer now; the same request may succeed soon."""


class RequestRefusedError(MidfillError):
    """The server refuses the request, and would refuse it again."""


class CompletionQuery(msgspec.Struct, frozen=True):
    """What to ask for.

    Attributes:
        caret: where.
        lines: "single" ends a completion at its first line break, "block" where the block around
            the caret ends.
        max_tokens: maximum tokens of a completion.
        count: number of completions; more than one are sampled.
        temperature: 0 takes the most likely tokens.
    """

    caret: Caret
    lines: Literal["single", "block"]
    max_tokens: int
    count: int = 1
    temperature: float = 0.0


class Completions(msgspec.Struct, frozen=True):
    """A server's answer.

    Attributes:
        texts: the completions, which may be empty.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were not computed.
    """

    texts: tuple[str, ...]
    prompt_tokens: int
    cached_tokens: int


class ServerStartError(MidfillError):
    """A server is needed that can't be started."""
