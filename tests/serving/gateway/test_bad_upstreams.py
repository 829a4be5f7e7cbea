"""Servers behind a gateway that are down, slow, wrong or full: one clear line, nothing hangs."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from gateway_serving import run, serve
from hostile_answers import EVENTS, WHOLE, bomb, endless, event, head, sent, split, whole
from stub_upstream import Behaviour, StubModel, StubUpstream

from midfill.errors import MidfillError
from midfill.frontend.prompt import PromptSource
from midfill.infill.request import InfillRequest
from midfill.serving.gateway import prompt_answers

REQUEST = {"prompt": "a =", "suffix": "\n"}
COMMENTS = b"10000\r\n%s\r\n" % (b":\n" * 32_768)


async def assert_refused(message: str, *urls: str, **options: str) -> None:
    """Assert that no gateway can be opened, and that the message says why."""
    with pytest.raises(MidfillError, match=re.escape(message)):
        await serve(*urls, **options).__aenter__()


@pytest.mark.parametrize(
    ("behaviour", "status", "message"),
    [
        ("silent", 503, "has sent nothing for 3 s"),
        ("garbage", 503, "sent an event that is no JSON"),
        ("html", 503, "answers /v1/completions with text/html instead of a stream of events"),
        ("closes", 503, "closed the connection early"),
        ("error-event", 503, "failed on the request: CUDA is out of luck"),
        ("endless-line", 503, "bytes, which no such answer has"),
        ("fails", 503, "answers /v1/completions with status 500: no"),
        ("unauthorised", 503, "refuses the gateway's API key (--upstream-key)"),
        ("unknown-model", 503, "no such model: The model does not exist."),
        ("busy", 429, "is overloaded (status 429): no"),
        ("refuses", 400, "maximum context length is 16 tokens"),
    ],
)
@pytest.mark.parametrize("others", [0, 1])
def test_the_client_is_told_or_another_server_answers(
    behaviour: Behaviour, status: int, message: str, others: int
) -> None:
    async def test() -> None:
        with StubUpstream() as bad, StubUpstream() as good:
            urls = [bad.url, good.url] if others else [bad.url]
            seconds, wanted = (3, 1) if behaviour == "silent" else (60, 3)
            async with serve(*urls, upstream_timeout=seconds) as gateway:
                bad.behaviour = behaviour
                for number in range(60):  # of so many documents each server has one
                    named = {"midfill": {"document": f"{number}"}}
                    response = await gateway.client.post(
                        "/v1/completions", json={**REQUEST, **named}
                    )
                    if others and behaviour != "refuses":
                        assert response.status_code == 200, response.text
                        assert response.json()["choices"][0]["text"] == " x + 1"
                    elif bad.received and not others and number == 0:
                        error = response.json()["error"]
                        assert response.status_code == status, response.text
                        assert message in error["message"]
                        assert "\n" not in error["message"]
                    if len(bad.received) >= wanted:
                        break
                assert bad.received
                if behaviour not in ("refuses", "busy"):
                    counted = next(
                        each for each in gateway.gateway.pool.upstreams if each.address == bad.url
                    )
                    assert counted.failures == len(bad.received)

    run(test())


def completions(
    answer: Callable[[], AsyncIterator[bytes]],
) -> Callable[[str, Any], AsyncIterator[bytes] | None]:
    """Return what answers completions so, and everything else as ever."""
    return lambda path, body: answer() if path == "/v1/completions" else None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: sent(head(307, location="http://127.0.0.1:1/")), "redirects to"),
        (lambda: sent(head(303, location="/elsewhere")), "redirects to '/elsewhere'"),
        (lambda: sent(bomb(EVENTS, 64)), "sends its answer compressed ('gzip'), unasked"),
        (lambda: sent(head(), b"data: " + b"[" * 5000 + b"\n\n"), "an event that is no JSON"),
        (lambda: endless(head(), b": still here\n" * 4096, 10_000), "which no such answer has"),
        (lambda: endless(head(), event("x" * 50_000), 10_000), "which no such answer has"),
        (lambda: sent(head(content_length=500) + event("x", "stop")), None),
        (lambda: sent(head(content_length=9) + event("x", "stop")), "HTTP as it should"),
        (lambda: sent(head(kind="text/\x1b[2J\n")), "instead of a stream of events"),
        (lambda: sent(head(x="y" * 100_000)), "doesn't speak HTTP as it should"),
    ],
    ids=[
        "307",
        "303",
        "gzip",
        "nested",
        "comments",
        "too-much",
        "longer",
        "shorter",
        "kind",
        "head",
    ],
)
def test_what_is_no_answer_is_one_line(
    answer: Callable[[], AsyncIterator[bytes]], message: str | None
) -> None:
    async def test() -> None:
        with StubUpstream() as upstream, StubUpstream() as elsewhere:
            async with serve(upstream.url) as gateway:
                upstream.respond = completions(answer)
                response = await gateway.client.post("/v1/completions", json=REQUEST)
                if message is None:  # all that was asked for had come
                    assert response.json()["choices"][0]["text"] == "x"
                else:
                    assert response.status_code == 503, response.text
                    assert message in response.json()["error"]["message"]
                    assert response.json()["error"]["message"].isprintable()
                    assert "choices" not in response.text  # nor in the log
            assert elsewhere.received == []

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        head(199, content_length=9_000_000) + b"x" * 5_000_000,
        head(transfer_encoding="chunked")
        + (b"10000\r\n%s\r\n" % (b":\n" * 32_768)) * 3
        + b"zz\r\n",
    ],
    ids=["interim", "chunks"],
)
def test_an_answer_for_which_aiohttp_waits_for_ever_is_none(answer: bytes) -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url, upstream_timeout=0.5) as gateway:
                upstream.respond = completions(lambda: sent(answer))
                for _ in range(3):
                    status, _ = await gateway.refused(**REQUEST)
                    assert status == 503

    run(test())


def test_what_nobody_waits_for_does_not_last_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_answers, "_BACKGROUND_SECONDS", 0.3)
    trickling: list[str] = []

    def answer(path: str, body: Any) -> AsyncIterator[bytes] | None:
        if path != "/v1/completions" or body["max_tokens"] > 1:
            return None
        trickling.append(path)
        return sent(head(), *[b": wait\n"] * 10_000, pause=0.02)

    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url, idle_prefill=True) as gateway:
                upstream.respond = answer
                service = gateway.gateway.service
                source = PromptSource(text=InfillRequest(prefix="a =", suffix="\n"))
                service.prefill((await service.encode([source]))[0], "")
                engine = service.engine
                while not trickling or engine.stats.running:
                    await asyncio.sleep(0.01)

    run(test())


def test_what_an_answer_costs_is_not_more_than_was_asked_for() -> None:
    usage = {"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2**39}}
    lie = b"data: " + json.dumps(usage).encode() + b"\n\n"

    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.respond = completions(lambda: sent(head() + event("x", "stop") + lie))
                answer = await gateway.complete(**REQUEST, max_tokens=7)
                assert answer["usage"]["completion_tokens"] == 7

    run(test())


def test_ids_that_are_none_are_left_out() -> None:
    choice = {"index": 0, "text": "x", "token_ids": [2**70], "finish_reason": "stop"}
    lie = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"

    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.respond = completions(lambda: sent(head() + lie))
                answer = await gateway.complete(**REQUEST, return_token_ids=True)
                assert answer["choices"][0]["text"] == "x"

    run(test())


@pytest.mark.parametrize("parts", [2, 1000])
def test_what_a_server_says_of_itself_may_come_in_parts(parts: int) -> None:
    models = whole({"data": [{"id": "stub-coder", "owned_by": "vllm", "note": "x" * 5000}]})

    async def test() -> None:
        with StubUpstream() as upstream:
            upstream.respond = lambda path, body: (
                sent(*split(models, parts)) if path == "/v1/models" else None
            )
            async with serve(upstream.url) as gateway:
                await gateway.gateway.pool.check()
                await gateway.complete(**REQUEST)

    run(test())


def test_a_refusal_that_comes_in_parts_is_told_whole() -> None:
    data = json.dumps({"error": {"message": "no " * 90}}).encode()
    answer = head(400, WHOLE, content_length=len(data)) + data

    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.respond = completions(lambda: sent(*split(answer, 1000)))
                _, message = await gateway.refused(**REQUEST)
                assert message.count("no") == 90

    run(test())


@pytest.mark.parametrize(
    "answer",
    [
        lambda: sent(head(kind=WHOLE) + b"[" * 100_000),
        lambda: endless(head(kind=WHOLE) + b'{"data":[', b'{"id":"x"},' * 10_000, 100),
        lambda: sent(head(kind=WHOLE) + b'{"data":[{"id":"' + b"x" * 100_000 + b'"}]}'),
        lambda: sent(bomb(WHOLE, 64)),
        lambda: sent(head(307, location="/v1/models")),
    ],
    ids=["nested", "endless", "long", "gzip", "redirect"],
)
def test_health_checks_go_on_whatever_a_server_says(
    answer: Callable[[], AsyncIterator[bytes]],
) -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                pool = gateway.gateway.pool
                upstream.respond = lambda path, body: answer() if path == "/v1/models" else None
                await pool.check()
                assert not pool.ready
                assert len(pool.upstreams[0].fault or "") < 600
                upstream.respond = None
                await pool.check()
                assert pool.ready

    run(test())


def test_a_server_may_close_connections_that_were_idle() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.requests_per_connection = 1
                for _ in range(4):
                    response = await gateway.client.post("/v1/completions", json=REQUEST)
                    assert response.status_code == 200, response.text
                assert len(upstream.received) == 4
                assert gateway.gateway.pool.upstreams[0].failures == 0

    run(test())


def test_a_server_that_breaks_off_midway_is_not_replaced_by_another() -> None:
    async def test() -> None:
        with StubUpstream() as first, StubUpstream() as second:
            first.behaviour = second.behaviour = "closes-midway"
            async with serve(first.url, second.url) as gateway:
                events = await gateway.stream(**REQUEST)
            assert events[0]["choices"][0]["text"] == " x"
            assert "closed the connection early" in events[-1]["error"]["message"]
            assert len(first.received) + len(second.received) == 1

    run(test())


def test_one_that_goes_down_and_comes_back() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.stop()
                await gateway.gateway.pool.check()
                health = await gateway.client.get("/health")
                assert (health.status_code, health.json()) == (503, {"status": "restarting"})
                status, message = await gateway.refused(**REQUEST)
                assert status == 503
                assert f"{upstream.url} can't be reached (Connection refused)" in message
                upstream.start()
                await gateway.gateway.pool.check()
                assert (await gateway.client.get("/health")).status_code == 200
                await gateway.complete(**REQUEST)

    run(test())


def test_one_that_changes_its_model_gets_no_requests() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as gateway:
                upstream.model.name = "another"
                await gateway.gateway.pool.check()
                _, message = await gateway.refused(**REQUEST)
                assert "serves another now instead of stub-coder" in message
                assert upstream.received == []

    run(test())


def test_two_gateways_share_one_server() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            async with serve(upstream.url) as one, serve(upstream.url) as other:
                answers = await asyncio.gather(*(each.complete(**REQUEST) for each in (one, other)))
            assert [each["choices"][0]["text"] for each in answers] == [" x + 1"] * 2
            # Without keys everybody shares the server's cache, as without a gateway.
            assert max(each["midfill"]["cached_tokens"] for each in answers) > 0

    run(test())


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9", "can't be reached (Connection refused)"),
        ("127.0.0.1:9", "--upstream takes a URL"),
        ("http://user:key@127.0.0.1:9", "keys belong in --upstream-key"),
    ],
)
def test_an_address_without_a_server_is_one_line(url: str, message: str) -> None:
    run(assert_refused(message, url))


def test_servers_of_different_models_are_refused() -> None:
    async def test() -> None:
        with StubUpstream(StubModel(name="a")) as one, StubUpstream(StubModel(name="b")) as other:
            await assert_refused("all servers behind a gateway serve one model", one.url, other.url)

    run(test())


def test_a_model_that_no_server_has_is_refused() -> None:
    async def test() -> None:
        with StubUpstream() as upstream:
            await assert_refused("serves stub-coder, not other", upstream.url, model="other")

    run(test())
