"""Editor plugins' own requests, replayed; each answer is read as its plugin reads it."""

import pytest
from client_requests import CLIENT_REQUESTS, ClientRequest
from running_server import RunningServer

WARM_UPS = [one for one in CLIENT_REQUESTS if "warms" in one.client]
ASKING = [one for one in CLIENT_REQUESTS if one not in WARM_UPS]


def replay(server: RunningServer, one: ClientRequest) -> str:
    response = server.post(one.path, one.body, headers=one.headers)
    assert response.status_code == 200, response.text
    return one.read(response.text)


@pytest.mark.parametrize("one", ASKING, ids=lambda one: one.client)
def test_a_plugin_finds_a_completion(server: RunningServer, one: ClientRequest) -> None:
    assert replay(server, one).strip()


@pytest.mark.parametrize("one", WARM_UPS, ids=lambda one: one.client)
def test_a_plugin_may_warm_up(server: RunningServer, one: ClientRequest) -> None:
    assert replay(server, one) in ("", "{}")
