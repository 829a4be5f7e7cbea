"""Processes in tests: signal handling of their own, and waiting for what they do."""

import os
import random
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def default_interrupt() -> None:
    """Let SIGINT end the calling process, even if its parent ignores it as under nohup.

    For ``preexec_fn`` of ``subprocess.Popen``: an ignored signal stays ignored in children.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def ignored_interrupt() -> None:
    """Ignore SIGINT in the calling process, as a shell does for commands in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def is_running(process_id: int) -> bool:
    """Return whether a process exists and has not ended."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


@contextmanager
def stopped(process_id: int) -> Iterator[None]:
    """Stop a process in the block; it goes on where it was."""
    os.kill(process_id, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process_id, signal.SIGCONT)


def bound_socket(port: int = 0) -> socket.socket:
    """Return a socket that has a port of the loopback interface, and refuses connections.

    The port is nobody else's as long as it is open. It may listen later.
    """
    opened = socket.socket()
    opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # others may have just left
    opened.bind(("127.0.0.1", port))
    return opened


def lasting_port() -> int:
    """Return a port that programs can have one after the other: none is given it unasked."""
    unasked = Path("/proc/sys/net/ipv4/ip_local_port_range")
    end = int(unasked.read_text().split()[0]) if unasked.exists() else 32768
    while True:
        port = random.SystemRandom().randrange(end - 10_000, end)
        try:
            bound_socket(port).close()
        except OSError:
            continue
        return port


def wait_for(condition: Callable[[], bool], seconds: float = 60) -> None:
    """Wait until a condition holds; fail if it does not within ``seconds``."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise AssertionError(f"the condition did not hold within {seconds:g} s")
        time.sleep(0.02)
