"""The errors that midfill raises on purpose.

Each carries a message that says what is wrong and what to do about it. The command line prints it
as one line; the server answers with it, in the shape of the client's API.
"""

from collections.abc import Mapping


class MidfillError(Exception):
    """Base of all errors that a user can cause; the message is meant for the user."""


class OptionError(MidfillError):
    """An option of the command line whose value can't be used, or not beside another one."""


class InvalidRequestError(MidfillError):
    """A request that can't be served as it is (HTTP 400).

    Attributes:
        param: name of the offending field as the client spelled it, or None.
        code: machine-readable reason such as ``context_length_exceeded``, or None.
        problem: the message without the field's name in front of it; None if it doesn't begin so.
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        problem: str | None = None,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.problem = problem

    @classmethod
    def of_field(
        cls, param: str, problem: str, *, code: str | None = None
    ) -> "InvalidRequestError":
        """Make an error that says ``param problem`` and whose field can be renamed."""
        return cls(f"{param} {problem}", param=param, code=code, problem=problem)

    def renamed(self, names: Mapping[str, str]) -> "InvalidRequestError":
        """Return the error with its field as a client spells it.

        Args:
            names: from a field's name to the client's; fields that are not in it keep their names.
        """
        if self.param is None or self.param not in names or self.problem is None:
            return self
        return self.of_field(names[self.param], self.problem, code=self.code)


class ModelNotFoundError(MidfillError):
    """A model name or path without a checkpoint."""


class CheckpointError(MidfillError):
    """A checkpoint that is broken, truncated or unsupported; the message names file and tensor."""


class GenerationError(MidfillError):
    """The engine failed on a request; others are not affected (HTTP 500)."""


class KvTransferError(MidfillError):
    """KV that can't be exported or imported."""


class UnavailableError(MidfillError):
    """A request that can't be served now; the same request may succeed later.

    Attributes:
        retry_after: seconds after which to try again; None if there is no telling.
    """

    def __init__(self, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineDeadError(UnavailableError):
    """The engine process ended or is not ready (HTTP 503)."""


class UpstreamError(UnavailableError):
    """No server behind a gateway could answer (HTTP 502, or 503 if trying again makes sense)."""


class DeadlineError(UnavailableError):
    """A request that could not be answered within the time that its client gives it (HTTP 503)."""

    @classmethod
    def passed(cls) -> "DeadlineError":
        """Make the error of a request that was admitted, and has no answer in time."""
        return cls(
            "no answer within the time that the request gives; try again in a moment",
            retry_after=1,
        )


class QueueFullError(UnavailableError):
    """Too many tokens are queued (HTTP 429)."""


class RateLimitError(UnavailableError):
    """A request beyond the limits of its API key (HTTP 429)."""


class StoppingError(UnavailableError):
    """The server was told to stop; another one, or the next one, may answer (HTTP 503)."""
