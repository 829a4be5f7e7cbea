"""What ``midfill cluster``'s commands do: find or start a cluster, then deploy, look or end.

Ray reads its settings when it is imported, so that waits until the cluster is known.
"""

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from midfill.errors import MidfillError
from midfill.serving.cluster.spec import EnginesSpec, FrontSpec
from midfill.serving.server.listening import bind, is_loopback, warn_of_others
from midfill.system.cache import cache_folder
from midfill.system.machine import available_threads
from midfill.system.python_child import python_command, python_environment

_START_SECONDS = 300.0
_ATTEMPTS = 3  # to start: Ray gives itself 30 s, and a machine that is busy may need more
_STOP_SECONDS = 20.0
_TICK_SECONDS = 0.1
_OBJECT_STORE_BYTES = 100 * 2**20  # nothing large goes through it
_TOO_SLOW = "timed out during startup"
_LOOPBACK = "127.0.0.1"
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Who can reach a cluster can run programs on it, as the user that started it.
    "RAY_AUTH_MODE": "token",
    # Its name tells nothing of what it does: Ray's processes then listen on the loopback alone.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}

Report = Callable[[str], None]


class _TooSlowError(MidfillError):
    """Ray has taken longer to start than it gives itself."""


class LocalCluster(msgspec.Struct, frozen=True, kw_only=True):
    """A Ray cluster on this machine alone, started and ended by midfill.

    Its process outlives the command that starts it. A file in midfill's cache folder says which one
    it is, so that later commands find it, and end this cluster rather than any other.

    Attributes:
        address: that Ray's programs connect to; "" while it starts.
        folder: of its logs and sockets.
        token: that its programs have to know.
        process_id: of the process that ends it.
        started: when that began, in the system's clock ticks: another process may get its id.
    """

    address: str
    folder: str
    token: str
    process_id: int
    started: int

    def select(self) -> None:
        """Have this process's Ray connect to this cluster; before Ray is imported."""
        os.environ.update(_ENVIRONMENT | {"RAY_AUTH_TOKEN": self.token})

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return _started(self.process_id) == self.started


def find_local() -> LocalCluster | None:
    """Return the cluster that midfill has started and not ended; None if there is none."""
    try:
        cluster = msgspec.json.decode(_state_file().read_bytes(), type=LocalCluster)
    except (OSError, msgspec.DecodeError):
        return None
    return cluster if cluster.running else None


def start_local(cpus: float) -> LocalCluster:
    """Start a cluster that listens on this machine only.

    Args:
        cpus: how many cores it may hand out.

    Raises:
        MidfillError: it doesn't start.
    """
    for _ in range(_ATTEMPTS - 1):
        with contextlib.suppress(_TooSlowError):
            return _start(cpus)
    return _start(cpus)


def _start(cpus: float) -> LocalCluster:
    """Try to start a cluster once.

    Raises:
        MidfillError: it doesn't start.
    """
    token = secrets.token_hex(32)
    # Short: paths of sockets have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="midfill-ray-"))
    log = folder / "start.log"
    command = python_command(
        "-m", "ray.scripts.scripts", "start", "--head", "--block",
        f"--node-ip-address={_LOOPBACK}", "--port=0", f"--num-cpus={max(1, round(cpus))}",
        f"--object-store-memory={_OBJECT_STORE_BYTES}", "--include-dashboard=false",
        "--disable-usage-stats", f"--temp-dir={folder}",
    )  # fmt: skip
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=python_environment() | _ENVIRONMENT | {"RAY_AUTH_TOKEN": token},
            start_new_session=True,
        )
    cluster = LocalCluster(
        address="",
        folder=str(folder),
        token=token,
        process_id=process.pid,
        started=_started(process.pid) or 0,
    )
    try:
        _write_state(cluster)  # so that it can be ended, should this process be killed meanwhile
        address = _wait_for_address(process, folder, log)
        cluster = msgspec.structs.replace(cluster, address=address)
        _write_state(cluster)
    except BaseException as error:
        _end(process.pid)
        _remove_state()
        if isinstance(error, _TooSlowError):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return cluster


def stop_local(cluster: LocalCluster) -> None:
    """End a cluster, and all that runs on it."""
    if cluster.running:
        _end(cluster.process_id)
    shutil.rmtree(cluster.folder, ignore_errors=True)
    _remove_state()


def _wait_for_address(process: "subprocess.Popen[bytes]", folder: Path, log: Path) -> str:
    """Return what Ray's programs connect to, once the cluster runs.

    Raises:
        MidfillError: it has ended, or takes too long.
    """
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            lines = log.read_text(errors="replace").strip().splitlines() or ["it says nothing"]
            if _TOO_SLOW in lines[-1]:
                raise _TooSlowError("Ray can't start in time; this machine is too busy")
            raise MidfillError(f"Ray can't start: {lines[-1].strip()}; its log is {log}")
        with contextlib.suppress(OSError):
            address = (folder / "ray_current_cluster").read_text().strip()
            if address and b"Ray runtime started" in log.read_bytes():
                return address
        time.sleep(_TICK_SECONDS)
    raise MidfillError(f"Ray has not started in {_START_SECONDS:g} s; its log is {log}")


