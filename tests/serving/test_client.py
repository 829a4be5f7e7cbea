"""ServerClient in front of servers that answer as a test wants."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from midfill.errors import MidfillError
from midfill.serving.client import KeyRefusedError, NoServerError, ServerClient


class Stub(ThreadingHTTPServer):
    """A server that answers everything alike.

    Attributes:
        asked: path, key and body of each request.
    """

    def __init__(self, status: int, body: bytes, location: str = "") -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.body, self.location = status, body, location
        self.asked: list[tuple[str, str | None, bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Stub

    def answer(self) -> None:
        sent = self.rfile.read(int(self.headers["content-length"] or 0))
        self.server.asked.append((self.path, self.headers["authorization"], sent))
        self.send_response(self.server.status)
        self.send_header("content-length", str(len(self.server.body)))
        self.send_header("location", self.server.location)
        self.end_headers()
        self.wfile.write(self.server.body)

    do_GET = do_POST = answer  # noqa: N815

    def log_message(self, format: str, *arguments: object) -> None:
        pass


Stubbed = Callable[..., Stub]


@pytest.fixture
def stub() -> Iterator[Stubbed]:
    """Makes servers."""
    made: list[Stub] = []

    def make(status: int, body: bytes, location: str = "") -> Stub:
        made.append(Stub(status, body, location))
        threading.Thread(target=made[-1].serve_forever).start()
        return made[-1]

    yield make
    for each in made:
        each.shutdown()
        each.server_close()


def events(*choices: object) -> bytes:
    return b"".join(b"data: %b\n\n" % json.dumps(each).encode() for each in choices)


def piece(text: str) -> object:
    return {"choices": [{"index": 0, "text": text}]}


def test_the_pieces_of_an_answer(stub: Stubbed) -> None:
    server = stub(200, b": hello\n\n" + events(piece("é"), piece("\n")) + b"data: [DONE]\n\n")
    client = ServerClient(server.url, "key")
    assert list(client.complete({"prompt": "a"})) == ["é", "\n"]
    ((path, key, body),) = server.asked
    assert (path, key) == ("/v1/completions", "Bearer key")
    assert json.loads(body) == {"prompt": "a", "stream": True}


def test_the_names_of_models(stub: Stubbed) -> None:
    cards = [{"id": "a", "midfill": {"sentinels": False}}, {"id": "b"}]
    client = ServerClient(stub(200, json.dumps({"data": cards}).encode()).url)
    assert [(each.id, each.infills) for each in client.models()] == [("a", False), ("b", True)]


def test_a_redirect_is_not_followed(stub: Stubbed) -> None:
    other = stub(200, b'{"data": []}')
    server = stub(307, b"", location=other.url)
    with pytest.raises(MidfillError, match="answers 307"):
        ServerClient(server.url, "key").models()
    assert other.asked == []


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (401, b'{"error": {"message": "no key"}}', KeyRefusedError, "refuses the API key: no key"),
        (400, b'{"error": {"message": "too long"}}', MidfillError, "answers 400: too long"),
        (404, b"<html>", MidfillError, "answers 404: Not Found"),
        (200, b"data: <html>\n\n", NoServerError, "is no midfill server"),
        (200, events(piece("a")), NoServerError, "breaks off"),
        (200, events({"error": {"message": "lost"}}), MidfillError, "lost"),
    ],
)
def test_what_is_wrong_with_an_answer(
    stub: Stubbed, status: int, body: bytes, error: type[MidfillError], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        list(ServerClient(stub(status, body).url).complete({}))
    assert type(raised.value) is error


def test_no_server() -> None:
    with pytest.raises(NoServerError, match="no server answers at"):
        ServerClient("http://127.0.0.1:1").models()
