"""Requests that choose a method; the server allows SnapKV and CacheBlend."""

import pytest
from running_server import RunningServer

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
