"""What ``midfill cluster`` does on a Ray cluster: deploy replicas, look at them, end them."""

import contextlib
import ipaddress
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import ray
from ray import serve
from ray.serve import Application

from midfill.errors import MidfillError
from midfill.serving.cluster.messages import ReplicaNumbers
from midfill.serving.cluster.spec import (
    ENGINE,
    FRONT_APP,
    EnginesSpec,
    FrontSpec,
    engines_app,
    generation_of,
)
from midfill.system.python_child import in_library_folder

_TICK_SECONDS = 0.5
_CONNECT_SECONDS = 15.0
_ADOPT_SECONDS = 300.0
_OWN_ERROR = re.compile(r"^(?:ray\.\S+: )?midfill\.errors\.\w+: (.+)$", re.MULTILINE)
_LAST_ERROR = re.compile(r"^(?:\w+\.)*\w*(?:Error|Exception): .+$", re.MULTILINE)

Report = Callable[[str], None]


class Overview(msgspec.Struct, frozen=True):
    """What runs on a cluster.

    Attributes:
        model: what clients call it.
        generation: of its engines.
        resumed: requests that went on at another replica.
        moved: prompts whose KV was fetched from another replica.
        states: how many replicas are in which of Serve's states.
        replicas: their numbers, by name.
        url: where clients connect; None if that is Serve's own affair.
    """

    model: str
    generation: int
    resumed: int
    moved: int
    states: dict[str, int]
    replicas: dict[str, ReplicaNumbers]
    url: str | None


@contextlib.contextmanager
def connected(address: str) -> Iterator[None]:
    """Connect to a Ray cluster for as long as the ``with`` block runs.

    Raises:
        MidfillError: nothing answers at the address.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        _check_address(address)
        with in_library_folder():  # its workers import from the folder that it is called in
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (getattr(error, "strerror", None) or str(error)).strip().partition("\n")[0]
        raise MidfillError(
            f"no Ray cluster answers at {address} ({reason}); start one with 'ray start --head',"
            " or leave --address out to have midfill start one on this machine"
        ) from None
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    try:
        yield
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Check that something listens there; Ray itself would try for minutes.

    Raises:
        OSError: nothing does.
        ValueError: it is no address.
    """
    if address in ("auto", "local"):
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("an address is HOST:PORT")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_SECONDS):
        pass


def free_port(host: str) -> int:
    """Return a port that nothing listens on, for Serve, which can't choose one."""
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def deploy(
    engines: EnginesSpec, front: FrontSpec, host: str, port: int, report: Report
) -> Overview:
    """Start engines, have the server use them, and end older ones.

    Args:
        engines: what to start.
        front: the server; started anew if it differs from the one that runs.
        host, port: where Serve listens, if it doesn't run yet.
        report: called with what is being waited for.

    Raises:
        MidfillError: something can't start. What ran before still does.
    """
    from midfill.serving.cluster import applications  # the whole engine, which looking needs not

    _check_capacity(engines, front)
    serve.start(
        proxy_location="EveryNode", http_options={"host": host, "port": port or free_port(host)}
    )
    front = _with_own_hosts(front)
    old = _generations()
    number = max(old, default=0) + 1
    _run(applications.engines(_plain(engines)), engines_app(number), None, report)
    try:
        if not _front_runs_with(front):
            _run(applications.front(_plain(front)), FRONT_APP, "/", report)
        _wait_until_used(number, front.replicas, report)
    except BaseException:
        if not _is_used(number):
            serve.delete(engines_app(number))
        raise
    for each in old:
        report(f"ending {engines_app(each)}")
        serve.delete(engines_app(each))
    return overview()


def overview() -> Overview:
    """Return what runs.

    Raises:
        MidfillError: nothing of midfill does.
    """
    front = _ask_front()
    status = serve.status().applications.get(engines_app(front["generation"]))
    states: dict[str, int] = {}
    if status is not None:
        states = {str(k): v for k, v in status.deployments[ENGINE].replica_states.items()}
    return msgspec.convert(front | {"states": states, "url": _url()}, Overview)


def remove() -> None:
    """End midfill's applications; requests in progress end first. Others are left alone."""
    for name in (FRONT_APP, *map(engines_app, _generations())):
        if name in serve.status().applications:
            serve.delete(name)


def end_serve() -> None:
    """End Serve with all that it runs: Ray ends at once afterwards, and takes long otherwise."""
    serve.shutdown()


