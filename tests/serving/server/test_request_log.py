"""Request ids and the log: each request has an id, and a line in the log when it is finished."""

import re

import pytest
from running_server import RunningServer

SECRET = "nobody should read this"


def headers(request_id: str) -> dict[str, str]:
    return {"x-request-id": request_id}


@pytest.mark.parametrize("request_id", ["a", '4f-1/"x"', "x" * 128])
def test_a_clients_id_is_kept(server: RunningServer, request_id: str) -> None:
    response = server.client.get(f"{server.url}/v1/models", headers=headers(request_id))
    assert response.headers.get_list("x-request-id") == [request_id]


@pytest.mark.parametrize("request_id", ["", "x" * 129, "two words", "caf\u00e9", "a\tb"])
def test_an_id_that_is_no_good_is_replaced(server: RunningServer, request_id: str) -> None:
    given = {"x-request-id": request_id.encode()}
    response = server.client.get(f"{server.url}/v1/models", headers=given)  # type: ignore[arg-type]
    assert re.fullmatch("[0-9a-f]{32}", response.headers["x-request-id"])


def test_requests_without_an_id_get_different_ones(server: RunningServer) -> None:
    ids = {server.get("/health").headers["x-request-id"] for _ in range(3)}
    assert len(ids) == 3


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 1, "stream": True}, 200),
        ("/api/generate", {"model": "tiny-llama", "prompt": "a", "suffix": ""}, 200),
        ("/v1/completions", {"prompt": 5.5}, 400),
        ("/infill", {}, 400),
        ("/nothing", {}, 404),
    ],
)
def test_streams_and_errors_have_the_id_too(
    server: RunningServer, path: str, body: dict[str, object], status: int
) -> None:
    response = server.post(path, body, headers=headers("mine"))
    assert (response.status_code, response.headers["x-request-id"]) == (status, "mine")


@pytest.mark.parametrize("stream", [False, True])
def test_a_finished_request_is_a_line(server: RunningServer, stream: bool) -> None:
    for number in range(2):
        body = {
            "prompt": f"{SECRET} {stream}", "suffix": SECRET, "max_tokens": 4, "temperature": 0,
            "stream": stream, "stop": [SECRET], "midfill": {"document": SECRET},
        }  # fmt: skip
        name = f"line-{stream}-{number}"
        response = server.post("/v1/completions", body, headers=headers(name))
        assert response.status_code == 200
        line = server.logged(name)
    assert {name: line[name] for name in ("level", "message", "method", "path", "status")} == {
        "level": "INFO",
        "message": "POST /v1/completions 200",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
    }
    assert line["model"] == "tiny-llama"
    assert line["completion_tokens"] == 4
    assert line["finish_reason"] == "length"
    assert 0 < line["cached_tokens"] < line["prompt_tokens"]
    assert 0 < line["queue_seconds"] < line["ttft_seconds"] < line["duration_seconds"]
    assert "tenant" not in line
    assert not any(SECRET in line for line in server.log)


def test_answers_that_end_differently_have_all_reasons(server: RunningServer) -> None:
    body = {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "temperature": 0}
    server.post("/v1/completions", body, headers=headers("many"))
    line = server.logged("many")
    assert line["finish_reason"] == "length"
    assert line["completion_tokens"] == 12


def test_an_error_is_told_by_its_code(server: RunningServer) -> None:
    body = {"prompt": SECRET * 100, "max_tokens": 1}
    assert server.post("/v1/completions", body, headers=headers("long")).status_code == 400
    line = server.logged("long")
    assert (line["status"], line["error"]) == (400, "context_length_exceeded")
    server.post("/v1/completions", {"model": SECRET, "prompt": ""}, headers=headers("model"))
    assert server.logged("model")["error"] == "model_not_found"
    assert not any(SECRET in line for line in server.log)


def test_a_path_cant_forge_a_line(server: RunningServer) -> None:
    server.client.get(f"{server.url}/a%0A{'b' * 300}", headers=headers("forged"))
    line = server.logged("forged")
    assert line["path"].startswith(r"/a\nbbb")
    assert len(line["path"]) < 250


def test_what_monitoring_asks_is_not_logged(server: RunningServer) -> None:
    for path in ("/health", "/metrics", "/", "/dashboard", "/pages/icon.svg"):
        server.client.get(server.url + path, headers=headers("routine"))
    server.client.get(f"{server.url}/pages/none", headers=headers("missing"))
    assert server.logged("missing")["status"] == 404
    assert not any("routine" in line for line in server.log)
