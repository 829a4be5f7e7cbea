"""Whether ``midfill complete`` asks a server, and which."""

from pathlib import Path
from typing import Any

import pytest

from midfill.cli import running_server
from midfill.cli.running_server import ServerFlags
from midfill.errors import MidfillError, OptionError
from midfill.models.checkpoints.model_store import DEFAULT_MODEL
from midfill.serving import client
from midfill.serving.client import KeyRefusedError, NoServerError, ServedModel, ServerClient

ASKED: list[ServerClient] = []
DEFAULT = running_server.DEFAULT_URL


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str] | MidfillError]:
    """What each URL serves."""
    served: dict[str, list[str] | MidfillError] = {}

    def models(self: ServerClient, timeout: float = 1.0) -> list[ServedModel]:
        ASKED.append(self)
        answer = served.get(self.url, NoServerError("no server"))
        if isinstance(answer, MidfillError):
            raise answer
        return [ServedModel(name) for name in answer]

    ASKED.clear()
    monkeypatch.setattr(client.ServerClient, "models", models)
    monkeypatch.setenv("MIDFILL_API_KEY", "first second")
    return served


def test_the_default_model_is_asked_of_a_server_that_runs(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answers[DEFAULT] = ["other", DEFAULT_MODEL]
    found = ServerFlags().find(None, [])
    # Nobody has named the server, so it gets no key.
    assert found == (ServerClient(DEFAULT), ServedModel(DEFAULT_MODEL))
    said = f"midfill: asking the server at {DEFAULT}; --no-server loads the model here\n"
    assert capsys.readouterr().err == said
    assert ServerFlags().find("other", []) == (ServerClient(DEFAULT), ServedModel("other"))


def test_the_model_is_loaded_here_where_the_server_has_it_not(
    answers: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ServerFlags().find(None, []) is None
    answers[DEFAULT] = [tmp_path.name]
    assert ServerFlags().find(None, []) is None
    ASKED.clear()
    assert ServerFlags().find(str(tmp_path), []) is None  # that may be another folder of the name
    assert ServerFlags().find(tmp_path.name, ["--threads"]) is None
    assert ServerFlags(no_server=True).find(tmp_path.name, []) is None
    assert ASKED == []
    assert capsys.readouterr().err == ""


def test_a_server_with_keys_is_only_asked_by_its_name(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    answers[DEFAULT] = KeyRefusedError("no")
    assert ServerFlags().find(None, []) is None
    assert "wants an API key" in capsys.readouterr().err


@pytest.mark.parametrize("url", ["http://there:1", "there:1", "http://there:1/v1/"])
def test_a_server_that_is_named_gets_a_key(answers: dict[str, Any], url: str) -> None:
    answers["http://there:1"] = ["model"]
    found = ServerFlags(url=url).find(None, [])
    assert found == (ServerClient("http://there:1", "first"), ServedModel("model"))
    given = ServerFlags(url=url, api_key="mine").find("model", [])
    assert given is not None
    assert given[0].api_key == "mine"
    with pytest.raises(MidfillError, match="serves model, and not other"):
        ServerFlags(url=url).find("other", [])


@pytest.mark.parametrize(
    ("flags", "own", "problem"),
    [
        (ServerFlags(api_key="k"), [], "--url"),
        (ServerFlags(url="http://there", no_server=True), [], "--no-server"),
        (ServerFlags(url="http://there"), ["--threads"], "--threads is for a model"),
    ],
)
def test_options_that_exclude_each_other(flags: ServerFlags, own: list[str], problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        flags.find(None, own)
