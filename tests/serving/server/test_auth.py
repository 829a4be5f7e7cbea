"""API keys: who may send requests, whose cache they use, and servers that need none."""

import asyncio
import base64
import concurrent.futures
import re
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from running_server import RunningServer, start

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.errors import MidfillError, RateLimitError
from midfill.frontend.prompt_encoder import PromptEncoder, fim_format
from midfill.models.checkpoints.opening import open_model
from midfill.serving.options import ServeOptions
from midfill.serving.server.app import create_app
from midfill.serving.server.auth import GUESS_SECONDS, MAX_GUESSES, KeyGuesses, KeyRing
from midfill.serving.server.key_file import add_key, key_digest, remove_keys, set_limits
from midfill.serving.server.limits import NO_LIMITS, TenantLimits
from midfill.serving.server.service import ModelService
from midfill.serving.server.startup import run_server

KEYS = ("first key", "second key", "voilà")  # in UTF-8 the last one ends like a blank


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
    # Steps as slow as a larger model's: an answer of some hundred tokens goes on for seconds.
    with start(tiny_folder, "--kv-memory", "4MB", *options, step_seconds=0.01) as server:
        yield server


@pytest.fixture
def own_keys(server: RunningServer, key_file: Path) -> Iterator[Path]:
    """The file of keys, for a test that changes it."""
    before = key_file.read_text()
    yield key_file
    key_file.write_text(before)
    read_again(server)


def read_again(server: RunningServer, text: str = "API keys are valid now") -> None:
    """Have the server read its file of keys; return when it has logged that."""

    def count() -> int:
        return sum(text in line for line in server.log)

    reads = count()
    server.process.send_signal(signal.SIGHUP)
    server.wait_for(lambda: count() > reads)


def test_the_banner_says_how_to_ask_with_a_key(server: RunningServer) -> None:
    assert "-H 'Authorization: Bearer KEY'" in server.banner


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


def test_all_endpoints_need_a_key_but_health_and_the_playground(server: RunningServer) -> None:
    paths = server.get("/openapi.json").json()["paths"]
    endpoints = [(method, path) for path, methods in paths.items() for method in methods]
    assert len(endpoints) > 15
    endpoints += [("get", path) for path in ("/openapi.json", "/dashboard", "/metrics/history")]
    for method, path in endpoints:
        status = server.client.request(method, server.url + path).status_code
        assert status == (200 if path in ("/health", "/readyz", "/livez") else 401), path
    for path in ("/", "/planner", "/pages/playground.js"):  # the first asks for a key itself
        assert server.client.get(server.url + path).status_code == 200


@pytest.mark.parametrize("path", ["/metrics", "/metrics/history", "/dashboard", "/openapi.json"])
def test_browsers_ask_their_user_for_a_key(server: RunningServer, path: str) -> None:
    def status(scheme: str, value: bytes) -> int:
        sent = f"{scheme} ".encode() + value
        return server.client.get(server.url + path, headers={"authorization": sent}).status_code

    asked = server.client.get(server.url + path).headers["www-authenticate"]
    assert asked == 'Basic realm="midfill", charset="UTF-8", Bearer'
    for key in map(str.encode, KEYS):
        assert status("Basic", base64.b64encode(b"anyone:" + key)) == 200
        assert status("Bearer", key) == 200
    for wrong in (b"anyone:no", b"first key", b"anyone:", b":"):
        assert status("Basic", base64.b64encode(wrong)) == 401
    assert status("Basic", b"first key") == 401
    assert status("Digest", base64.b64encode(b"anyone:first key")) == 401


def test_web_pages_of_others_read_nothing(server: RunningServer) -> None:
    """No answer allows another origin, and no preflight is answered."""
    headers = {"origin": "https://example.org", "authorization": f"Bearer {KEYS[0]}"}
    for path in ("/v1/models", "/metrics", "/health", "/"):
        response = server.client.get(server.url + path, headers=headers)
        assert response.status_code == 200
        assert not [name for name in response.headers if name.startswith("access-control")]
    headers |= {"access-control-request-method": "POST"}
    preflight = server.client.options(f"{server.url}/v1/completions", headers=headers)
    assert preflight.status_code == 405
    assert not [name for name in preflight.headers if name.startswith("access-control")]


