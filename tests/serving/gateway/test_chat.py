"""Chats are passed on as they are."""

from typing import Any

from gateway_serving import run, serve
from stub_upstream import StubUpstream

CHAT: dict[str, Any] = {
    "model": "stub-coder",
    "messages": [{"role": "user", "content": "Hello"}],
    "tools": [{"type": "function", "function": {"name": "look"}}],
}


def test_a_chat_reaches_the_server_whole_and_its_answer_the_client() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                response = await gateway.client.post("/v1/chat/completions", json=CHAT)
            assert upstream.chats == [CHAT]
            assert response.headers["content-type"] == "text/event-stream"
            assert response.text == 'data: {"said": "Hello"}\n\ndata: {"said": " there"}\n\n'

    run(test())


def test_what_the_server_refuses_is_told_in_its_words() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                response = await gateway.client.post("/v1/chat/completions", json={})
            assert response.status_code == 400
            assert response.json() == {"error": {"message": "messages are missing"}}

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
