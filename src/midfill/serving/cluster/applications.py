"""midfill's applications, as Ray Serve deploys them from Python or from a config file.

``import_path`` in a Serve config file is ``midfill.serving.cluster.applications:engines`` or
``:front``; ``args`` are the fields of ``EnginesSpec`` or ``FrontSpec``.
"""

from typing import Any

import msgspec
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from midfill.serving.cluster.front import Front
from midfill.serving.cluster.replica import EngineReplica
from midfill.serving.cluster.spec import ENGINE, FRONT, EnginesSpec, FrontSpec, read_spec
from midfill.serving.options import RouterName

_ROUTERS: dict[RouterName, str] = {
    "document": "midfill.serving.cluster.router.DocumentRouter",
    "round-robin": "midfill.serving.cluster.router.RoundRobinRouter",
}
_STATS_SECONDS = 2.0  # between two looks at a replica's numbers
_MAX_ONGOING = 1024  # requests at a replica; its own limit is in tokens
_HEALTH_SECONDS = 5.0
_HANG_SECONDS = 30.0  # without an answer to a health check, after which a replica is replaced
_DRAIN_SECONDS = 120.0  # for requests in progress, when a replica is to end
_SCALE_UP_SECONDS = 5.0
_SCALE_DOWN_SECONDS = 300.0  # a replica that goes takes the KV of its documents with it


def engines(args: dict[str, Any]) -> Application:
    """Return the application of a model's engines.

    Raises:
        MidfillError: an argument is wrong.
    """
    spec = read_spec(args, EnginesSpec)
    count: dict[str, Any] = {"num_replicas": spec.replicas}
    if spec.scales:
        count = {"autoscaling_config": _autoscaling(spec)}
    deployment = serve.deployment(
        EngineReplica,
        name=ENGINE,
        ray_actor_options={"num_cpus": spec.cpus, "num_gpus": spec.gpus},
        request_router_config=RequestRouterConfig(
            request_router_class=_ROUTERS[spec.router],
            request_routing_stats_period_s=_STATS_SECONDS,
        ),
        max_ongoing_requests=_MAX_ONGOING,
        max_constructor_retry_count=1,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HANG_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
        **count,
    )
    return deployment.bind(msgspec.to_builtins(_with_threads(spec)))


def front(args: dict[str, Any]) -> Application:
    """Return the application of the server in front of the engines.

    Raises:
        MidfillError: an argument is wrong.
    """
    spec = read_spec(args, FrontSpec)
    deployment = serve.deployment(
        serve.ingress()(Front),
        name=FRONT,
        num_replicas=spec.replicas,
        ray_actor_options={"num_cpus": spec.cpus},
        max_ongoing_requests=4 * _MAX_ONGOING,
        max_surge_percent=100,
        health_check_period_s=_HEALTH_SECONDS,
        health_check_timeout_s=_HANG_SECONDS,
        graceful_shutdown_wait_loop_s=0.5,
        graceful_shutdown_timeout_s=_DRAIN_SECONDS,
    )
    return deployment.bind(msgspec.to_builtins(spec))


def _with_threads(spec: EnginesSpec) -> Any:
    """Return the model's spec with as many threads as its replica has cores."""
    options = spec.model.options
    if options.threads is None:
        options = msgspec.structs.replace(options, threads=max(1, int(spec.cpus)))
    return msgspec.structs.replace(spec.model, options=options)


def _autoscaling(spec: EnginesSpec) -> AutoscalingConfig:
    """Return Serve's own form of how many replicas there may be."""
    return AutoscalingConfig(
        min_replicas=spec.replicas,
        max_replicas=spec.max_replicas,
        target_ongoing_requests=spec.target_requests,
        upscale_delay_s=_SCALE_UP_SECONDS,
        downscale_delay_s=_SCALE_DOWN_SECONDS,
        metrics_interval_s=_STATS_SECONDS,
        look_back_period_s=5 * _STATS_SECONDS,
        policy=AutoscalingPolicy(policy_function="midfill.serving.cluster.spec:by_queue"),
    )