def test_the_log_names_tenants_and_never_keys(server: RunningServer) -> None:
    for key in KEYS:
        headers = {"authorization": f"Bearer {key}".encode()}
        server.post("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=headers)
    server.post("/v1/completions", {}, headers={"authorization": "Bearer guessed"})
    for pattern in (
        r"INFO POST /v1/completions 200 request_id=\w+ tenant=key-1 model=tiny",
        r"tenant=key-3",
        r"POST /v1/completions 401 request_id=\w+ duration_seconds=\S+ error=inv",
    ):  # lines may come after their answers
        server.wait_for(lambda line=re.compile(pattern): any(map(line.search, server.log)))
    assert not any(key in line for line in server.log for key in (*KEYS, "guessed"))


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
    body = {"prompt": "settle", "max_tokens": 1}
    for key in KEYS:  # so that all numbers of earlier answers are there
        headers = {"authorization": f"Bearer {key}".encode()}
        assert server.post("/v1/completions", body, headers=headers).status_code == 200
    server.wait_for(server.is_idle)
    server.wait_for(lambda: server.metric("num_requests_background") == 0)
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
    server: RunningServer, own_keys: Path, named_key: str
) -> None:
    def status(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        body = {"prompt": "a", "max_tokens": 1}
        return server.post("/v1/completions", body, headers=headers).status_code

    assert status(named_key) == 200
    new = add_key(own_keys, "bob")
    assert status(new) == 401
    read_again(server)
    assert status(new) == 200
    server.wait_for(lambda: "tenant=bob" in "\n".join(server.log))
    own_keys.write_text("nonsense\n")
    read_again(server, "the API keys stay as they were")
    assert status(named_key) == status(new) == status("first key") == 200
    assert named_key not in "\n".join(server.log)


def test_with_a_monitors_key_others_read_no_metrics(server: RunningServer, own_keys: Path) -> None:
    reader = add_key(own_keys, "prometheus", monitor=True)
    client = add_key(own_keys, "carol")
    read_again(server)
    for key, expected in ((reader, 200), (client, 403), ("first key", 403), ("none", 401)):
        headers = {"authorization": f"Bearer {key}"}
        read = server.client.get(f"{server.url}/metrics", headers=headers)
        assert read.status_code == expected
    headers = {"authorization": f"Bearer {reader}"}
    refused = server.post("/v1/completions", {"prompt": "a"}, headers=headers)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "insufficient_permissions"


def test_a_keys_limits_apply_to_it_alone(server: RunningServer, own_keys: Path) -> None:
    limited, free = add_key(own_keys, "limited"), add_key(own_keys, "free")
    both = {key: {"authorization": f"Bearer {key}"} for key in (limited, free)}
    body = {"prompt": "a" * 30, "max_tokens": 8, "ignore_eos": True}

    def limit(**limits: int) -> None:
        set_limits(own_keys, "limited", TenantLimits(**limits))
        read_again(server)

    def ask(path: str = "/v1/completions", key: str = limited, **more: object) -> httpx.Response:
        return server.post(path, {**body, **more}, headers=both[key])

    limit(requests=2)
    for _ in range(3):  # what costs nothing isn't counted
        assert server.client.get(f"{server.url}/v1/models", headers=both[limited]).is_success
    assert [ask().status_code for _ in range(3)] == [200, 200, 429]
    refused = ask()
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    shaped = ask("/api/generate", model="tiny-llama")
    assert shaped.status_code == 429
    assert "limit is 2 requests per minute" in shaped.json()["error"]
    assert ask(key=free).status_code == 200

    limit(tokens=30)
    assert [ask(stream=stream).status_code for stream in (False, True, False)] == [200, 429, 429]
    assert "30 tokens per minute" in ask().json()["error"]["message"]

    limit(running=1)
    server.wait_for(server.is_idle)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, max_tokens=400)
        server.wait_for(lambda: not server.is_idle())
        assert ask().status_code == 429
        assert answer.result().status_code == 200
    assert ask().status_code == 200
    limit()
    assert [ask().status_code for _ in range(3)] == [200] * 3


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


@pytest.mark.parametrize("suffix", [None, "\n    return total\n"])
def test_a_guess_of_anothers_text_costs_as_much_as_any_text(
    server: RunningServer, suffix: str | None
) -> None:
    """A right guess, whole or begun, with the victim's own name of the document, finds nothing."""

    def ask(key: str, prompt: str) -> tuple[int, int]:
        body = {"prompt": prompt, "suffix": suffix, "max_tokens": 1, "temperature": 0}
        body |= {} if suffix is None else {"midfill": {"document": "secret.py"}}
        headers = {"authorization": f"Bearer {key}".encode()}
        usage = server.post("/v1/completions", body, headers=headers).json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return cached, usage["prompt_tokens"] - cached

    text = "ab = 7351  # of this account\n" * 3
    ask("voilà", f"W{text}")  # so that sentinels are cached for all that follows
    ask("first key", f"X{text}")
    assert ask("first key", f"X{text}")[0] > 20  # the victim itself finds it
    nobodys, guessed, begun = (ask("voilà", each + text) for each in ("Y", "X", "Z"))
    assert nobodys == guessed == begun
    assert ask("voilà", f"X{text}")[0] > guessed[0] + 20  # its own, from now on


