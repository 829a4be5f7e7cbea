"""A load on a server, open loop: requests are sent at their time, whatever became of earlier ones.

Only the later turns of a program wait, as an agent does: for the end of the turn before, and for
the tool. The server may be midfill's or any other with OpenAI's API. One that takes no suffix gets
FIM prompts laid out here.
"""

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from midfill.errors import MidfillError
from midfill_lab.bench.clients import Exchange, HttpClient, Sentinels, stream_events
from midfill_lab.bench.serving.metrics import OK, UNSENT, RequestResult, request_result
from midfill_lab.bench.serving.workload import TimedRequest, followers, next_turn

Endpoint = Literal["completions", "chat"]
NO_RESPONSE = "no response"
"""Status of requests whose connection failed or broke off."""

_PATHS: dict[Endpoint, str] = {"completions": "/completions", "chat": "/chat/completions"}


@dataclass(frozen=True)
class Target:
    """How requests are sent to a server.

    Attributes:
        model: its model's name.
        endpoint: "completions", or "chat", where a prompt is a message.
        sentinels: PRE, SUF and MID, for a server that takes no suffix; None sends the suffix.
        api_keys: by tenant; tenants without one send none.
        sends_hints: whether requests carry what midfill's schedulers look at; other servers may
            refuse such fields.
    """

    model: str
    endpoint: Endpoint = "completions"
    sentinels: Sentinels | None = None
    api_keys: Mapping[str, str] = field(default_factory=dict)
    sends_hints: bool = False

    @property
    def path(self) -> str:
        """The endpoint's path after the base URL."""
        return _PATHS[self.endpoint]

    def body(self, request: TimedRequest, prompt: str) -> dict[str, Any]:
        """Return a request's body.

        Args:
            request: what is asked.
            prompt: its whole prompt, that of earlier turns included.
        """
        fields: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.sends_hints:
            fields |= request.hints
        if request.suffix is not None:
            if self.sentinels is None:
                return fields | {
                    "prompt": prompt, "suffix": request.suffix, "midfill": {"trim": False}
                }  # fmt: skip
            before, after, middle = self.sentinels
            prompt = f"{before}{prompt}{after}{request.suffix}{middle}"
        if self.endpoint == "chat":
            return fields | {"messages": [{"role": "user", "content": prompt}]}
        return fields | {"prompt": prompt}

    def headers(self, request: TimedRequest) -> dict[str, str]:
        """Return a request's headers."""
        found = {}
        if (key := self.api_keys.get(request.tenant)) is not None:
            found["Authorization"] = f"Bearer {key}"
        if request.deadline is not None:
            found["X-Request-Timeout"] = f"{request.deadline:g}"
        return found


async def run_load(
    client: HttpClient,
    target: Target,
    requests: Sequence[TimedRequest],
    on_sent: Callable[[int], None] = lambda count: None,
) -> list[RequestResult]:
    """Send a load to a server.

    Args:
        client: of the server.
        target: how it is asked.
        requests: the load.
        on_sent: called with how many requests have been sent.

    Returns:
        What became of each request, in the load's order.
    """
    return await _Load(client, target, requests, on_sent).run()


