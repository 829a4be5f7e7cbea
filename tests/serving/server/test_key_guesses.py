"""Wrong API keys: whoever guesses is slowed down, and nobody else is."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

import httpx
import pytest

from midfill.config import ModelOptions
from midfill.engine.process.client import EngineClient
from midfill.errors import RateLimitError
from midfill.frontend.prompts import PromptEncoder, fim_format
from midfill.models.checkpoints.opening import open_model
from midfill.serving.server.app import create_app
from midfill.serving.server.key_file import add_key, key_digest
from midfill.serving.server.key_guesses import GUESS_SECONDS, MAX_GUESSES, KeyGuesses
from midfill.serving.server.key_ring import KeyRing
from midfill.serving.server.service import ModelService

OWN = "192.0.2.1"
OTHER = "192.0.2.2"


class Door:
    """Keys that are looked at, by a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.guesses = KeyGuesses(lambda: self.now)

    def looks_at(self, key: str, host: str = OWN, *, right: bool = False) -> bool:
        sent = key.encode()
        try:
            self.guesses.check(host, sent, key_digest(sent))
        except RateLimitError:
            return False
        self.guesses.record(host, sent, key_digest(sent), right=right)
        return True

    def send(self, keys: Iterable[str], host: str = OWN) -> int:
        """Return how many of some wrong keys were looked at."""
        return sum(self.looks_at(key, host) for key in keys)


def many(number: int) -> list[str]:
    return [f"guess {each}" for each in range(number)]


def test_an_address_may_try_some_wrong_keys_and_then_one_at_a_time() -> None:
    door = Door()
    assert door.send(many(100)) == MAX_GUESSES
    assert door.send(["more"]) == 0
    door.now += GUESS_SECONDS
    assert door.send(["one", "two"]) == 1
    door.now += 1000 * GUESS_SECONDS
    assert door.send(map(str, range(100))) == MAX_GUESSES


def test_one_that_is_refused_is_told_when_to_come_back() -> None:
    door = Door()
    door.send(many(MAX_GUESSES))
    with pytest.raises(RateLimitError, match="wrong API keys") as raised:
        door.guesses.check(OWN, b"next", key_digest(b"next"))
    assert raised.value.retry_after == GUESS_SECONDS


def test_the_same_wrong_key_again_is_no_guess() -> None:
    door = Door()
    assert door.send(["stale"] * 1000) == 1000
    assert door.send(many(100)) == MAX_GUESSES - 1


def test_keys_that_were_sent_before_are_looked_at_as_ever() -> None:
    door = Door()
    assert door.looks_at("secret", right=True)
    door.send(many(100))
    assert door.looks_at("secret", right=True)


def test_keys_that_nobody_can_guess_are_always_looked_at(tmp_path: Path) -> None:
    door = Door()
    door.send(many(100))
    assert door.looks_at(add_key(tmp_path / "keys", "alice"), right=True)


def test_other_addresses_are_not_concerned() -> None:
    door = Door()
    door.send(many(100))
    assert door.looks_at("secret", OTHER, right=True)
    assert door.send(many(100), OTHER) == MAX_GUESSES


def test_a_network_that_one_client_has_is_one_address() -> None:
    door = Door()
    guessed = [door.looks_at(f"guess {n}", f"2001:db8::{n:x}") for n in range(100)]
    assert sum(guessed) == MAX_GUESSES
    assert door.looks_at("guess", "2001:db8:0:1::1")
    assert door.looks_at("guess", "::ffff:192.0.2.1")
    assert door.looks_at("guess", "::ffff:192.0.2.2")


def test_what_is_remembered_is_bounded() -> None:
    door = Door()
    for number in range(10_000):
        door.looks_at("guess", f"host {number}")
    assert len(door.guesses) == 4096


def test_clients_get_429_and_when_to_try_again(tiny_folder: Path) -> None:
    checkpoint = open_model(tiny_folder)
    prompts = PromptEncoder(checkpoint, fim_format(checkpoint, None), 256)
    engine = EngineClient(tiny_folder, ModelOptions())
    service = ModelService("tiny", engine, checkpoint.tokenizer, prompts, 1 << 20)

    async def ask() -> list[httpx.Response]:
        app = create_app(service, KeyRing(["known", "unknown"]))
        transport = httpx.ASGITransport(app=app, client=(OWN, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            keys = ["known", *many(MAX_GUESSES + 1), "known", "unknown"]
            return [
                await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
                for key in keys
            ]

    try:
        responses = asyncio.run(ask())
    finally:
        service.close()
    refused = [401] * MAX_GUESSES + [429]
    assert [each.status_code for each in responses] == [200, *refused, 200, 429]
    assert 1 <= int(responses[-1].headers["retry-after"]) <= GUESS_SECONDS
    assert responses[-1].json()["error"]["code"] == "rate_limit_exceeded"
