"""Editor plugins' own requests, replayed; each answer is read as its plugin reads it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

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


def test_three_equal_requests_at_once_compute_their_prompt_once(server: RunningServer) -> None:
    (minuet,) = (one for one in CLIENT_REQUESTS if one.client == "minuet-ai openai_fim_compatible")
    text = "".join(f"amount_{number} = {number}\n" for number in range(12))
    one = replace(minuet, body={**minuet.body, "prompt": text})

    def count(what: str) -> float:
        return server.metric(f"prefix_cache_{what}_total")

    queries, hits = count("queries"), count("hits")
    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(lambda _: replay(server, one), range(3)))
    prompt = (count("queries") - queries) / 3
    assert prompt > 100
    computed = prompt * 3 - (count("hits") - hits)
    # Whenever the others arrive, they compute the prompt's last token, from which they go on.
    assert computed <= prompt + 2
