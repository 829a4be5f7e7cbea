"""RequestRecord: what is known of one HTTP request; whoever handles the request adds to it."""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

from midfill.serving.server.generation import Generation


@dataclass(slots=True, eq=False, kw_only=True)
class RequestRecord:
    """One request. Times are ``time.perf_counter()``'s.

    Attributes:
        request_id: the client's ``X-Request-Id``, or a new one.
        method, path: of the request.
        headers: of the request, names in lower case.
        arrived: when its head had arrived.
        tenant: who sent it; None if that was not asked, "" if there are no keys.
        body_bytes: size of its body; None until it is read.
        encodings: start and end of each time that it had something encoded, waiting included.
        model: name of the model that answers; None if none does.
        generation: its answers; None if it has none.
        error: code of the error that the client gets, or the error's kind; None without one.
        status: the HTTP status; None until it is sent.
        complete: whether the whole response was sent.
        abandoned: whether the client disconnected before that.
        trace_id: id of its trace; None if it has none.
    """

    request_id: str
    method: str
    path: str
    arrived: float
    headers: Sequence[tuple[bytes, bytes]] = ()
    tenant: str | None = None
    body_bytes: int | None = None
    encodings: list[tuple[float, float]] = field(default_factory=list)
    model: str | None = None
    generation: Generation | None = None
    error: str | None = None
    status: int | None = None
    complete: bool = False
    abandoned: bool = False
    trace_id: str | None = None


current_request: ContextVar[RequestRecord | None] = ContextVar("current_request", default=None)
"""The request that is being handled in a context."""
