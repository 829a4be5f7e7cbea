"""Tabby's API as its agent uses it."""

from typing import Any

import pytest
from running_server import RunningServer

from midfill.infill.context_files import ContextFile
from midfill.serving.server.dialects.tabby import Segments, Snippet

PREFIX, SUFFIX = "x = 1\ny = [2, 3]\nz = toke", ")\nprint(x)\n"
SEGMENTS: dict[str, Any] = {
    "prefix": PREFIX,
    "suffix": SUFFIX,
    "filepath": "src/shapes.py",
    "git_url": "git@example.org:demo/shapes.git",
    "declarations": [{"filepath": "a.py", "body": "def toke(): ..."}],
    "relevant_snippets_from_changed_files": [{"filepath": "b.py", "body": "b = 1", "score": 0.5}],
    "clipboard": "copied",
}


def ask(server: RunningServer, **segments: object) -> Any:
    """Ask as the agent does: without a prompt, without a model."""
    response = server.post("/v1/completions", {"language": "python", "segments": segments})
    assert response.status_code == 200, response.text
    return response.json()


def test_segments_are_completed(server: RunningServer) -> None:
    answer = ask(server, prefix=PREFIX, suffix=SUFFIX)
    same = server.complete(
        prompt=PREFIX, suffix=SUFFIX, temperature=0, max_tokens=64, midfill={"lines": "block"}
    )
    (choice,) = answer["choices"]
    assert choice == {"index": 0, "text": same["choices"][0]["text"]}
    assert choice["text"]
    assert answer["id"].startswith("cmpl-")


def test_snippets_are_shown_and_the_rest_is_accepted(server: RunningServer) -> None:
    def prompt_tokens(**segments: object) -> float:
        before = server.metric("prompt_tokens_total")
        ask(server, **segments)
        return server.metric("prompt_tokens_total") - before

    alone = prompt_tokens(prefix="first = 11\n", suffix="")
    # Another text: the snippets of a document that is in the cache stay as they are.
    assert prompt_tokens(**{**SEGMENTS, "prefix": "other = 1\n", "suffix": ""}) > alone + 10


def test_only_as_many_snippets_are_shown_as_tabby_would_show() -> None:
    def snippet(name: str, length: int) -> Snippet:
        return Snippet(filepath=name, body="x" * length)

    segments = Segments(
        prefix="",
        declarations=[snippet("a", 300), snippet("b", 300), snippet("c", 300), snippet("d", 9)],
        relevant_snippets_from_changed_files=[snippet("e", 100)],
        relevant_snippets_from_recently_opened_files=[snippet("f", 69), snippet("g", 68)],
    )
    assert [file.path for file in segments.snippets()] == ["a", "b", "e"]
    assert next(segments.snippets()) == ContextFile("x" * 300, "a")


def test_openais_body_at_the_same_path_is_openais(server: RunningServer) -> None:
    answer = server.complete(prompt="a", segments={"prefix": "b"}, max_tokens=1)
    assert answer["object"] == "text_completion"
    missing = server.post("/v1/completions", {"model": "tiny-llama"})
    assert missing.status_code == 400
    assert missing.json()["error"]["message"] == "prompt is missing"


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_health_names_the_model_and_a_version(server: RunningServer, method: str) -> None:
    health = server.client.request(method, f"{server.url}/v1/health").json()
    assert health["model"] == "tiny-llama"
    assert health["status"] == "ok"
    assert health["version"]["git_describe"].startswith("v0.")


def test_clients_are_told_to_send_no_telemetry(server: RunningServer) -> None:
    setting = server.get("/v1beta/server_setting").json()
    assert setting == {"disable_client_side_telemetry": True}


def test_events_are_accepted(server: RunningServer) -> None:
    event = {"type": "select", "completion_id": "cmpl-1", "choice_index": 0, "view_id": "v"}
    accepted = server.post("/v1/events?select_kind=line", event)
    assert (accepted.status_code, accepted.content) == (200, b"")
    assert server.post("/v1/events", {**event, "type": "sell"}).status_code == 400


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"segments": {"suffix": "b"}}, "segments.prefix"),
        ({"segments": {"prefix": 5}}, "segments.prefix"),
        ({"segments": {"prefix": "a", "declarations": [{}]}}, "segments.declarations[0].filepath"),
        ({"segments": {"prefix": "a"}, "mode": "next_edit_suggestion"}, "mode"),
        ({"segments": {"prefix": "a"}, "temperature": -1}, "temperature"),
    ],
)
def test_bad_bodies_are_refused(server: RunningServer, body: object, param: str) -> None:
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
