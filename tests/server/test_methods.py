"""Requests that choose a method of KV compression; the server allows SnapKV."""

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
        ("cake", "midfill.method: requests may not use 'cake' here; they may use snapkv"),
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
