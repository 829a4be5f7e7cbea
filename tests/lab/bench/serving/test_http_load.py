"""A load on a server: what is sent, in which order, and what is made of the responses."""

import asyncio
import json
import time
from typing import Any

import pytest

from midfill.errors import MidfillError
from midfill_lab.bench.clients import Exchange
from midfill_lab.bench.serving.http_load import NO_RESPONSE, Target, read_reply, run_load
from midfill_lab.bench.serving.metrics import OK, UNSENT
from midfill_lab.bench.serving.workload import TimedRequest


def request(index: int = 0, **fields: Any) -> TimedRequest:
    return TimedRequest(
        **({"index": index, "arrival": 0.0, "prompt": "before", "max_tokens": 3} | fields)
    )


def stream(*events: dict[str, Any], status: int = 200) -> Exchange:
    parts = [
        (float(number), f"data: {json.dumps(event)}\n\n".encode())
        for number, event in enumerate(events, 1)
    ]
    return Exchange(status, 0.5, 9.0, [*parts, (8.0, b"data: [DONE]\n\n")])


def said(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": None} | fields]}


def test_the_body_of_a_completion() -> None:
    body = Target("m").body(request(), "whole prompt")
    assert (body["model"], body["prompt"], body["max_tokens"]) == ("m", "whole prompt", 3)
    assert body["stream"] is body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True}
    assert "suffix" not in body


def test_a_suffix_is_sent_or_laid_out() -> None:
    caret = request(suffix="after")
    assert Target("m").body(caret, "before")["suffix"] == "after"
    laid_out = Target("m", sentinels=("P", "S", "M")).body(caret, "before")
    assert laid_out["prompt"] == "PbeforeSafterM"
    assert "suffix" not in laid_out
    assert "midfill" not in laid_out


def test_hints_are_sent_to_whom_they_are_for() -> None:
    asked = request(program=3, is_last_turn=True, expected_tokens=20, priority=1)
    hints = {"job_id": "program-3", "is_last_step": True, "expected_tokens": 20, "priority": 1}
    assert hints.items() <= Target("m", sends_hints=True).body(asked, "x").items()
    assert not set(hints) & set(Target("m").body(asked, "x"))


def test_a_chat_gets_a_message() -> None:
    target = Target("m", endpoint="chat")
    assert target.path == "/chat/completions"
    assert target.body(request(), "hello")["messages"] == [{"role": "user", "content": "hello"}]


def test_a_tenants_key_and_a_deadline_are_headers() -> None:
    target = Target("m", api_keys={"a": "key-a"})
    assert target.headers(request(tenant="a", deadline=2.5)) == {
        "Authorization": "Bearer key-a",
        "X-Request-Timeout": "2.5",
    }
    assert target.headers(request(tenant="b")) == {}


def test_a_reply_is_timed_by_its_tokens() -> None:
    usage = {"prompt_tokens": 5, "completion_tokens": 3}
    reply = read_reply(
        stream(said("a"), said(""), said("b", finish_reason="length"), {"usage": usage})
    )
    assert (reply.status, reply.text, reply.arrivals) == (OK, "ab", [1.0, 2.0, 3.0])
    assert reply.usage == usage


def test_a_chats_first_message_has_no_token() -> None:
    def delta(**fields: str) -> dict[str, Any]:
        return {"choices": [{"delta": fields, "finish_reason": None}]}

    reply = read_reply(stream(delta(role="assistant", content=""), delta(content="hi")))
    assert (reply.text, reply.arrivals) == ("hi", [2.0])


@pytest.mark.parametrize(
    ("exchange", "status"),
    [
        (Exchange(429, 0, 1, [(1, b'{"error": {"code": "queue_full"}}')]), "queue_full"),
        (Exchange(503, 0, 1, [(1, b'{"error": {"code": null}}')]), "503"),
        (Exchange(502, 0, 1, [(1, b"<html>")]), "502"),
        (Exchange(0, 0, 1, []), NO_RESPONSE),
        (stream(said("a"), {"error": {"code": "deadline_exceeded"}}), "deadline_exceeded"),
        (stream(), "empty"),
    ],
)
def test_what_is_no_answer_has_a_status(exchange: Exchange, status: str) -> None:
    assert read_reply(exchange).status == status


class Server:
    """Answers each prompt with its number, when it may."""

    def __init__(self) -> None:
        self.prompts: list[str] = []
        self.open = asyncio.Event()

    async def exchange(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> Exchange:
        started = time.perf_counter()
        self.prompts.append(body["prompt"])
        number = len(self.prompts)
        if body["prompt"] == "lost":
            raise MidfillError("broke off")
        if body["prompt"].startswith("waits"):
            await self.open.wait()
        else:
            self.open.set()
        usage = {"usage": {"prompt_tokens": 4, "completion_tokens": 1}}
        return stream(said(f"<{number}>"), usage)._replace(
            started=started, ended=time.perf_counter()
        )


def run(*requests: TimedRequest) -> tuple[Server, list[str]]:
    async def send() -> tuple[Server, list[str]]:
        server = Server()
        results = await run_load(server, Target("m"), requests)  # type: ignore[arg-type]
        assert [result.index for result in results] == [each.index for each in requests]
        assert all(result.sent >= result.due for result in results)
        return server, [result.status for result in results]

    return asyncio.run(send())


def test_a_request_is_sent_though_an_earlier_one_has_not_ended() -> None:
    # The first can only end once the second has been sent.
    server, statuses = run(request(0, prompt="waits"), request(1, arrival=0.01, prompt="second"))
    assert server.prompts == ["waits", "second"]
    assert statuses == [OK, OK]


def test_a_later_turn_extends_prompt_and_answer() -> None:
    turn = request(1, prompt=" more", arrival=0.0, program=0, turn=1, follows=0)
    server, statuses = run(request(0, prompt="first", program=0), turn)
    assert server.prompts == ["first", "first<1> more"]
    assert statuses == [OK, OK]


def test_after_a_failure_a_programs_turns_are_not_sent() -> None:
    turns = [request(n, prompt=" more", program=0, turn=n, follows=n - 1) for n in (1, 2)]
    server, statuses = run(request(0, prompt="lost", program=0), *turns)
    assert server.prompts == ["lost"]
    assert statuses == [NO_RESPONSE, UNSENT, UNSENT]
