"""Servers for their own machine answer under its names only, whatever a page's name points to."""

import socket

import pytest
from running_server import RunningServer

from midfill.serving.server.key_ring import KeyRing
from midfill.serving.server.listening import bind, own_hosts
from midfill.serving.server.own_hosts import OwnHosts


async def nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    "host",
    [
        "", "localhost", "LOCALHOST:8080", "localhost.:80", "midfill.localhost", "127.0.0.1",
        "127.0.0.1:8080", "[::1]", "[::1]:8080", "192.168.1.5:80", socket.gethostname(),
        "proxy.example.org", "Proxy.Example.org:443",
    ],
)  # fmt: skip
def test_names_of_the_machine_and_allowed_ones_are_answered(host: str) -> None:
    assert OwnHosts(nothing, ["proxy.example.org"]).is_own(host)


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example",
        "notlocalhost", "127.1.evil", "[evil]", "evil.example:", "::1.evil", "a b", "\xff",
    ],
)  # fmt: skip
def test_others_are_not(host: str) -> None:
    assert not OwnHosts(nothing, ["proxy.example.org"]).is_own(host)


@pytest.mark.parametrize(
    ("address", "keys", "checked"),
    [
        ("127.0.0.1", (), True),
        ("localhost", (), True),
        ("127.0.0.1", ("key",), False),
        ("0.0.0.0", (), False),
    ],
)
def test_only_servers_without_keys_on_loopback_care(
    address: str, keys: tuple[str, ...], checked: bool
) -> None:
    with bind(address, 0) as listener:
        found = own_hosts(listener, address, KeyRing(keys), ["proxy"])
    assert found == ((address, "proxy") if checked else None)


def test_a_page_whose_name_points_here_gets_nothing(server: RunningServer) -> None:
    for method, path in (("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/")):
        headers = {"host": "evil.example:8080"}
        answer = server.client.request(
            method, server.url + path, json={"prompt": "a"}, headers=headers
        )
        assert answer.status_code == 421
        assert answer.json()["error"]["code"] == "misdirected_request"
    port = server.url.rpartition(":")[2]
    headers = {"host": f"localhost:{port}"}
    assert server.client.get(f"{server.url}/health", headers=headers).status_code == 200
