"""``midfill cluster`` where it can't do what it is asked; no cluster is started."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("ray") is None, reason="Ray is not installed (the extra 'cluster')"
)

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def cluster(tmp_path: Path) -> Run:
    """Runs ``midfill cluster`` with these arguments, as a user who has started none."""
    environment = {**os.environ, "MIDFILL_CACHE": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)

    def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "midfill", "cluster", *map(str, arguments)]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    return run


def last_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return what a command that has failed says last."""
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    return done.stderr.strip().splitlines()[-1]


def test_a_port_that_is_taken_is_named_before_anything_starts(
    cluster: Run, tiny_folder: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = last_line(cluster("up", tiny_folder, "--port", port))
    assert said.startswith(f"midfill: can't listen on 127.0.0.1:{port} (")
    assert "--port" in said


def test_a_model_that_is_not_there_is_named_before_anything_starts(cluster: Run) -> None:
    said = last_line(cluster("up", "/no-such-model", "--port", 0))
    assert "/no-such-model" in said


@pytest.mark.parametrize("command", ["status", "down"])
def test_without_a_cluster_the_way_to_one_is_told(cluster: Run, command: str) -> None:
    assert "midfill cluster up" in last_line(cluster(command))


@pytest.mark.parametrize(
    ("address", "reason"), [("127.0.0.1:1", "refused"), ("somewhere", "HOST:PORT")]
)
def test_an_address_where_nothing_answers_is_told_at_once(
    cluster: Run, address: str, reason: str
) -> None:
    said = last_line(cluster("status", "--address", address))
    assert said.startswith(f"midfill: no Ray cluster answers at {address} (")
    assert reason in said


def test_more_replicas_at_least_than_at_most_are_refused(cluster: Run, tiny_folder: Path) -> None:
    done = cluster("up", tiny_folder, "--replicas", 3, "--max-replicas", 2)
    assert done.returncode == 2
    assert "--max-replicas" in done.stderr
