"""ObservedRouter: a request router whose process can see what its replicas tell of themselves."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from midfill.engine.routing import DEFAULT_SLOTS
from midfill.serving.cluster.messages import ReplicaNumbers, read_numbers

_ROUTERS: "WeakValueDictionary[str, ObservedRouter]" = WeakValueDictionary()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica as routing sees it.

    Attributes:
        replica: Serve's.
        address, running, slots: see ``engine.routing.Loaded``.
    """

    replica: RunningReplica
    address: str
    running: int
    slots: int = DEFAULT_SLOTS


class ObservedRouter(RequestRouter):  # type: ignore[misc]
    """See the module."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Make the router known by the name of its application."""
        _ROUTERS[self.app_name] = self

    def numbers(self) -> dict[str, ReplicaNumbers]:
        """Return what each replica has told last, by its name."""
        replicas = list(self.curr_replicas.values())
        return {each.replica_id.unique_id: read_numbers(each.routing_stats) for each in replicas}

    def named(
        self, replicas: Sequence[RunningReplica], request: PendingRequest
    ) -> list[list[RunningReplica]] | None:
        """Return the order for a call of one replica, if it is one: it alone, if it is there.

        If it isn't, any other one is called, and says that it is not the one.
        """
        name = request.kwargs.get("replica")
        if name is None:
            return None
        found = [each for each in replicas if each.replica_id.unique_id == name]
        return [found or list(replicas)]

    def candidates(
        self, replicas: Sequence[RunningReplica], request: PendingRequest
    ) -> list[Candidate]:
        """Return those that may get the request: others than have failed on it, if there are."""
        avoid = set(request.kwargs.get("avoid", ()))
        loads = self.replica_queue_len_cache
        found = [
            Candidate(each, each.replica_id.unique_id, loads.get(each.replica_id) or 0)
            for each in replicas
        ]
        return [each for each in found if each.address not in avoid] or found


def numbers_of(app: str) -> dict[str, ReplicaNumbers]:
    """Return what the replicas of an application have told, as this process knows it."""
    router = _ROUTERS.get(app)
    return {} if router is None else router.numbers()