@pytest.mark.parametrize("key", ["", " ", "\t", " key", "key ", "two\nlines"])
def test_keys_that_are_empty_or_cant_be_sent_are_refused(key: str) -> None:
    with pytest.raises(MidfillError, match="API key"):
        ServeOptions(model="none", api_keys=("good", key))


@pytest.mark.parametrize(
    ("host", "keys", "warnings"),
    [
        ("0.0.0.0", (), ["needs no API key", "without TLS"]),
        ("0.0.0.0", ("key",), ["without TLS"]),
        ("127.0.0.1", (), []),
        ("localhost", (), []),
    ],
)
def test_a_server_that_others_can_reach_warns_of_what_is_missing(
    tmp_path: Path,
    host: str,
    keys: tuple[str, ...],
    warnings: list[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    options = ServeOptions(model="none", host=host, port=0, api_keys=keys)
    with pytest.raises(MidfillError):  # there is no model, which is found after binding the address
        run_server(options, tmp_path / "none")
    found = [text for text in ("needs no API key", "without TLS") if text in caplog.text]
    assert found == warnings


def test_without_keys_none_is_needed() -> None:
    ring = KeyRing()
    assert not ring
    assert ring.tenants == ("",)
    assert ring.find_name(b"") is None


def test_keys_without_a_file_are_numbered() -> None:
    ring = KeyRing(["first", "Schlüssel"])
    assert ring.tenants == ("key-1", "key-2")
    assert ring.find_name("Schlüssel".encode()) == "key-2"
    assert ring.find_name(b"") is None
    assert ring.find_name(b"third") is None


def test_keys_of_one_name_are_one_tenant(tmp_path: Path) -> None:
    keys = [add_key(tmp_path / "keys", "alice").encode() for _ in range(2)]
    ring = KeyRing(["own"], tmp_path / "keys")
    assert ring.tenants == ("key-1", "alice")
    assert [ring.find_name(key) for key in (*keys, b"own")] == ["alice", "alice", "key-1"]


def test_a_changed_file_counts_once_it_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    old = add_key(file, "alice").encode()
    ring = KeyRing(path=file)
    new = add_key(file, "bob").encode()
    remove_keys(file, "alice", keep_newest=False)
    assert [ring.find_name(key) for key in (old, new)] == ["alice", None]
    ring.reload()
    assert [ring.find_name(key) for key in (old, new)] == [None, "bob"]


@pytest.mark.parametrize("text", ["", "alice", None])
def test_a_file_that_became_unusable_changes_nothing(
    tmp_path: Path, text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys"
    key = add_key(file, "alice").encode()
    ring = KeyRing(path=file)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    ring.reload()
    assert ring.find_name(key) == "alice"
    assert "stay as they were" in caplog.text
    with pytest.raises(MidfillError):
        KeyRing(path=file)


def test_a_line_of_a_file_stands_for_its_key() -> None:
    """So an environment need not hold keys either."""
    ring = KeyRing(["plain", f"alice:sha256:{key_digest(b'secret').hex()}"])
    assert ring.tenants == ("key-1", "alice")
    assert ring.find_name(b"secret") == "alice"
    assert ring.find_name(f"alice:sha256:{key_digest(b'secret').hex()}".encode()) is None
    with pytest.raises(MidfillError, match="'key-7' can't name a key"):
        KeyRing([f"key-7:sha256:{'a' * 64}"])


def test_limits_are_a_names_or_everyones_and_change_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    add_key(file, "alice")
    add_key(file, "bob")
    ring = KeyRing(["own"], file)
    assert ring.limits_of("alice") == NO_LIMITS
    set_limits(file, "alice", TenantLimits(requests=5))
    set_limits(file, "*", TenantLimits(tokens=7, running=1))
    ring.reload()
    assert ring.limits_of("alice") == TenantLimits(requests=5)
    assert ring.limits_of("bob") == ring.limits_of("key-1") == TenantLimits(tokens=7, running=1)


def test_a_monitor_is_no_tenant(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    add_key(file, "alice")
    ring = KeyRing(path=file)
    assert not ring.has_monitors
    key = add_key(file, "prometheus", monitor=True)
    ring.reload()
    assert ring.has_monitors
    assert ring.find_name(key.encode()) == "prometheus"
    assert ring.is_monitor("prometheus")
    assert not ring.is_monitor("alice")
    assert ring.tenants == ("alice",)
    with pytest.raises(MidfillError, match="prometheus is a monitor, but --api-key"):
        KeyRing([f"prometheus:sha256:{'a' * 64}"], file)
    remove_keys(file, "alice", keep_newest=False)
    with pytest.raises(MidfillError, match="keys of monitors only"):
        KeyRing(path=file)


OWN = "192.0.2.1"
OTHER = "192.0.2.2"


class Door:
    """Keys that are looked at, by a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.guesses = KeyGuesses(lambda: self.now)

    def looks_at(self, key: str, host: str = OWN, *, right: bool = False) -> bool:
        sent = key.encode()
        try:
            self.guesses.check(host, sent, key_digest(sent))
        except RateLimitError:
            return False
        self.guesses.record(host, sent, key_digest(sent), right=right)
        return True

    def send(self, keys: Iterable[str], host: str = OWN) -> int:
        """Return how many of some wrong keys were looked at."""
        return sum(self.looks_at(key, host) for key in keys)


def many(number: int) -> list[str]:
    return [f"guess {each}" for each in range(number)]


def test_an_address_may_try_some_wrong_keys_and_then_one_at_a_time() -> None:
    door = Door()
    assert door.send(many(100)) == MAX_GUESSES
    assert door.send(["more"]) == 0
    door.now += GUESS_SECONDS
    assert door.send(["one", "two"]) == 1
    door.now += 1000 * GUESS_SECONDS
    assert door.send(map(str, range(100))) == MAX_GUESSES


def test_one_that_is_refused_is_told_when_to_come_back() -> None:
    door = Door()
    door.send(many(MAX_GUESSES))
    with pytest.raises(RateLimitError, match="wrong API keys") as raised:
        door.guesses.check(OWN, b"next", key_digest(b"next"))
    assert raised.value.retry_after == GUESS_SECONDS


def test_the_same_wrong_key_again_is_no_guess() -> None:
    door = Door()
    assert door.send(["stale"] * 1000) == 1000
    assert door.send(many(100)) == MAX_GUESSES - 1


def test_keys_that_were_sent_before_are_looked_at_as_ever() -> None:
    door = Door()
    assert door.looks_at("secret", right=True)
    door.send(many(100))
    assert door.looks_at("secret", right=True)


def test_keys_that_nobody_can_guess_are_always_looked_at(tmp_path: Path) -> None:
    door = Door()
    door.send(many(100))
    assert door.looks_at(add_key(tmp_path / "keys", "alice"), right=True)


def test_other_addresses_are_not_concerned() -> None:
    door = Door()
    door.send(many(100))
    assert door.looks_at("secret", OTHER, right=True)
    assert door.send(many(100), OTHER) == MAX_GUESSES


def test_a_network_that_one_client_has_is_one_address() -> None:
    door = Door()
    guessed = [door.looks_at(f"guess {n}", f"2001:db8::{n:x}") for n in range(100)]
    assert sum(guessed) == MAX_GUESSES
    assert door.looks_at("guess", "2001:db8:0:1::1")
    assert door.looks_at("guess", "::ffff:192.0.2.1")
    assert door.looks_at("guess", "::ffff:192.0.2.2")


def test_what_is_remembered_is_bounded() -> None:
    door = Door()
    for number in range(10_000):
        door.looks_at("guess", f"host {number}")
    assert len(door.guesses) == 4096


def test_clients_get_429_and_when_to_try_again(tiny_folder: Path) -> None:
    checkpoint = open_model(tiny_folder)
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint, None), 256)
    engine = EngineClient(tiny_folder, ModelOptions())
    service = ModelService("tiny", engine, checkpoint.tokenizer, prompts, 1 << 20)

    async def ask() -> list[httpx.Response]:
        app = create_app(service, KeyRing(["known", "unknown"]))
        transport = httpx.ASGITransport(app=app, client=(OWN, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            keys = ["known", *many(MAX_GUESSES + 1), "known", "unknown"]
            return [
                await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
                for key in keys
            ]

    try:
        responses = asyncio.run(ask())
    finally:
        service.close()
    refused = [401] * MAX_GUESSES + [429]
    assert [each.status_code for each in responses] == [200, *refused, 200, 429]
    assert 1 <= int(responses[-1].headers["retry-after"]) <= GUESS_SECONDS
    assert responses[-1].json()["error"]["code"] == "rate_limit_exceeded"
