"""Chats are passed on as they are."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import msgspec
import pytest
from gateway_serving import run, serve
from hostile_answers import WHOLE, bomb, endless, head, sent, split, whole
from stub_upstream import CHAT_USAGE, StubUpstream

from midfill.serving.server.limits import RateLimits, TenantLimits

_PATH = "/v1/chat/completions"

CHAT: dict[str, Any] = {
    "model": "stub-coder",
    "messages": [{"role": "user", "content": "Hello"}],
    "tools": [{"type": "function", "function": {"name": "look"}}],
}
STREAMED = {**CHAT, "stream": True}
said = b'data: {"said": "Hel"}\n\n'


def events_of(text: str) -> list[dict[str, Any]]:
    """Return the events of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


def on_chats(
    answer: Callable[[], AsyncIterator[bytes]],
) -> Callable[[str, Any], AsyncIterator[bytes] | None]:
    """Return what answers chats so, and everything else as ever."""
    return lambda path, body: answer() if path == _PATH else None


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_a_chat_reaches_the_server_whole_and_its_answer_the_client(path: str) -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                response = await gateway.client.post(path, json=CHAT)
            assert upstream.chats == [CHAT]
            assert response.headers["content-type"] == "application/json"
            assert response.json() == {"said": "Hello there", "usage": CHAT_USAGE}

    run(test())


def test_a_streamed_chat_has_the_events_of_the_server() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                response = await gateway.client.post(_PATH, json=STREAMED)
            assert response.headers["content-type"].startswith("text/event-stream")
            assert events_of(response.text) == [
                {"said": "Hello"},
                {"said": " there", "usage": CHAT_USAGE},
            ]
            assert response.text.endswith("data: [DONE]\n\n")

    run(test())


@pytest.mark.parametrize("parts", [2, 1000])
@pytest.mark.parametrize("streamed", [True, False])
def test_an_answer_may_come_in_any_number_of_parts(parts: int, streamed: bool) -> None:
    said = {"said": "x" * 300}
    answer = (
        head() + b"data: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n"
        if streamed
        else whole(said)
    )

    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.respond = on_chats(lambda: sent(*split(answer, parts)))
                response = await gateway.client.post(_PATH, json={**CHAT, "stream": streamed})
            body = events_of(response.text)[0] if streamed else response.json()
            assert body == said

    run(test())


def test_a_stream_that_is_cut_ends_with_an_error_and_counts_as_a_failure() -> None:
    cuts = (
        head() + said,
        head(transfer_encoding="chunked") + b"%x\r\n" % len(said) + said + b"\r\n",
        head(content_length=1000) + said,
        head() + said + b'data: {"error": {"message": "CUDA is out of luck"}}\n\n',
    )

    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                for number, answer in enumerate(cuts, 1):
                    upstream.respond = on_chats(lambda answer=answer: sent(answer))
                    response = await gateway.client.post(_PATH, json=STREAMED)
                    first, last = events_of(response.text)
                    assert first == {"said": "Hel"}
                    assert last["error"]["type"] == "server_error"
                    assert gateway.gateway.pool.upstreams[0].failures == number
                    gateway.gateway.pool.upstreams[0].breaker.record_success()

    run(test())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: sent(whole({}, content_length=10)), "closed the connection early"),
        (lambda: sent(head(307, location="http://127.0.0.1:1/v1/chat/completions")), "redirects"),
        (lambda: sent(head(303, location="/elsewhere")), "redirects to '/elsewhere'"),
        (lambda: sent(bomb(WHOLE, 64)), "sends its answer compressed"),
        (lambda: sent(head(kind="text/html") + b"<script>"), "text/html instead of JSON"),
        (lambda: endless(head(kind=WHOLE), b" " * 2**20, 64), "sends more than 16000000 bytes"),
        (lambda: endless(head(), b"x" * 2**20, 8), "text/event-stream instead of JSON"),
        (lambda: sent(head(kind=WHOLE) + b"[" * 5000), "sent an event that is no JSON object"),
    ],
    ids=["cut", "307", "303", "gzip", "html", "huge", "events", "nested"],
)
def test_what_is_no_answer_is_one_line(
    answer: Callable[[], AsyncIterator[bytes]], message: str
) -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.respond = on_chats(answer)
                response = await gateway.client.post(_PATH, json=CHAT)
            assert response.status_code == 503, response.text
            assert message in response.json()["error"]["message"]

    run(test())


def test_an_endless_line_ends_a_chat() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.respond = on_chats(lambda: endless(head(), b"data: " + b"x" * 2**20, 8))
                response = await gateway.client.post(_PATH, json=STREAMED)
            assert "sent an endless line" in response.json()["error"]["message"]

    run(test())


def test_a_long_chat_holds_nobody_up() -> None:
    chat = {"messages": [{"role": "user", "content": "\n" * 4_000_000}]}
    started = time.thread_time()
    body = msgspec.json.encode(chat)
    encoding, stalls = time.thread_time() - started, [0.0]

    async def watch() -> None:
        while True:
            before = time.thread_time()
            await asyncio.sleep(0.001)
            stalls.append(time.thread_time() - before)

    def send(url: httpx.URL) -> httpx.Response:
        headers = {"content-type": "application/json"}
        return httpx.post(url, content=body, headers=headers, timeout=60)

    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                url = gateway.client.base_url.join(_PATH)
                watching = asyncio.create_task(watch())
                response = await asyncio.to_thread(send, url)
                await asyncio.sleep(0.01)
                watching.cancel()
            assert response.status_code == 200
            assert upstream.chats[0]["messages"] == chat["messages"]

    run(test())
    assert max(stalls) < encoding


