"""DocumentRouter: Serve's request router, by ``midfill.engine.routing``.

Serve sends the classes of this module to its processes by value. What such a process has to share
with its routers is therefore in another module.
"""

from ray.serve.request_router import PendingRequest

from midfill.engine.routing import order, preference
from midfill.serving.cluster.observed_router import Candidate, ObservedRouter


class DocumentRouter(ObservedRouter):
    """Sends a document's requests to the replica that holds its KV.

    ``EngineReplica.generate`` takes what it goes by. Background requests go to the document's own
    replica or wait, since no other one needs what they compute.
    """

    def ordered(self, candidates: list[Candidate], request: PendingRequest) -> list[Candidate]:
        """Return the replicas in the order in which the request tries them."""
        document = str(request.kwargs.get("document", ""))
        if request.kwargs.get("background"):
            return preference(document, candidates)[:1]
        return order(document, candidates)


class RoundRobinRouter(ObservedRouter):
    """Sends requests to all replicas in turn, whatever they are about: for comparison."""

    _turn = 0

    def ordered(self, candidates: list[Candidate], request: PendingRequest) -> list[Candidate]:
        """Return the replicas, beginning with the next one."""
        candidates.sort(key=lambda each: each.address)
        self._turn += 1
        first = self._turn % len(candidates)
        return [*candidates[first:], *candidates[:first]]
