"""Messages from a replica to whoever asked it: msgpack, one after the other."""

import msgspec

from midfill import errors
from midfill.engine.request import EngineOutput
from midfill.errors import EngineDeadError, InvalidRequestError, MidfillError, UnavailableError


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The first message: this replica has the request."""

    replica: str


class Output(msgspec.Struct, frozen=True, tag=True):
    """New tokens."""

    output: EngineOutput


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The last message, if the request failed.

    Attributes:
        error: name of a class in ``midfill.errors``.
        message, param, code, retry_after: its attributes.
    """

    error: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @classmethod
    def of(cls, error: MidfillError) -> "Failed":
        """Return the message that stands for an error."""
        return cls(
            error=type(error).__name__,
            message=str(error),
            param=getattr(error, "param", None),
            code=getattr(error, "code", None),
            retry_after=getattr(error, "retry_after", None),
        )

    def as_error(self) -> MidfillError:
        """Return the error that the message stands for."""
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, MidfillError)):
            return EngineDeadError(f"{self.error}: {self.message}")
        if issubclass(kind, InvalidRequestError):
            return kind(self.message, param=self.param, code=self.code)
        if issubclass(kind, UnavailableError):
            return kind(self.message, retry_after=self.retry_after)
        return kind(self.message)


FromReplica = Accepted | Output | Failed


class KvHint(msgspec.Struct, frozen=True):
    """To a replica, with a request: where its KV is, as far as the server knows.

    Attributes:
        held: how many of its prompt's first tokens a replica has computed, by its name.
        prefill_rate: tokens of prompts that a replica computes per second; None before any was
            measured.
    """

    held: dict[str, int] = {}
    prefill_rate: float | None = None