def test_chats_are_charged_to_their_key() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            limits = RateLimits(lambda tenant: TenantLimits(tokens=100, running=1))
            async with serve(upstream.url, keys=("a-key",), limits=limits) as gateway:
                headers = {"authorization": "Bearer a-key"}
                statuses = []
                for body in (CHAT, STREAMED, CHAT):  # each costs 50 tokens
                    response = await gateway.client.post(_PATH, json=body, headers=headers)
                    statuses.append(response.status_code)
                assert statuses == [200, 200, 429]
                assert response.json()["error"]["code"] == "rate_limit_exceeded"
                used = gateway.gateway.service.engine.stats
                assert (used.running, used.prompt_tokens + used.generated_tokens) == (0, 100)

    run(test())


def test_a_keys_chats_at_a_time_are_limited() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            limits = RateLimits(lambda tenant: TenantLimits(running=1))
            async with serve(upstream.url, limits=limits) as gateway:
                upstream.respond = on_chats(lambda: sent(head() + said, pause=3600))
                async with gateway.client.stream("POST", _PATH, json=STREAMED) as response:
                    lines = response.aiter_lines()  # if it were dropped, so were the connection
                    assert await anext(lines) == 'data: {"said": "Hel"}'
                    other = await gateway.client.post(_PATH, json=CHAT)
                    assert other.status_code == 429

    run(test())


def test_keys_have_salts_of_their_own_and_no_word_on_what_is_others() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url, keys=("a", "b")) as gateway:
                for key, own in (("a", ""), ("b", ""), ("a", "mine"), ("b", "mine")):
                    headers = {"authorization": f"Bearer {key}"}
                    body = {**CHAT, "cache_salt": own} if own else CHAT
                    await gateway.client.post(_PATH, json=body, headers=headers)
                salts = [chat["cache_salt"] for chat in upstream.chats]
                assert len(set(salts)) == 4
                assert "mine" not in salts
                body = {**CHAT, "priority": -9}
                response = await gateway.client.post(_PATH, json=body, headers=headers)
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "priority"

    run(test())


def test_a_client_can_not_have_a_server_spared_that_others_need() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.behaviour = "fails"
                for _ in range(5):
                    response = await gateway.client.post(_PATH, json=CHAT)
                    assert "status 500: no" in response.json()["error"]["message"]
                assert gateway.gateway.pool.upstreams[0].usable

    run(test())


def test_what_the_server_refuses_is_told_in_its_words() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                response = await gateway.client.post("/v1/chat/completions", json={})
            assert response.status_code == 400
            assert "refuses the request: messages are missing" in response.text

    run(test())


def test_another_server_takes_over_from_one_that_fails() -> None:
    async def test() -> None:
        with StubUpstream() as one, StubUpstream() as other:
            one.behaviour = "fails"
            async with serve(one.url, other.url) as gateway:
                for number in range(60):  # one of so many is sent to the first server
                    messages = [{"role": "user", "content": f"{number}"}]
                    response = await gateway.client.post(
                        "/v1/chat/completions", json={"messages": messages}
                    )
                    assert response.status_code == 200
            assert one.chats
            assert len(other.chats) == 60

    run(test())


def test_one_that_fails_alone_is_told_in_one_line() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            upstream.behaviour = "fails"
            async with serve(upstream.url) as gateway:
                response = await gateway.client.post("/v1/chat/completions", json=CHAT)
                other = await gateway.client.post(
                    "/v1/chat/completions", json={**CHAT, "model": "gpt"}
                )
            assert response.status_code == 503
            assert "status 500: no" in response.json()["error"]["message"]
            assert other.status_code == 404

    run(test())


def test_the_key_is_checked_before() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url, keys=("a-key",)) as gateway:
                response = await gateway.client.post("/v1/chat/completions", json=CHAT)
            assert response.status_code == 401
            assert upstream.chats == []

    run(test())


def test_the_chats_of_a_job_go_to_one_server_under_a_name_of_its_keys_own() -> None:
    async def test() -> None:
        with StubUpstream() as one, StubUpstream() as other:
            async with serve(one.url, other.url, keys=("a", "b")) as gateway:
                for key in ("a", "b"):
                    for number in range(10):
                        messages = [{"role": "user", "content": f"{number}"}]
                        await gateway.client.post(
                            _PATH, json={"messages": messages, "job_id": "task"},
                            headers={"authorization": f"Bearer {key}"},
                        )  # fmt: skip
                response = await gateway.client.post(
                    _PATH, json={**CHAT, "job_id": 7}, headers={"authorization": "Bearer a"}
                )
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "job_id"
            jobs = [{chat["job_id"] for chat in each.chats} for each in (one, other)]
            assert len(jobs[0] | jobs[1]) == 2
            assert not jobs[0] & jobs[1]
            assert "task" not in jobs[0] | jobs[1]

    run(test())