def _run(app: Application, name: str, route: str | None, report: Report) -> None:
    """Start an application and wait until it runs.

    Raises:
        MidfillError: it doesn't start; it is removed again, unless an older one runs by this name.
    """
    is_new, reported = name not in serve.status().applications, ""
    try:
        serve.run_many(
            [serve.RunTarget(app, name=name, route_prefix=route)],
            wait_for_applications_running=False,
        )
        while True:
            status = serve.status().applications[name]
            if status.status == "RUNNING":
                return
            if status.status == "DEPLOY_FAILED":
                raise MidfillError(f"{name} can't start: {_reason(status)}")
            if reported != (reported := f"starting {name}: {_progress(status)}"):
                report(reported)
            time.sleep(_TICK_SECONDS)
    except BaseException:
        if is_new:
            serve.delete(name)
        raise


def _progress(status: Any) -> str:
    """Return how many replicas are in which state."""
    counts: dict[str, int] = {}
    for deployment in status.deployments.values():
        for state, count in deployment.replica_states.items():
            counts[str(state)] = counts.get(str(state), 0) + count
    parts = [f"{count} {getattr(state, 'value', state).lower()}" for state, count in counts.items()]
    return ", ".join(parts) or "waiting for the cluster"


def _reason(status: Any) -> str:
    """Return why an application has failed, in one line."""
    texts = [status.message, *(each.message for each in status.deployments.values())]
    for pattern in (_OWN_ERROR, _LAST_ERROR):
        for text in texts:
            if found := pattern.findall(text):
                if "No module named 'midfill" in found[-1]:
                    return "the cluster's machines have no midfill; install this version there"
                return str(found[-1]).strip()
    return " ".join(" ".join(texts).split())[:500]


def _check_capacity(engines: EnginesSpec, front: FrontSpec) -> None:
    """Check that the cluster's machines could hold the replicas, if nothing else ran.

    Raises:
        MidfillError: they couldn't.
    """
    total = ray.cluster_resources()
    wanted = {
        "CPU": engines.cpus * engines.replicas + front.cpus * front.replicas,
        "GPU": engines.gpus * engines.replicas,
    }
    for name, amount in wanted.items():
        if amount > total.get(name, 0.0):
            raise MidfillError(
                f"the replicas reserve {amount:g} {name}s and the cluster has"
                f" {total.get(name, 0.0):g}; start fewer (--replicas) or smaller ones"
                f" (--{name.lower()}s-per-replica)"
            )


def _front_runs_with(spec: FrontSpec) -> bool:
    """Whether the server runs, with this spec."""
    if FRONT_APP not in serve.status().applications:
        return False
    try:
        return bool(_ask_front()["spec"] == _plain(spec))
    except MidfillError:
        return False


def _wait_until_used(number: int, fronts: int, report: Report) -> None:
    """Wait until each server sends its requests to a generation.

    Raises:
        MidfillError: they don't.
    """
    report("waiting until requests go to the new replicas")
    deadline = time.monotonic() + _ADOPT_SECONDS
    agreed = 0
    while agreed < 4 * fronts:  # Serve asks any of them
        if _is_used(number):
            agreed += 1
            continue
        agreed = 0
        if time.monotonic() > deadline:
            raise MidfillError("the server doesn't use the new replicas; its log in Ray says why")
        time.sleep(_TICK_SECONDS)


def _is_used(number: int) -> bool:
    """Whether requests go to a generation."""
    try:
        return bool(_ask_front()["generation"] == number)
    except MidfillError:
        return False


def _ask_front() -> dict[str, Any]:
    """Return what the server says of itself and the replicas.

    Raises:
        MidfillError: there is none, or it doesn't answer.
    """
    if FRONT_APP not in serve.status().applications:
        raise MidfillError("nothing of midfill runs on this cluster; start it: midfill cluster up")
    try:
        handle = serve.get_app_handle(FRONT_APP)
        return dict(handle.overview.remote().result(timeout_s=_CONNECT_SECONDS))
    except TimeoutError:
        raise MidfillError("midfill's server doesn't answer; it may be starting anew") from None


def _generations() -> list[int]:
    found = map(generation_of, serve.status().applications)
    return [number for number in found if number is not None]


def _with_own_hosts(front: FrontSpec) -> FrontSpec:
    """Return the server's spec with the names that it answers under, see ``FrontSpec``."""
    options = _http_options()
    if options is None or not _is_loopback(options.host):
        return msgspec.structs.replace(front, own_hosts=None)
    return msgspec.structs.replace(front, own_hosts=(options.host, *(front.own_hosts or ())))


def _is_loopback(host: str) -> bool:
    """Whether only this machine can connect to what listens there."""
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return host == "::1"


def _http_options() -> Any:
    """Return Serve's options of where it listens; None if they can't be told."""
    try:
        from ray.serve.context import _get_global_client

        return _get_global_client().http_config
    except (ImportError, AttributeError):  # no public interface tells
        return None


def _url() -> str | None:
    """Return where Serve listens on this machine."""
    if (options := _http_options()) is None:
        return None
    host = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    return f"http://{host}:{options.port}"


def _plain(spec: msgspec.Struct) -> dict[str, Any]:
    return dict(msgspec.to_builtins(spec))
