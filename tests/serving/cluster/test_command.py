"""The file that says which cluster midfill has started."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import wait_for

from midfill.errors import MidfillError
from midfill.serving.cluster import command
from midfill.serving.cluster.command import find_local, start, stop
from midfill.serving.cluster.spec import EnginesSpec, FrontSpec, ModelSpec

_STARTS = """
import sys
from midfill.serving.cluster import command
sys.executable = sys.argv[1]
command.start_local(1)
"""


@pytest.fixture
def slow_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that was starting a cluster, and is killed before that has started."""
    monkeypatch.setenv("MIDFILL_CACHE", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ray = tmp_path / "python"
    ray.write_text("#!/bin/sh\nexec sleep 600\n")
    ray.chmod(0o700)
    starting = subprocess.Popen([sys.executable, "-c", _STARTS, str(ray)])
    try:
        wait_for(lambda: find_local() is not None, 60)
        yield
    finally:
        if starting.poll() is None:
            os.kill(starting.pid, signal.SIGKILL)
        starting.wait()
        if (cluster := find_local()) is not None:
            command.stop_local(cluster)


@pytest.mark.usefixtures("slow_start")
def test_a_start_that_was_killed_is_known_and_can_be_ended(tiny_folder: Path) -> None:
    cluster = find_local()
    assert cluster is not None
    assert cluster.address == ""
    engines = EnginesSpec(model=ModelSpec(model=str(tiny_folder)))
    with pytest.raises(MidfillError, match="still starting"):
        start(engines, FrontSpec(), None, "127.0.0.1", 0, lambda _: None)
    assert "has ended" in stop(None, lambda _: None)
    assert find_local() is None
    assert not cluster.running
    assert not Path(cluster.folder).exists()


@pytest.mark.parametrize(
    ("host", "keys", "warnings"),
    [("127.0.0.1", (), 0), ("0.0.0.0", (), 2), ("0.0.0.0", ("a-key",), 1)],
)
def test_who_lets_others_in_is_warned(
    tiny_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    host: str,
    keys: tuple[str, ...],
    warnings: int,
) -> None:
    def go_no_further(cpus: float) -> None:
        raise MidfillError("that's enough")

    monkeypatch.setattr(command, "start_local", go_no_further)
    monkeypatch.setattr(command, "find_local", lambda: None)
    engines = EnginesSpec(model=ModelSpec(model=str(tiny_folder)))
    with pytest.raises(MidfillError, match="enough"):
        start(engines, FrontSpec(api_keys=keys), None, host, 0, lambda _: None)
    said = [record.getMessage() for record in caplog.records if "0.0.0.0" in record.getMessage()]
    assert len(said) == warnings
