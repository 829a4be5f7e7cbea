"""The errors midfill raises on purpose.

Every one carries a message that names what is wrong and what to do about it; the command line
prints it as one line, the server turns it into a 4xx in the API's own error shape.
"""


class MidfillError(Exception):
    """Base of every error a user can cause; the message is meant for the user."""


class InvalidRequestError(MidfillError):
    """A request that can't be served as it is (HTTP 400).

    Attributes:
        param: the offending field's name as the client spelled it, or None.
        code: a machine-readable reason such as ``context_length_exceeded``, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFoundError(MidfillError):
    """A model name or path that leads to no checkpoint."""


class CheckpointError(MidfillError):
    """A checkpoint that is broken, truncated or of an unsupported kind; names file and tensor."""


class EngineDeadError(MidfillError):
    """The engine process ended while requests were in flight."""
