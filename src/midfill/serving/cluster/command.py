"""What ``midfill cluster``'s commands do: find or start a cluster, then deploy, look or end.

Ray reads its settings when it is imported, so that waits until the cluster is known.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from midfill.errors import MidfillError
from midfill.serving.cluster.local import LocalCluster, find_local, start_local, stop_local
from midfill.serving.cluster.spec import EnginesSpec, FrontSpec
from midfill.system.machine import available_threads

if TYPE_CHECKING:
    from midfill.serving.cluster.deployment import Overview

Report = Callable[[str], None]


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
        _check_port(host, port)
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


def _check_port(host: str, port: int) -> None:
    """Check that Serve could listen.

    Raises:
        MidfillError: it couldn't.
    """
    try:
        with socket.create_server((host, port)):
            pass
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise MidfillError(
            f"can't listen on {host}:{port} ({reason}); choose another --host or --port"
        ) from None
