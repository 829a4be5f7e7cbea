"""A RayService for KubeRay: the same applications as ``midfill cluster up`` deploys, as YAML.

KubeRay starts a whole new cluster beside the old one where the cluster's part of a RayService has
changed, and moves the traffic once it is ready; a change of Serve's part alone is applied in place.
So that a change of the model is always the former, the pods are annotated with a digest of it.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from midfill.serving.cluster.spec import FRONT_APP, EnginesSpec, FrontSpec, engines_app

_SERVE_PORT = 8000  # where KubeRay looks for Serve
_KEYS_FOLDER = "/etc/midfill"
_CACHE_FOLDER = "/var/cache/midfill"
_HEAD_CPUS = 2
_HEAD_MEMORY = "4Gi"
_SPARE_CPUS = 1  # of each worker, for Ray's own processes and, on one of them, the server
_APPLICATIONS = "midfill.serving.cluster.applications"

Object = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ManifestOptions:
    """What a manifest says beside the applications.

    Attributes:
        name: of the RayService.
        image: a container image with midfill, as the Containerfile builds it.
        ray_version: the version of Ray in the image.
        memory: of each worker, such as "8Gi".
        namespace: where it belongs; None leaves that to whoever applies it.
        key_secret: a Secret whose key "api-keys" is a file as ``midfill keys`` writes it.
        cache_claim: a PersistentVolumeClaim for models and compiled kernels; None has each pod
            fetch and compile its own.
    """

    name: str
    image: str
    ray_version: str
    memory: str = "8Gi"
    namespace: str | None = None
    key_secret: str | None = None
    cache_claim: str | None = None


def ray_service(engines: EnginesSpec, front: FrontSpec, options: ManifestOptions) -> Object:
    """Return the manifest as plain values.

    Args:
        engines, front: what runs.
        options: where.
    """
    if options.key_secret is not None:
        front = msgspec.structs.replace(front, api_key_file=f"{_KEYS_FOLDER}/api-keys")
    applications = serve_config(engines, front)
    metadata: Object = {"name": options.name}
    if options.namespace is not None:
        metadata["namespace"] = options.namespace
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayService",
        "metadata": metadata,
        "spec": {
            "serveConfigV2": to_yaml(applications),
            "rayClusterConfig": _cluster(engines, options, _digest(applications)),
        },
    }


def serve_config(engines: EnginesSpec, front: FrontSpec) -> Object:
    """Return the applications as a config file of Serve, for all who deploy by such files."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "0.0.0.0", "port": _SERVE_PORT},
        "applications": [
            {
                "name": engines_app(1),
                "route_prefix": None,
                "import_path": f"{_APPLICATIONS}:engines",
                "args": _given(engines),
            },
            {
                "name": FRONT_APP,
                "route_prefix": "/",
                "import_path": f"{_APPLICATIONS}:front",
                "args": _given(front),
            },
        ],
    }


def to_yaml(value: Mapping[str, Any]) -> str:
    """Return plain values as YAML, in the order that they have."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        """Writes texts of several lines as blocks."""

    def write_text(dumper: Any, text: str) -> Any:
        style = "|" if "\n" in text else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)

    Dumper.add_representer(str, write_text)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100))


def _cluster(engines: EnginesSpec, options: ManifestOptions, digest: str) -> Object:
    """Return the cluster: a head that computes nothing, and a worker per replica."""
    most = max(engines.replicas, engines.max_replicas)
    worker_cpus = engines.cpus + _SPARE_CPUS
    return {
        "rayVersion": options.ray_version,
        "authOptions": {"mode": "token"},
        "enableInTreeAutoscaling": engines.scales,
        "headGroupSpec": {
            "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
            "template": _pod("ray-head", _resources(_HEAD_CPUS, _HEAD_MEMORY, 0), options, digest),
        },
        "workerGroupSpecs": [
            {
                "groupName": "engines",
                "replicas": engines.replicas,
                "minReplicas": engines.replicas,
                "maxReplicas": most,
                "rayStartParams": {"num-cpus": f"{int(worker_cpus)}"},
                "template": _pod(
                    "ray-worker",
                    _resources(worker_cpus, options.memory, engines.gpus),
                    options,
                    digest,
                ),
            }
        ],
    }


def _pod(name: str, resources: Object, options: ManifestOptions, digest: str) -> Object:
    """Return a pod's template."""
    volumes: list[Object] = [{"name": "cache", "emptyDir": {}}]
    mounts: list[Object] = [{"name": "cache", "mountPath": _CACHE_FOLDER}]
    if options.cache_claim is not None:
        claim = {"claimName": options.cache_claim}
        volumes = [{"name": "cache", "persistentVolumeClaim": claim}]
    if options.key_secret is not None:
        volumes.append({"name": "keys", "secret": {"secretName": options.key_secret}})
        mounts.append({"name": "keys", "mountPath": _KEYS_FOLDER, "readOnly": True})
    return {
        "metadata": {"annotations": {"midfill/applications": digest}},
        "spec": {
            "securityContext": {"runAsNonRoot": True, "fsGroup": 1000},
            "containers": [
                {
                    "name": name,
                    "image": options.image,
                    "env": [{"name": "MIDFILL_CACHE", "value": _CACHE_FOLDER}],
                    "resources": resources,
                    "volumeMounts": mounts,
                    "securityContext": {"allowPrivilegeEscalation": False},
                }
            ],
            "volumes": volumes,
        },
    }


def _resources(cpus: float, memory: str, gpus: float) -> Object:
    """Return what a container reserves, and may not exceed."""
    amounts: Object = {"cpu": f"{cpus:g}", "memory": memory}
    if gpus:
        amounts["nvidia.com/gpu"] = f"{gpus:g}"
    return {"requests": amounts, "limits": dict(amounts)}


def _given(spec: EnginesSpec | FrontSpec) -> Object:
    """Return the fields that differ from what they are by default, nested ones too."""
    return dict(_differing(msgspec.to_builtins(spec), _defaults(type(spec))))


def _defaults(kind: type[msgspec.Struct]) -> Object:
    """Return a spec's fields as they are by default; one without a default is missing."""
    if kind is EnginesSpec:
        from midfill.serving.cluster.spec import ModelSpec

        plain = EnginesSpec(model=ModelSpec(model=""))
        return dict(msgspec.to_builtins(plain))
    return dict(msgspec.to_builtins(kind()))


def _differing(values: Object, defaults: Object) -> Object:
    found: Object = {}
    for name, value in values.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict):
            if inner := _differing(value, default):
                found[name] = inner
        elif value != default:
            found[name] = list(value) if isinstance(value, tuple) else value
    return found


def _digest(applications: Object) -> str:
    text = json.dumps(applications, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
