"""What replicas run, and how many: plain values that fit into a Serve config file."""

import re
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from midfill.config import (
    DEFAULT_MAX_QUEUED_TOKENS,
    DEFAULT_STEP_TIMEOUT,
    FimTokens,
    LogOptions,
    ModelOptions,
)
from midfill.errors import MidfillError
from midfill.models.checkpoints.model_store import resolve, resolve_adapter
from midfill.serving.options import RouterName, ServeOptions, WindowSize
from midfill.system.extras import require

FRONT_APP = "midfill"
FRONT = "Front"
ENGINE = "Engine"

_ENGINES = re.compile(r"midfill-engines-(\d+)")

T = TypeVar("T", bound=msgspec.Struct)


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model, how it is run and what clients see of it: fields of ``ServeOptions``.

    Names and paths are as a user gives them; each machine looks them up for itself.

    Attributes:
        model: name or path, see ``midfill models``.
        adapter: an adapter's folder, "none", or None for the one that midfill has for the model.
    """

    model: str
    adapter: str | None = None
    served_name: str | None = None
    aliases: tuple[str, ...] = ()
    fim_tokens: FimTokens | None = None
    window: WindowSize | None = None
    snippets: int | None = None
    max_queued_tokens: int = DEFAULT_MAX_QUEUED_TOKENS
    step_timeout: float = DEFAULT_STEP_TIMEOUT
    idle_prefill: bool = True
    stream_interval: float = 0.025
    logs: LogOptions = LogOptions()
    options: ModelOptions = ModelOptions()

    def find(self) -> tuple[Path, ServeOptions]:
        """Return the checkpoint on this machine, fetched if needed, and the server's options.

        Raises:
            MidfillError: there is no such model, or an option is wrong.
        """
        values = {name: getattr(self, name) for name in self.__struct_fields__}
        adapter = resolve_adapter(self.model, values.pop("adapter"))
        path = None if adapter is None else str(adapter)
        values["options"] = msgspec.structs.replace(self.options, adapter=path)
        return resolve(self.model), ServeOptions(**values)


class EnginesSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The engines of one model.

    Attributes:
        model: what each runs.
        replicas: how many there are; the least number, if ``max_replicas`` is larger.
        max_replicas: up to how many are started while requests queue.
        target_requests: requests in progress per replica that autoscaling aims at.
        cpus, gpus: what each replica reserves of its machine.
        router: "document" sends a document's requests to one replica, "round-robin" to all in turn.
    """

    model: ModelSpec
    replicas: int = 1
    max_replicas: int = 0
    target_requests: float = 4.0
    cpus: float = 1.0
    gpus: float = 0.0
    router: RouterName = "document"

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError("replicas must be at least 1")
        if self.max_replicas and self.max_replicas < self.replicas:
            raise ValueError(f"max_replicas {self.max_replicas} is less than {self.replicas}")

    @property
    def scales(self) -> bool:
        """Whether the number of replicas changes with the load."""
        return self.max_replicas > self.replicas


class FrontSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The server in front of the engines.

    Attributes:
        api_keys, api_key_file: see ``ServeOptions``.
        replicas: how many servers there are.
        cpus: what each reserves of its machine.
        logs: what it logs, and how.
        move_kv: have replicas fetch documents' KV from each other.
        own_hosts: if only their own machine can connect, names that servers without keys answer
            under, beside the machine's; None is any, see ``serving.server.middleware``.
    """

    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    replicas: int = 1
    cpus: float = 0.5
    logs: LogOptions = LogOptions()
    move_kv: bool = True
    own_hosts: tuple[str, ...] | None = None

    @property
    def key_path(self) -> Path | None:
        """``api_key_file`` as a path."""
        return None if self.api_key_file is None else Path(self.api_key_file)


def read_spec(values: dict[str, Any], kind: type[T]) -> T:
    """Return a spec from plain values.

    Raises:
        MidfillError: a field is unknown or has a wrong value; the message names it.
    """
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise MidfillError(f"the arguments of a midfill application are wrong: {error}") from None


def require_ray() -> None:
    """Check that Ray is installed.

    Raises:
        MidfillError: it is not, or there is no Ray for this system.
    """
    if sys.platform == "win32":
        raise MidfillError("midfill cluster needs Linux or macOS; on Windows, use WSL")
    # gRPC comes with Serve. Looking for ray.serve itself would import Ray, too early.
    require("midfill cluster", ["ray", "grpc"], extra="cluster")


def installed_ray() -> str:
    """Return the version of Ray that is installed; that which midfill is tested with if none is."""
    try:
        return version("ray")
    except PackageNotFoundError:
        return "2.60.0"


def engines_app(generation: int) -> str:
    """Return the name of the application of a generation of engines."""
    return f"midfill-engines-{generation}"


def generation_of(app: str) -> int | None:
    """Return which generation an application is; None if it is something else."""
    match = _ENGINES.fullmatch(app)
    return None if match is None else int(match[1])


def by_queue(context: Any) -> tuple[float, dict[str, Any]]:
    """Return how many replicas the requests in progress need, for Serve to approach.

    Serve counts calls; it can't tell a client's request from a prompt that a replica computes only
    while it is idle. So the requests are counted by the engines.

    Args:
        context: Serve's ``AutoscalingContext``.
    """
    requests = context.aggregated_metrics.get("requests", {})
    in_progress = sum(requests.values()) + (context.total_queued_requests or 0.0)
    return in_progress / context.config.target_ongoing_requests, {}
