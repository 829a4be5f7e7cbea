"""What the server and the engine process say to each other: msgpack over one ZeroMQ pair."""

import msgspec

from midfill.config import ModelOptions
from midfill.engine.request import EngineOutput, EngineRequest, EngineStats


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine tells of itself when it is ready.

    Attributes:
        backend: what computes, for people: "cpu kernels, 2 threads", "torch on cuda:0".
        layers: of the model.
        weight_bytes: of the weights in memory.
        kv_bytes: of the KV pool.
        slots: tokens the KV pool holds.
        context: most tokens of a prompt and its answer.
        load_seconds: from the engine's start to here.
        adapter: name of the adapter merged into the model; None for none.
    """

    backend: str
    layers: int
    weight_bytes: int
    kv_bytes: int
    slots: int
    context: int
    load_seconds: float
    adapter: str | None = None


class Start(msgspec.Struct, frozen=True, tag=True):
    """To the engine, first: load the checkpoint at this path."""

    path: str
    options: ModelOptions


class Submit(msgspec.Struct, frozen=True, tag=True):
    """To the engine: queue a request."""

    request: EngineRequest


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """To the engine: end a request, or one of its answers, before its next step."""

    request_id: str
    index: int | None = None


class Loading(msgspec.Struct, frozen=True, tag=True):
    """From the engine while it loads: ``done`` of ``total`` units of a stage."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it takes requests now."""

    info: EngineInfo


class Failed(msgspec.Struct, frozen=True, tag=True):
    """From the engine, last: it can't start, and why. ``error`` names a class of midfill.errors."""

    error: str
    message: str


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a request that can never run; see InvalidRequestError."""

    request_id: str
    message: str
    param: str | None
    code: str | None


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a request that it could not take because of a bug."""

    request_id: str
    message: str


class StepReport(msgspec.Struct, frozen=True, tag=True):
    """From the engine while it works: what its OutputBuffer lets out, and its numbers as of now."""

    outputs: list[EngineOutput]
    stats: EngineStats


ToEngine = Start | Submit | Cancel
FromEngine = Loading | Ready | Failed | Rejected | RequestFailed | StepReport
