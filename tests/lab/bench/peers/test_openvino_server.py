"""The program that serves OpenVINO's pipeline: OpenAI's answers, streamed, of several at once."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from midfill_lab.bench.clients import stream_events
from midfill_lab.bench.peers.openvino_server import make_server


class Handle:
    """An answer that counts up from its prompt's last token."""

    def __init__(self, tokens: Sequence[int], answer: int) -> None:
        self.next, self.left, self.unread = tokens[-1] + 1, answer, list[int]()

    def can_read(self) -> bool:
        return bool(self.unread)

    def read(self) -> dict[int, Any]:
        unread, self.unread = self.unread, []
        return {0: SimpleNamespace(generated_ids=unread)}


class Counting:
    """A model whose tokens are the bytes of UTF-8, with a pipeline like OpenVINO's."""

    def __init__(self) -> None:
        self.handles: list[Handle] = []
        self.most_at_once = 0

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode(errors="replace")

    def add(self, number: int, tokens: Sequence[int], answer: int) -> Handle:
        self.handles.append(Handle(tokens, answer))
        return self.handles[-1]

    def step(self) -> None:
        running = [each for each in self.handles if each.left]
        self.most_at_once = max(self.most_at_once, len(running))
        for each in running:
            each.unread.append(each.next)
            each.next, each.left = each.next + 1, each.left - 1


@dataclass
class Served:
    model: Counting
    url: str

    def complete(self, prompt: object, length: int) -> tuple[str, dict[str, int], int]:
        """Return the text, the usage, and the number of parts with a choice."""
        body = {"prompt": prompt, "max_tokens": length, "stream": True}
        response = httpx.post(f"{self.url}/v1/completions", json=body)
        assert response.status_code == 200
        events = [event for _, event in stream_events([(0.0, response.content)])]
        *parts, last = events
        text = "".join(part["choices"][0]["text"] for part in parts)
        return text, last["usage"], len(parts)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    model = Counting()
    server = make_server(model, 0)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield Served(model, f"http://127.0.0.1:{server.server_address[1]}")
    server.shutdown()
    server.server_close()


def test_it_is_healthy_once_it_listens_and_lists_its_model(served: Served) -> None:
    assert httpx.get(f"{served.url}/health").status_code == 200
    (model,) = httpx.get(f"{served.url}/v1/models").json()["data"]
    assert model["id"]


@pytest.mark.parametrize("prompt", ["a", [98, 97]])
def test_texts_and_token_ids_are_continued_token_by_token(served: Served, prompt: object) -> None:
    text, usage, parts = served.complete(prompt, 3)
    assert text == "bcd"
    assert usage == {"prompt_tokens": len(prompt), "completion_tokens": 3}  # type: ignore[arg-type]
    assert parts == 3


def test_half_a_character_waits_for_the_other(served: Served) -> None:
    text, _, parts = served.complete([0xC3], 1)  # 0xC4 begins a character
    assert (text, parts) == ("", 1)


def test_answers_of_several_connections_are_made_together(served: Served) -> None:
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda first: served.complete(first, 30)[0], " !0@"))
    assert texts == [bytes(range(ord(c) + 1, ord(c) + 31)).decode() for c in " !0@"]
