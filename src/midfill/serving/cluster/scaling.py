"""How many replicas there should be: Serve's autoscaling, by the engines' own queues."""

from typing import Any


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