def _write_state(cluster: LocalCluster) -> None:
    """Keep what later commands need; the token is for this user alone."""
    path = _state_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(msgspec.json.encode(cluster))


def _remove_state() -> None:
    with contextlib.suppress(OSError):
        _state_file().unlink()


def _state_file() -> Path:
    return cache_folder() / "cluster.json"


def _started(process_id: int) -> int | None:
    """Return when a process began, in ticks of the system's clock; None if it is not there."""
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def _end(process_id: int) -> None:
    """End a process in a session of its own, and what is left of that session."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process_id, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < deadline and _started(process_id) is not None:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process_id, os.WNOHANG)
        time.sleep(_TICK_SECONDS)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process_id, signal.SIGKILL)


if TYPE_CHECKING:
    from midfill.serving.cluster.deployment import Overview


def start(
    engines: EnginesSpec,
    front: FrontSpec,
    address: str | None,
    host: str,
    port: int,
    report: Report,
) -> "Overview":
    """Start replicas, on midfill's own cluster on this machine where no other one is named.

    Args:
        engines, front: what to start.
        address: of a Ray cluster; None for midfill's own.
        host, port: where Serve listens, if it doesn't run yet.
        report: called with what is being done.

    Raises:
        MidfillError: something can't start; a cluster that was started for it is ended again.
    """
    engines.model.find()  # whose faults are told before anything starts
    report("connecting")
    found = None if address is not None else find_local()
    _check_started(found)
    started = None
    if address is None and found is None:
        _check_address(host, port, front)
        report("starting Ray on this machine")
        started = start_local(_cpus(engines, front))
    try:
        with _connected(address, found or started):
            from midfill.serving.cluster.deployment import deploy

            return deploy(engines, front, host, port, report)
    except BaseException:
        if started is not None:
            stop_local(started)
        raise


def _check_address(host: str, port: int, front: FrontSpec) -> None:
    """Check that Serve can listen there, and log what that allows others.

    Raises:
        MidfillError: it can't.
    """
    with bind(host, port) as bound:
        if not is_loopback(bound):
            has_keys = bool(front.api_keys) or front.api_key_file is not None
            advice = "put a proxy with TLS in front of it, and listen on 127.0.0.1"
            warn_of_others(host, has_keys=has_keys, has_tls=False, tls_advice=advice)


def look(address: str | None) -> "Overview":
    """Return what runs.

    Raises:
        MidfillError: nothing does.
    """
    cluster = None if address is not None else _local()
    _check_started(cluster)
    with _connected(address, cluster):
        from midfill.serving.cluster.deployment import overview

        return overview()


def stop(address: str | None, report: Report) -> str:
    """End the replicas, and midfill's own cluster; return what was ended.

    Raises:
        MidfillError: there is nothing to end.
    """
    cluster = None if address is not None else _local()
    if cluster is not None and not cluster.address:
        report("ending Ray")
        stop_local(cluster)
        return "the Ray cluster that was starting has ended"
    report("waiting for requests in progress")
    try:
        with _connected(address, cluster):
            from midfill.serving.cluster.deployment import end_serve, remove

            remove()
            if cluster is not None:
                end_serve()
    finally:
        if cluster is not None:
            report("ending Ray")
            stop_local(cluster)
    if cluster is None:
        return f"midfill's replicas at {address} have ended; the Ray cluster goes on"
    return "midfill's replicas and their Ray cluster have ended"


@contextlib.contextmanager
def _connected(address: str | None, cluster: LocalCluster | None) -> Iterator[None]:
    """Connect to one of them for as long as the ``with`` block runs.

    Raises:
        MidfillError: it doesn't answer.
    """
    if cluster is not None:
        cluster.select()
        address = cluster.address
    assert address is not None
    from midfill.serving.cluster.deployment import connected

    with connected(address):
        yield


def _local() -> LocalCluster:
    """Return midfill's own cluster.

    Raises:
        MidfillError: there is none.
    """
    if (cluster := find_local()) is None:
        raise MidfillError(
            "midfill has started no cluster on this machine; start one with 'midfill cluster up',"
            " or name yours with --address"
        )
    return cluster


def _check_started(cluster: LocalCluster | None) -> None:
    """Check that midfill's own cluster, if there is one, can be connected to.

    Raises:
        MidfillError: it is starting.
    """
    if cluster is not None and not cluster.address:
        raise MidfillError(
            "midfill's cluster on this machine is still starting; wait a moment, or end it, if what"
            " started it was interrupted, with 'midfill cluster down'"
        )


def _cpus(engines: EnginesSpec, front: FrontSpec) -> float:
    """Return how many cores a cluster for this may hand out: enough, if need be in name only."""
    replicas = max(engines.replicas, engines.max_replicas)
    # A change of the model has both generations for a while.
    return max(available_threads(), 2 * (replicas * engines.cpus + front.replicas * front.cpus))
