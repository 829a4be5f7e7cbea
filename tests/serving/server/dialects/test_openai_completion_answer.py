"""What a completion says of its tokens."""

from typing import Any

from running_server import RunningServer

BODY: dict[str, Any] = {
    "prompt": "x = 1\ny =",
    "temperature": 0,
    "max_tokens": 6,
    "ignore_eos": True,
}


def test_an_answers_tokens_are_named_on_request(server: RunningServer) -> None:
    (choice,) = server.complete(**BODY, return_token_ids=True)["choices"]
    assert len(choice["token_ids"]) == 6
    text = server.post("/detokenize", {"tokens": choice["token_ids"]}).json()["content"]
    assert text == choice["text"]
    (plain,) = server.complete(**BODY)["choices"]
    assert "token_ids" not in plain


def test_the_models_card_names_its_fim_tokens(server: RunningServer) -> None:
    (card,) = server.get("/v1/models").json()["data"]
    assert card["midfill"]["sentinels"] is True
    prefix, suffix, middle = card["midfill"]["fim_tokens"]
    assert len({prefix, suffix, middle}) == 3
