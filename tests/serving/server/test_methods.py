"""Requests that choose a method; the server allows SnapKV and CacheBlend."""

import shutil
from pathlib import Path

import pytest
from running_server import RunningServer, start

from midfill.models.checkpoints.model_record import write_reuse

TEXT = "def variant(tokenizer, name):\n    return tokenizer[name]\n\n\n" * 8
ASKED = {"prompt": TEXT, "suffix": "\n", "max_tokens": 12, "temperature": 0}
SNAPKV = {"method": "snapkv:budget=12,window=4"}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_chooses_how_its_own_prompt_is_compressed(
    server: RunningServer, stream: bool
) -> None:
    client = server.openai().completions

    def text(**fields: object) -> str:
        body = {"ignore_eos": True, **fields}
        answer = client.create(model="", stream=stream, **ASKED, extra_body=body)
        return "".join(one.choices[0].text for one in (answer if stream else [answer]))

    exact = text()
    assert text(midfill=SNAPKV) != exact
    assert text(midfill={"method": "none"}) == text(midfill={}) == exact


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("snapk", "midfill.method: there is no method 'snapk'; did you mean 'snapkv'?"),
        ("snapkv:windw=3", "midfill.method: snapkv has no option 'windw'; did you mean 'window'?"),
        (
            "cake",
            "midfill.method: requests may not use 'cake' here; they may use snapkv, cacheblend",
        ),
    ],
)
def test_other_methods_are_refused(
    server: RunningServer, stream: bool, method: str, error: str
) -> None:
    body = {**ASKED, "stream": stream, "midfill": {"method": method}}
    response = server.post("/v1/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(error)
    assert response.json()["error"]["param"] == "midfill.method"


def test_after_a_jump_kv_comes_from_elsewhere_until_idle_time_has_computed_it(
    server: RunningServer,
) -> None:
    first, second = ("".join(f"{name}_{i} = model[{i}]\n" for i in range(30)) for name in "ab")
    midfill = {"layout": "psm", "method": "cacheblend:min_run=8,ratio=0.1", "healing": False}

    def ask(prompt: str, suffix: str) -> dict[str, int]:
        body = {"prompt": prompt, "suffix": suffix, "max_tokens": 2, "temperature": 0}
        answer = server.complete(**body, midfill=midfill)["midfill"]
        return {name: answer.get(f"{name}_tokens", 0) for name in ("cached", "computed", "reused")}

    server.wait_until_settled()
    before = server.metric("background_tokens_total")
    opened = ask(first, second)
    assert opened["reused"] == 0
    jumped = ask(second, first)
    assert jumped["reused"] > opened["computed"] / 2
    total = sum(opened.values())
    assert sum(jumped.values()) == total
    assert server.metric("reused_tokens_total") >= jumped["reused"]
    server.wait_for(lambda: server.metric("background_tokens_total") > before)
    server.wait_for(lambda: server.metric("num_requests_background") == 0)
    again = ask(second, first)
    assert again == {"cached": total - 1, "computed": 1, "reused": 0}


REUSE = "cacheblend:min_run=8,ratio=0.1,order=caret"


@pytest.fixture(scope="module")
def measured_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, of which it was measured how its prompts may take KV from elsewhere."""
    folder = tmp_path_factory.mktemp("measured") / "model"
    shutil.copytree(tiny_folder, folder)
    write_reuse(folder, REUSE, {})
    return folder


def test_jumps_take_kv_from_elsewhere_where_that_was_measured(measured_folder: Path) -> None:
    first, second = ("".join(f"{name}_{i} = model[{i}]\n" for i in range(30)) for name in "ab")
    with start(measured_folder, "--kv-memory", "4MB", "--min-confidence", "0") as server:
        assert f"reuse    {REUSE}" in server.banner

        def ask(prompt: str, suffix: str, **midfill: object) -> dict[str, int]:
            body = {"prompt": prompt, "suffix": suffix, "max_tokens": 2, "temperature": 0}
            fields = {"layout": "psm", "healing": False, **midfill}
            found = server.complete(**body, midfill=fields)["midfill"]
            names = ("cached", "computed", "reused")
            return {name: found.get(f"{name}_tokens", 0) for name in names}

        total = sum(ask(first, second).values())
        server.wait_until_settled()
        assert ask(second, first)["reused"] > total / 2
        typed = ask(second + "c", first)
        assert typed["computed"] < total / 2
        server.wait_until_settled()
        again = ask(second + "c", first)
        assert (again["computed"], again["reused"]) == (1, 0), "its exact KV followed"
        third = "".join(f"c_{i} = model[{i}]\n" for i in range(30))
        assert ask(third, second, method="none")["reused"] == 0
        answer = server.complete(prompt=first[200:], max_tokens=1)
        assert answer["midfill"].get("reused_tokens", 0) == 0, "it is a raw prompt"


def test_reuse_can_be_turned_off(measured_folder: Path) -> None:
    first, second = ("".join(f"{name}_{i} = model[{i}]\n" for i in range(30)) for name in "ab")
    with start(measured_folder, "--kv-memory", "4MB", "--reuse", "off") as server:
        assert "reuse" not in server.banner
        for prompt, suffix in ((first, second), (second, first)):
            midfill = {"layout": "psm", "healing": False}
            body = {"prompt": prompt, "suffix": suffix, "max_tokens": 2, "temperature": 0}
            found = server.complete(**body, midfill=midfill)["midfill"]
            assert found.get("reused_tokens", 0) == 0
