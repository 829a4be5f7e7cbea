"""Replicas on a Ray cluster of their own: ``midfill cluster``, as users run it."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from slowed_engines import slowed

_GUARD = 'read -r _; exec "$0" -m midfill cluster down'
"""Ends the cluster once its input ends: at the end of the block, or when the tests are killed."""


@dataclass
class RunningCluster:
    """Replicas that have reported ready, and a folder that says where."""

    environment: dict[str, str]
    url: str = ""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run ``midfill cluster`` with these arguments."""
        return subprocess.run(
            [sys.executable, "-m", "midfill", "cluster", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )

    def up(self, model: Path | str, *options: str) -> None:
        """Start replicas of a model, or change to it."""
        done = self.run("up", str(model), *options)
        assert done.returncode == 0, done.stderr
        self.url = self.status()["url"]

    def status(self) -> dict[str, Any]:
        """Return what ``midfill cluster status --json`` tells."""
        done = self.run("status", "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    def complete(self, **body: object) -> dict[str, Any]:
        """Return the response of a completion that must succeed."""
        response = self.client.post(f"{self.url}/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]


@contextlib.contextmanager
def start_cluster(
    folder: Path, model: Path, *options: str, step_seconds: float = 0.0
) -> Iterator[RunningCluster]:
    """Start replicas, and end them with the block.

    Args:
        folder: where midfill keeps which cluster it has started.
        model: what they run.
        options: further options of ``midfill cluster up``.
        step_seconds: minimum time that each step of their engines takes.

    Without Ray the test that asks for them is skipped.
    """
    if find_spec("ray") is None:  # importing it would change this process's environment
        pytest.skip("Ray is not installed (the extra 'cluster')")
    users = Path(os.environ["MIDFILL_CACHE"])
    for name in ("kernels", "models"):
        (folder / name).symlink_to(users / name)
    environment = {**os.environ, "MIDFILL_CACHE": str(folder), "OMP_NUM_THREADS": "1"}
    cluster = RunningCluster(slowed(environment, step_seconds))
    cluster.environment.pop("RAY_ADDRESS", None)
    guard = subprocess.Popen(
        ["sh", "-c", _GUARD, sys.executable],
        env=cluster.environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    with cluster.client, guard:
        cluster.up(model, "--port", "0", *options)
        yield cluster
