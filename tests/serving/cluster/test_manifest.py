"""What KubeRay, Kubernetes and Serve each read of a manifest, by their own schemas where they have
one that can be installed.
"""

import io
import json
import os
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from dockerfile_parse import DockerfileParser

from midfill.config import ModelOptions
from midfill.serving.cluster.manifest import ManifestOptions, ray_service, to_yaml
from midfill.serving.cluster.spec import EnginesSpec, FrontSpec, ModelSpec, read_spec

ROOT = Path(__file__).parents[3]
KUBERNETES = "1.33"

STRING, INTEGER, BOOLEAN, OBJECT = ({"type": t} for t in ("string", "integer", "boolean", "object"))
START_PARAMETERS = {"type": "object", "additionalProperties": STRING}


def fields(required: str = "", **types: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": types,
        "required": required.split(),
        "additionalProperties": False,
    }


# KubeRay's fields that midfill uses, by the custom resource definition of KubeRay 1.5.
RAY_SERVICE = fields(
    "apiVersion kind metadata spec",
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=fields("name", name=STRING, namespace=STRING),
    spec=fields(
        "serveConfigV2 rayClusterConfig",
        serveConfigV2=STRING,
        rayClusterConfig=fields(
            "headGroupSpec",
            rayVersion=STRING,
            authOptions=fields(mode={"enum": ["disabled", "token"]}),
            enableInTreeAutoscaling=BOOLEAN,
            headGroupSpec=fields("template", rayStartParams=START_PARAMETERS, template=OBJECT),
            workerGroupSpecs={
                "type": "array",
                "items": fields(
                    "groupName minReplicas maxReplicas template",
                    groupName=STRING,
                    replicas=INTEGER,
                    minReplicas=INTEGER,
                    maxReplicas=INTEGER,
                    rayStartParams=START_PARAMETERS,
                    template=OBJECT,
                ),
            },
        ),
    ),
)

ENGINES = EnginesSpec(
    model=ModelSpec(model="smollm2-135m", aliases=("a", "b"), options=ModelOptions(context=4096)),
    replicas=2,
    max_replicas=4,
    cpus=3.0,
    gpus=1.0,
)
PLAIN = ManifestOptions(name="midfill", image="midfill:1", ray_version="2.60.0")
FULL = ManifestOptions(
    name="midfill",
    image="midfill:1",
    ray_version="2.60.0",
    namespace="editors",
    key_secret="keys",
    cache_claim="models",
)


@pytest.fixture(params=[PLAIN, FULL], ids=["plain", "full"])
def manifest(request: pytest.FixtureRequest) -> dict[str, Any]:
    """A manifest, written as YAML and read again."""
    text = to_yaml(ray_service(ENGINES, FrontSpec(), request.param))
    return yaml.safe_load(text)  # type: ignore[no-any-return]


def templates(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of its pods."""
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"] for group in groups]


def applications(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return what Serve is to run."""
    return yaml.safe_load(manifest["spec"]["serveConfigV2"])  # type: ignore[no-any-return]


def test_kuberay_knows_every_field(manifest: dict[str, Any]) -> None:
    jsonschema.validate(manifest, RAY_SERVICE)


def test_kubernetes_knows_every_field_of_the_pods(manifest: dict[str, Any]) -> None:
    for template in templates(manifest):
        metadata = {"name": "pod", **template["metadata"]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own
@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")
def test_serve_knows_every_field_of_the_applications(manifest: dict[str, Any]) -> None:
    from ray.serve.schema import ServeDeploySchema

    ServeDeploySchema.model_validate(applications(manifest))


def test_the_applications_get_what_was_asked_for(manifest: dict[str, Any]) -> None:
    engines, front = applications(manifest)["applications"]
    assert read_spec(engines["args"], EnginesSpec) == ENGINES
    keys = read_spec(front["args"], FrontSpec).key_path
    if manifest["metadata"].get("namespace") is None:
        assert keys is None
    else:
        (mount,) = (
            mount
            for mount in templates(manifest)[0]["spec"]["containers"][0]["volumeMounts"]
            if mount["name"] == "keys"
        )
        assert str(keys) == f"{mount['mountPath']}/api-keys"


def test_each_worker_holds_one_replica(manifest: dict[str, Any]) -> None:
    (group,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    reserved = group["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert reserved["nvidia.com/gpu"] == "1"
    assert float(reserved["cpu"]) == float(group["rayStartParams"]["num-cpus"]) > ENGINES.cpus
    assert (group["minReplicas"], group["maxReplicas"]) == (2, 4)


def test_another_model_means_other_pods() -> None:
    other = EnginesSpec(model=ModelSpec(model="other"), replicas=2, max_replicas=4, cpus=3, gpus=1)
    one, two = (ray_service(each, FrontSpec(), PLAIN) for each in (ENGINES, other))
    assert templates(one) != templates(two)
    assert templates(one) == templates(ray_service(ENGINES, FrontSpec(), PLAIN))


def test_the_container_file_copies_what_there_is_and_runs_what_the_manifest_needs() -> None:
    parser = DockerfileParser(fileobj=io.BytesIO((ROOT / "Containerfile").read_bytes()))
    steps = [(each["instruction"], each["value"]) for each in parser.structure]
    known = {"COMMENT", "FROM", "ARG", "COPY", "RUN", "USER", "WORKDIR", "ENV", "EXPOSE"}
    assert {name for name, _ in steps} <= known | {"HEALTHCHECK", "ENTRYPOINT"}
    assert parser.baseimage.startswith("python:3.")
    for name, value in steps:
        if name == "COPY" and not value.startswith("--from"):
            *sources, target = value.split()
            assert all((ROOT / source).exists() for source in sources)
            assert target.startswith("/opt/midfill")
    pod = templates(ray_service(ENGINES, FrontSpec(), PLAIN))[0]["spec"]
    (cache,) = pod["containers"][0]["env"]
    assert parser.envs[cache["name"]] == cache["value"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert ("USER", "1000") in steps


@pytest.mark.parametrize("key", [None, "", "secret"])
def test_the_container_serves_nobody_without_a_key(tmp_path: Path, key: str | None) -> None:
    parser = DockerfileParser(fileobj=io.BytesIO((ROOT / "Containerfile").read_bytes()))
    (command,) = (each["value"] for each in parser.structure if each["instruction"] == "ENTRYPOINT")
    stand_in = tmp_path / "midfill"
    stand_in.write_text('#!/bin/sh\necho "midfill $*"\n')
    stand_in.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    if key is not None:
        environment["MIDFILL_API_KEY"] = key
    command = [*json.loads(command), "other/model", "--port", "9000"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if key:
        assert done.stdout == "midfill serve --host 0.0.0.0 other/model --port 9000\n"
    else:
        assert done.returncode != 0
        assert not done.stdout
        assert "MIDFILL_API_KEY: other machines can connect: pass --env" in done.stderr
        assert done.stderr.count("\n") == 1
