"""``midfill serve A B``: one server of two models, over real sockets and engines."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from running_server import RunningServer, start
from tiny_checkpoints import write_tiny
from typer.testing import CliRunner

from midfill.cli.app import app
from midfill.config import ModelOptions
from midfill.errors import OptionError
from midfill.serving.options import ServeOptions, SeveralModels
from midfill.serving.server.models.opening import options_of, run_models

NAMES = ["tiny-llama", "tiny-qwen2"]
KEYS = ("--api-key", "known")


@pytest.fixture(scope="module")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("other") / NAMES[1]
    write_tiny("qwen2", folder)
    return folder


@pytest.fixture(scope="module")
def server(tiny_folder: Path, other_folder: Path) -> Iterator[RunningServer]:
    """There is room for one of them at a time."""
    options = ("--kv-memory", "4MB", "--model-memory", "6MB", *KEYS)
    with start(tiny_folder, str(other_folder), *options) as server:
        server.client.headers["authorization"] = "Bearer known"
        yield server


def loaded(server: RunningServer) -> list[str]:
    """The models in memory, as clients of Ollama see them."""
    return [model["name"] for model in server.get("/api/ps").json()["models"]]


def complete(server: RunningServer, model: str) -> httpx.Response:
    body = {"model": model, "prompt": "a b", "max_tokens": 4, "temperature": 0}
    return server.post("/v1/completions", body)


def test_each_request_is_answered_by_the_model_that_it_names(server: RunningServer) -> None:
    answers = {name: complete(server, name).json() for name in NAMES}
    assert [answer["model"] for answer in answers.values()] == NAMES
    texts = [answer["choices"][0]["text"] for answer in answers.values()]
    assert texts[0] != texts[1]
    assert len(server.engine_processes()) == 1


def test_every_dialect_names_models_its_own_way(server: RunningServer) -> None:
    requests = {
        "/v1/fim/completions": {"model": NAMES[1], "prompt": "a", "max_tokens": 2},
        "/api/generate": {"model": f"{NAMES[1]}:latest", "prompt": "a", "stream": False},
        "/api/show": {"name": NAMES[1]},
    }
    for path, body in requests.items():
        response = server.post(path, body)
        assert response.status_code == 200, response.text
        assert loaded(server) == [f"{NAMES[1]}:latest"]


def test_all_models_are_listed_loaded_or_not(server: RunningServer) -> None:
    complete(server, NAMES[1])
    cards = server.get("/v1/models").json()["data"]
    assert [(card["id"], card["midfill"]["loaded"]) for card in cards] == [
        (NAMES[0], False), (NAMES[1], True),
    ]  # fmt: skip
    tags = server.get("/api/tags").json()["models"]
    assert [model["model"] for model in tags] == [f"{name}:latest" for name in NAMES]
    assert server.get(f"/v1/models/{NAMES[0]}").json()["id"] == NAMES[0]


def test_an_unknown_name_is_told_all_that_there_are(server: RunningServer) -> None:
    error = complete(server, "other").json()["error"]
    assert error["code"] == "model_not_found"
    assert all(repr(name) in error["message"] for name in NAMES)


def test_metrics_are_those_of_the_models_in_memory_by_name(server: RunningServer) -> None:
    complete(server, NAMES[1])
    text = server.get("/metrics").text
    assert f'midfill:generation_tokens_total{{model_name="{NAMES[1]}",tenant="key-1"}}' in text
    assert text.count("# TYPE midfill:kv_slots gauge") == 1
    assert "midfill:connections " in text


def test_requests_without_a_model_are_the_first_ones(server: RunningServer) -> None:
    assert server.complete(prompt="a", max_tokens=1)["model"] == NAMES[0]


def test_models_give_way_only_once_their_answers_are_complete(server: RunningServer) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda name: complete(server, name), NAMES * 4))
    texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts == texts[:2] * 4
    assert texts[0] != texts[1]


def test_who_has_no_key_has_nothing_loaded(server: RunningServer) -> None:
    answer = complete(server, NAMES[0])
    assert answer.status_code == 200, answer.text
    body = {"model": NAMES[1], "prompt": "a"}
    refused = server.post("/v1/completions", body, headers={"authorization": "Bearer wrong"})
    assert refused.status_code == 401
    assert loaded(server) == [f"{NAMES[0]}:latest"]


def test_bodies_that_are_no_json_or_too_large_are_refused_as_ever(server: RunningServer) -> None:
    json = {"content-type": "application/json"}
    assert server.post("/v1/completions", content=b"{", headers=json).status_code == 400
    large = server.post("/v1/completions", content=b" " * (17 << 20), headers=json)
    assert large.status_code == 413


def test_options_that_models_cannot_share_are_refused() -> None:
    several = SeveralModels(others=("b",))
    with pytest.raises(OptionError, match="--served-name is for one model"):
        ServeOptions(model="a", several=several, served_name="x")
    with pytest.raises(OptionError, match="--pin c is none of the models to serve: a, b"):
        ServeOptions(model="a", several=SeveralModels(others=("b",), pinned=("c",)))
    with pytest.raises(OptionError, match="--pin is for several models"):
        ServeOptions(model="a", several=SeveralModels(pinned=("a",)))


def test_two_models_of_one_name_are_refused(tmp_path: Path) -> None:
    paths = {str(tmp_path / place / "same.gguf"): tmp_path for place in "ab"}
    for path in map(Path, paths):
        path.parent.mkdir()
        path.touch()
    options = ServeOptions(model="a", several=SeveralModels(others=("b",)))
    with pytest.raises(OptionError, match=r"same\.gguf.*rename"):
        run_models(options, paths)


def test_each_model_has_the_adapter_that_is_shipped_for_it_and_a_part_of_the_memory() -> None:
    options = ServeOptions(model="a", several=SeveralModels(others=("smollm2-135m",)))
    shipped, other = (options_of(options, name, 1 << 20) for name in ("smollm2-135m", "a"))
    assert "smollm2-135m-fim" in (shipped.options.adapter or "")
    assert other.options.adapter is None
    assert 0 < other.options.memory_share < 1
    given = ServeOptions(model="a", options=ModelOptions(kv_memory=5))
    assert options_of(given, "a", 1).options.memory_share == 1


def test_the_command_says_what_is_wrong_in_one_line(tiny_folder: Path) -> None:
    arguments = ["serve", str(tiny_folder), "smollm2-135m", "--alias", "x"]
    result = CliRunner().invoke(app, arguments)
    assert isinstance(result.exception, OptionError)
    assert "--alias is for one model" in str(result.exception)
