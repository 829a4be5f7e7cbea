"""API keys: who may send requests, whose cache they use, and servers that need none."""

import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer, start

from midfill.config import ServeOptions
from midfill.errors import MidfillError
from midfill.server.key_file import add_key
from midfill.server.run import run_server

KEYS = ("first key", "second key", "Schlüssel")


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys"


@pytest.fixture(scope="module")
def named_key(key_file: Path) -> str:
    return add_key(key_file, "alice")


@pytest.fixture(scope="module")
def server(tiny_folder: Path, key_file: Path, named_key: str) -> Iterator[RunningServer]:
    options = [word for key in KEYS for word in ("--api-key", key)]
    options += ["--api-key-file", str(key_file)]
    with start(tiny_folder, "--kv-memory", "4MB", *options) as server:
        yield server


@pytest.mark.parametrize(
    "value", [None, "Bearer wrong", "first key", "Bearer", "Basic first key", "Bearer first"]
)
def test_requests_without_a_valid_key_are_refused(server: RunningServer, value: str | None) -> None:
    headers = {} if value is None else {"authorization": value}
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = server.post(path, {"prompt": "a"}, headers=headers)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("key", KEYS)
def test_each_key_is_valid(server: RunningServer, key: str) -> None:
    headers = {"authorization": f"bearer {key}".encode()}
    body = {"prompt": "a", "max_tokens": 1}
    assert server.post("/v1/completions", body, headers=headers).status_code == 200


def test_all_endpoints_need_a_key_but_health_and_metrics(server: RunningServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    endpoints = [(method, path) for path, methods in paths.items() for method in methods]
    assert len(endpoints) > 15
    for method, path in endpoints:
        status = server.client.request(method, server.url + path).status_code
        assert status == (200 if path in ("/health", "/metrics") else 401), (method, path)


def test_the_log_names_tenants_and_never_keys(server: RunningServer) -> None:
    for key in KEYS:
        headers = {"authorization": f"Bearer {key}".encode()}
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
    server.post("/v1/completions", {}, headers={"authorization": "Bearer guessed"})
    server.wait_for(lambda: any(" 401 " in line for line in server.log))
    log = "\n".join(server.log)
    assert re.search(r"INFO POST /v1/completions 200 request_id=\w+ tenant=key-1 model=tiny", log)
    assert "tenant=key-3" in log
    assert re.search(r"POST /v1/completions 401 request_id=\w+ duration_seconds=\S+ error=inv", log)
    assert not any(key in log for key in (*KEYS, "guessed"))


def test_metrics_tell_tenants_apart(server: RunningServer) -> None:
    def numbers(name: str, **labels: str) -> dict[str, float]:
        found = [
            (sample.labels["tenant"], sample.value)
            for family in text_string_to_metric_families(server.get("/metrics").text)
            for sample in family.samples
            if sample.name == f"midfill:{name}" and labels.items() <= sample.labels.items()
        ]
        return dict(found)

    names = (
        "prompt_tokens_total",
        "generation_tokens_total",
        "request_generation_tokens_sum",
        "time_to_first_token_seconds_count",
        "request_queue_time_seconds_count",
    )
    before = {name: numbers(name) for name in names}
    refused = numbers("http_requests_total", status="401")
    assert all({"key-1", "key-2", "key-3", "alice"} <= set(values) for values in before.values())
    for number in range(2):
        body = {"prompt": f"{number} of the second", "max_tokens": 3, "ignore_eos": True}
        headers = {"authorization": "Bearer second key"}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
    server.post("/v1/completions", {})
    server.wait_for(
        lambda: numbers(names[1])["key-2"] - before[names[1]]["key-2"] == 6
    )  # the engine's numbers come a little later
    after = {name: numbers(name) for name in names}
    grown = [after[name]["key-2"] - before[name]["key-2"] for name in names]
    assert grown[0] > 10
    assert grown[1:] == [6, 6, 2, 2]
    for name in names:
        assert {**after[name], "key-2": 0} == {**before[name], "key-2": 0}
    server.wait_for(
        lambda: numbers("http_requests_total", status="401").get("") == refused.get("", 0) + 1
    )
    assert numbers("http_requests_total", status="200")["key-2"] >= 2


def test_keys_of_a_file_come_and_go_while_the_server_runs(
    server: RunningServer, key_file: Path, named_key: str
) -> None:
    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "a", "max_tokens": 1}
        return server.post("/v1/completions", body, headers=headers).status_code

    assert status(named_key) == 200
    new = add_key(key_file, "bob")
    assert status(new) == 401
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: status(new) == 200)
    server.wait_for(lambda: "tenant=bob" in "\n".join(server.log))
    key_file.write_text("nonsense\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: "the API keys stay as they were" in "\n".join(server.log))
    assert status(named_key) == status(new) == status("first key") == 200
    assert named_key not in "\n".join(server.log)


def test_refusals_have_the_shape_of_the_path(server: RunningServer) -> None:
    def error(path: str) -> object:
        return server.post(path, {}).json()["error"]

    message = "a valid API key is needed: Authorization: Bearer KEY"
    assert error("/api/generate") == message
    assert error("/infill") == {"code": 401, "message": message, "type": "authentication_error"}


def test_each_key_has_its_own_cache(server: RunningServer) -> None:
    def cached_tokens(key: str) -> int:
        answer = server.openai(key).completions.create(
            model="tiny-llama", prompt="secret " * 20, max_tokens=1
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert cached_tokens("first key") == 0
    assert cached_tokens("first key") > 50
    assert cached_tokens("second key") == 0


@pytest.mark.parametrize("key", ["", " ", "\t", " key", "key ", "two\nlines"])
def test_keys_that_are_empty_or_cant_be_sent_are_refused(key: str) -> None:
    with pytest.raises(MidfillError, match="API key"):
        ServeOptions(model="none", api_keys=("good", key))


@pytest.mark.parametrize(
    ("host", "keys", "warned"),
    [
        ("0.0.0.0", (), True),
        ("0.0.0.0", ("key",), False),
        ("127.0.0.1", (), False),
        ("localhost", (), False),
    ],
)
def test_a_server_without_keys_that_others_can_reach_logs_a_warning(
    tmp_path: Path, host: str, keys: tuple[str, ...], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    options = ServeOptions(model="none", host=host, port=0, api_keys=keys)
    with pytest.raises(MidfillError):  # there is no model, which is found after binding the address
        run_server(options, tmp_path / "none")
    assert ("needs no API key" in caplog.text) is warned
