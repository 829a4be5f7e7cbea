"""What the last answer in a document proposed is drafted, whether its client read it all or not."""

from collections.abc import Iterator
from itertools import pairwise

import pytest
from running_server import RunningServer, start
from scripted_model import write_scripted

LETTERS = "ZQXJKVWYUGHPBFDM"  # each a token of its own, after which the next one comes
BODY = {
    "suffix": "\nprint(x)\n",
    "temperature": 0,
    "max_tokens": 12,
    "midfill": {"healing": False},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    equals = "\N{LATIN CAPITAL LETTER G WITH DOT ABOVE}="  # " =" as the vocabulary spells it
    follows = pairwise([equals, *LETTERS, equals])
    template = "{{ messages[0]['content'] }}"
    folder = write_scripted(tmp_path_factory.mktemp("scripted"), template, follows)
    # Steps take as long however many rows they have, so all that is predicted is worth drafting.
    with start(folder, "--kv-memory", "16MB", step_seconds=0.01) as server:
        yield server


def accepted(server: RunningServer) -> float:
    server.wait_for(server.is_idle)
    return server.metric("spec_decode_num_accepted_tokens_total")


def ask(server: RunningServer, prefix: str) -> tuple[str, float]:
    """Return an answer, and how many of its tokens were drafted."""
    before = accepted(server)
    text = server.complete(prompt=prefix, **BODY)["choices"][0]["text"]
    return text, accepted(server) - before


def test_answers_that_are_asked_for_again_and_the_rest_of_those_that_were_typed(
    server: RunningServer,
) -> None:
    assert ask(server, "one =") == (LETTERS[:12], 0)
    text, drafted = ask(server, "one =")
    assert text == LETTERS[:12]
    assert drafted >= 5
    text, drafted = ask(server, "one =ZQX")
    assert text == LETTERS[3:15]
    assert drafted >= 3


@pytest.mark.parametrize(
    "content",
    [LETTERS[:12], [{"type": "text", "text": LETTERS[:5]}, {"type": "text", "text": LETTERS[5:]}]],
)
def test_what_the_client_predicts(server: RunningServer, content: object) -> None:
    prediction = {"type": "content", "content": content}
    place = f"{type(content).__name__} line\n" * 9
    before = accepted(server)
    body = {**BODY, "prediction": prediction}
    filled = server.complete(prompt=f"{place}x =", **body)["choices"][0]
    assert filled["text"] == LETTERS[:12]
    assert accepted(server) - before >= 5
    before = accepted(server)
    chat = {"messages": [{"role": "user", "content": "x ="}], "temperature": 0, "max_tokens": 12}
    answer = server.post("/v1/chat/completions", {**chat, "prediction": prediction}).json()
    assert answer["choices"][0]["message"]["content"] == LETTERS[:12]
    assert accepted(server) - before >= 5


def test_a_wrong_prediction_changes_nothing(server: RunningServer) -> None:
    body = {**BODY, "prediction": {"type": "content", "content": LETTERS[::-1] * 3}}
    filled = server.complete(prompt="wrong line\n" * 9 + "x =", **body)["choices"][0]
    assert filled["text"] == LETTERS[:12]


@pytest.mark.parametrize(
    ("prediction", "says"),
    [
        ("text", "prediction"),
        ({"type": "diff", "content": "x"}, "prediction"),
        ({"type": "content"}, "prediction"),
        ({"type": "content", "content": "x" * 200_000}, "prediction"),
    ],
)
def test_a_prediction_that_is_none_is_named(
    server: RunningServer, prediction: object, says: str
) -> None:
    response = server.post("/v1/completions", {**BODY, "prompt": "x", "prediction": prediction})
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]


def test_an_answer_that_its_client_left(server: RunningServer) -> None:
    body = {**BODY, "prompt": "two =", "max_tokens": 400, "stream": True}
    with server.client.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        events = filter(None, response.iter_lines())
        for _ in range(3):
            next(events)
    assert ask(server, "two =")[1] > 0


def test_other_documents_and_other_tenants_have_other_answers(server: RunningServer) -> None:
    ask(server, "three =")
    assert ask(server, "something else entirely\nfour =")[1] == 0
