"""A cluster for a benchmark: ``midfill cluster`` in processes of its own, apart from the user's."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from midfill.errors import MidfillError
from midfill.system.cache import cache_folder


@dataclass(frozen=True, slots=True)
class BenchCluster:
    """Replicas that run.

    Attributes:
        environment: of the commands that look at it.
    """

    environment: dict[str, str]

    def run(self, *arguments: str) -> str:
        """Run ``midfill cluster`` with these arguments, and return what it writes.

        Raises:
            MidfillError: it fails.
        """
        done = subprocess.run(
            [sys.executable, "-m", "midfill", "cluster", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["it says nothing"]
            raise MidfillError(f"'midfill cluster {arguments[0]}' has failed: {lines[-1]}")
        return done.stdout

    def status(self) -> dict[str, Any]:
        """Return what ``midfill cluster status --json`` tells."""
        return dict(json.loads(self.run("status", "--json")))


@contextlib.contextmanager
def bench_cluster(model: str, *options: str) -> Iterator[tuple[BenchCluster, str]]:
    """Start replicas, and yield them and their URL; they end with the ``with`` block.

    Args:
        model: what they run.
        options: further options of ``midfill cluster up``.

    Raises:
        MidfillError: they don't start.
    """
    with tempfile.TemporaryDirectory(prefix="midfill-bench-") as folder:
        # The user's models and compiled kernels, but not the user's own cluster.
        for entry in cache_folder().iterdir():
            if entry.is_dir():
                (Path(folder) / entry.name).symlink_to(entry.resolve())
        environment = {**os.environ, "MIDFILL_CACHE": folder}
        environment.pop("RAY_ADDRESS", None)
        cluster = BenchCluster(environment)
        try:
            cluster.run("up", model, "--port", "0", *options)
            yield cluster, str(cluster.status()["url"])
        finally:
            with contextlib.suppress(MidfillError):
                cluster.run("down")
