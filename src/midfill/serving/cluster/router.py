"""DocumentRouter: Serve's request router, by ``midfill.engine.routing``.

Serve sends the classes of this module to its processes by value. What such a process has to share
with its routers is therefore in another module.
"""

from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, RunningReplica

from midfill.engine.routing import order, preference
from midfill.serving.cluster.observed_router import ObservedRouter


class DocumentRouter(ObservedRouter):
    """Sends a document's requests to the replica that holds its KV.

    ``EngineReplica.generate`` takes what it goes by. Background requests go to the document's own
    replica or wait, since no other one needs what they compute.
    """

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas in the order in which the request tries them."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if (named := self.named(candidate_replicas, pending_request)) is not None:
            return named
        kwargs: Mapping[str, Any] = pending_request.kwargs
        document = str(kwargs.get("document", ""))
        candidates = self.candidates(candidate_replicas, pending_request)
        if kwargs.get("background"):
            return [[preference(document, candidates)[0].replica]]
        return [[each.replica] for each in order(document, candidates)]


class RoundRobinRouter(ObservedRouter):
    """Sends requests to all replicas in turn, whatever they are about: for comparison."""

    _turn = 0

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, beginning with the next one."""
        if pending_request is None or not candidate_replicas:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        if (named := self.named(candidate_replicas, pending_request)) is not None:
            return named
        candidates = self.candidates(candidate_replicas, pending_request)
        candidates.sort(key=lambda each: each.address)
        self._turn += 1
        first = self._turn % len(candidates)
        return [[each.replica] for each in (*candidates[first:], *candidates[:first])]