class _Load:
    """One run of a load; arguments as in ``run_load``."""

    def __init__(
        self,
        client: HttpClient,
        target: Target,
        requests: Sequence[TimedRequest],
        on_sent: Callable[[int], None],
    ) -> None:
        self._client, self._target, self._requests = client, target, requests
        self._followers = followers(requests)
        self._on_sent = on_sent
        self._sent = 0
        self._exchanges: dict[int, tuple[float, Exchange]] = {}  # with when they were due
        self._dropped: dict[int, float] = {}  # turns that were not sent, with when that was clear

    async def run(self) -> list[RequestResult]:
        """Run it to the end of its last answer."""
        self._started = time.perf_counter()
        first = sorted((each for each in self._requests if not each.turn), key=_arrival)
        async with asyncio.TaskGroup() as tasks:
            for request in first:
                await self._sleep_until(request.arrival)
                tasks.create_task(self._run_program(request))
        return [self._result(request) for request in self._requests]

    async def _run_program(self, request: TimedRequest) -> None:
        """Send a request, and the turns that follow it."""
        due, prompt = request.arrival, request.prompt
        while True:
            exchange = await self._send(request, prompt)
            self._exchanges[request.index] = due, exchange
            turn = self._followers.get(request.index)
            if turn is None:
                return
            ended = exchange.ended - self._started
            reply = read_reply(exchange)
            if reply.status != OK:
                self._drop(turn, ended)
                return
            prompt = next_turn(prompt, reply.text, turn)
            due = ended + turn.arrival
            await self._sleep_until(due)
            request = turn

    async def _sleep_until(self, seconds: float) -> None:
        left = self._started + seconds - time.perf_counter()
        if left > 0:
            await asyncio.sleep(left)

    async def _send(self, request: TimedRequest, prompt: str) -> Exchange:
        """Send a request and follow it to its end; nothing is decoded yet."""
        self._sent += 1
        self._on_sent(self._sent)
        target, sent = self._target, time.perf_counter()
        body, headers = target.body(request, prompt), target.headers(request)
        try:
            return await self._client.exchange(target.path, body, headers)
        except MidfillError:
            return Exchange(0, sent, time.perf_counter(), [])

    def _drop(self, turn: TimedRequest | None, now: float) -> None:
        """Note that a turn and those after it are not sent."""
        while turn is not None:
            self._dropped[turn.index] = now
            turn = self._followers.get(turn.index)

    def _result(self, request: TimedRequest) -> RequestResult:
        if (now := self._dropped.get(request.index)) is not None:
            return request_result(request, due=now, sent=now, ended=now, status=UNSENT)
        due, exchange = self._exchanges[request.index]
        reply, since = read_reply(exchange), self._started
        details = reply.usage.get("prompt_tokens_details") or {}
        return request_result(
            request,
            due=due,
            sent=exchange.started - since,
            arrivals=[arrived - since for arrived in reply.arrivals],
            ended=exchange.ended - since,
            prompt_tokens=int(reply.usage.get("prompt_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(reply.usage.get("completion_tokens", 0)),
            status=reply.status,
        )


@dataclass
class Reply:
    """What a response says.

    Attributes:
        status: as in ``RequestResult``.
        arrivals: when messages with tokens came.
        text: of the answer.
        usage: the server's.
    """

    status: str
    arrivals: list[float] = field(default_factory=list)
    text: str = ""
    usage: dict[str, Any] = field(default_factory=dict)


def read_reply(exchange: Exchange) -> Reply:
    """Return what a streamed response says, of a completion or a chat."""
    if exchange.status == 0:
        return Reply(NO_RESPONSE)
    if exchange.status != 200:
        return Reply(_error_code(exchange))
    reply = Reply(OK)
    for arrived, event in stream_events(exchange.parts):
        if error := event.get("error"):
            reply.status = str(error.get("code") or error.get("type") or "error")
        if choices := event.get("choices"):
            delta = choices[0].get("delta") or {}
            text = choices[0].get("text") or delta.get("content") or ""
            is_end = choices[0].get("finish_reason") is not None
            if text or not (is_end or "role" in delta):  # tokens may have no text yet
                reply.arrivals.append(arrived)
                reply.text += text
        reply.usage = event.get("usage") or reply.usage
    if reply.status == OK and not (reply.arrivals or reply.usage.get("completion_tokens")):
        reply.status = "empty"
    return reply


def _error_code(exchange: Exchange) -> str:
    """Return the code of an error, or the status where the body names none."""
    try:
        error = json.loads(b"".join(part for _, part in exchange.parts))["error"]
        return str(error["code"] or exchange.status)
    except (ValueError, KeyError, TypeError):
        return str(exchange.status)


def _arrival(request: TimedRequest) -> float:
    return request.arrival
