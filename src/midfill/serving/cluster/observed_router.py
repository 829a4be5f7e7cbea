"""ObservedRouter: a request router whose process can see what its replicas report of themselves."""

from abc import abstractmethod
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
        """Return what each replica has reported last, by its name."""
        replicas = list(self.curr_replicas.values())
        return {each.replica_id.unique_id: read_numbers(each.routing_stats) for each in replicas}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which the request tries them.

        A call of one replica by its name gets that one alone. If it isn't there, any other one is
        called, and says that it is not the one. Other calls try replicas that have failed on the
        request only where there are no others.
        """
        replicas, request = candidate_replicas, pending_request
        if request is None or not replicas:
            return [replicas]
        request.routing_context.should_backoff = True
        if (name := request.kwargs.get("replica")) is not None:
            return [[each for each in replicas if each.replica_id.unique_id == name] or replicas]
        loads = self.replica_queue_len_cache
        candidates = [
            Candidate(each, each.replica_id.unique_id, loads.get(each.replica_id) or 0)
            for each in replicas
        ]
        avoid = set(request.kwargs.get("avoid", ()))
        fit = [each for each in candidates if each.address not in avoid]
        return [[each.replica] for each in self.ordered(fit or candidates, request)]

    @abstractmethod
    def ordered(self, candidates: list[Candidate], request: PendingRequest) -> list[Candidate]:
        """Return replicas in the order in which a request tries them; there is at least one."""


def numbers_of(app: str) -> dict[str, ReplicaNumbers]:
    """Return what the replicas of an application have reported, as this process knows it."""
    router = _ROUTERS.get(app)
    return {} if router is None else router.numbers()
