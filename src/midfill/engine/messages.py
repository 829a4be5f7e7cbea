"""Messages between the server and the engine process: msgpack over a ZeroMQ pair of sockets."""

import msgspec

from midfill import errors
from midfill.config import LogOptions, ModelOptions
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats, TenantStats
from midfill.errors import EngineDeadError, InvalidRequestError, MidfillError, UnavailableError

NO_BLOB = memoryview(b"")

KEY_VARIABLE = "MIDFILL_ENGINE_KEY"
"""Environment variable: the key of the server's end of the socket; "" where it has none."""


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine reports of itself when it is ready.

    Attributes:
        backend: what computes, to be displayed: "cpu kernels, 2 threads", "torch on cuda:0".
        layers: number of the model's layers.
        weight_bytes: size of the weights in memory.
        kv_bytes: size of the KV pool.
        slots: number of tokens that the KV pool holds.
        context: maximum number of tokens of a prompt and its answer.
        max_running: maximum number of answers that are generated at the same time.
        load_seconds: time from the start of loading until ready.
        adapter: name of the adapter merged into the model; None if there is none.
        method: of requests that name none; "none" where they compute and keep everything.
        reuse: of infilling requests that name none, where servers are to name one for them; else
            "none".
    """

    backend: str
    layers: int
    weight_bytes: int
    kv_bytes: int
    slots: int
    context: int
    max_running: int
    load_seconds: float
    adapter: str | None = None
    method: str = "none"
    reuse: str = "none"


class Prepare(msgspec.Struct, frozen=True, tag=True):
    """To the engine, before ``Start``: the model isn't here yet; do what needs none."""

    options: ModelOptions


class Start(msgspec.Struct, frozen=True, tag=True):
    """To the engine, its first message but for ``Prepare``: load the checkpoint at this path."""

    path: str
    options: ModelOptions
    logs: LogOptions


class Submit(msgspec.Struct, frozen=True, tag=True):
    """To the engine: queue a request."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """To the engine: end a request, or one of its answers, before the next step."""

    request_id: str
    index: int | None = None


class ExportKv(msgspec.Struct, frozen=True, tag=True):
    """To the engine: send a ``KvBlob`` of what is cached of these tokens for a tenant.

    The first ``start`` tokens are left out: the receiver has them.
    """

    transfer_id: str
    tenant: str
    token_ids: list[int]
    start: int = 0


class ImportKv(msgspec.Struct, frozen=True, tag=True):
    """To the engine: put an encoded ``KvBlob`` into a tenant's prefix cache.

    ``before`` are the tokens that come before the blob's, which have to be cached.
    """

    transfer_id: str
    tenant: str
    blob: memoryview
    before: list[int] = []


class FindKv(msgspec.Struct, frozen=True, tag=True):
    """To the engine: say how many of these tokens are cached for a tenant, from the first on."""

    transfer_id: str
    tenant: str
    token_ids: list[int]


class EndTransfer(msgspec.Struct, frozen=True, tag=True):
    """To the engine: end an ExportKv or ImportKv that nobody awaits any more."""

    transfer_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """To the engine: say that you are there, between two steps."""


class Pong(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the answer to ``Ping``."""


class Loading(msgspec.Struct, frozen=True, tag=True):
    """From the engine while it loads: ``done`` of ``total`` units of a stage."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it accepts requests now."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine, its last message: it can't start. From a replica: a request failed.

    Attributes:
        error: name of the exception's class, if possible one of midfill.errors.
        message, param, code, retry_after: its attributes.
    """

    error: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """Return the message that stands for an exception."""
        return cls(
            error=type(error).__name__,
            message=str(error) or type(error).__name__,
            param=getattr(error, "param", None),
            code=getattr(error, "code", None),
            retry_after=getattr(error, "retry_after", None),
        )

    def as_error(self, what: str = "") -> MidfillError:
        """Return the exception; an EngineDeadError where it is none of midfill.errors.

        Args:
            what: what that one says first.
        """
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, MidfillError)):
            return EngineDeadError(f"{what}{self.error}: {self.message}")
        if issubclass(kind, InvalidRequestError):
            return kind(self.message, param=self.param, code=self.code)
        if issubclass(kind, UnavailableError):
            return kind(self.message, retry_after=self.retry_after)
        return kind(self.message)


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a request can never run; see InvalidRequestError."""

    request_id: str
    message: str
    param: str | None
    code: str | None


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a request failed because of a bug; others are not affected."""

    request_id: str
    message: str


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """From the engine while it works: outputs, and its current numbers.

    The numbers by tenant are None where they are left out, to be sent soon.
    """

    outputs: list[EngineOutput]
    stats: EngineStats
    tenants: dict[str, TenantStats] | None = None


class TransferDone(msgspec.Struct, frozen=True, tag=True):
    """From the engine: the end of an ExportKv, ImportKv or FindKv.

    Attributes:
        transfer_id: of the transfer.
        tokens: how many tokens the blob of an export holds; otherwise how many are cached now, from
            the first on.
        blob: what an export asked for.
    """

    transfer_id: str
    tokens: int
    blob: memoryview = NO_BLOB


class TransferRefused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: an ExportKv or ImportKv came to nothing, and why."""

    transfer_id: str
    message: str


ToEngine = Prepare | Start | Submit | Cancel | ExportKv | ImportKv | FindKv | EndTransfer | Ping
FromEngine = (
    Loading
    | Ready
    | Failed
    | Rejected
    | RequestFailed
    | StepReport
    | TransferDone
    | TransferRefused
    | Pong
)
