"""ask: one request, and everything that may become of it."""

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
import msgspec

OutcomeKind = Literal["complete", "retry", "hung", "failed"]

_RETRYABLE = ("engine_restarting", "server_stopping", "deadline_exceeded", "too_many_connections")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request.

    Attributes:
        kind: "complete": an answer to its end; "retry": an error that says when to try again;
            "hung": nothing within the time; "failed": anything else, which should not happen.
        text: of the answer, as far as it came.
        status: of the response; 0 without one.
        code: of the error, "" without one.
        seconds: until the end.
        cached: share of the prompt's tokens that were not computed; None if that isn't known.
        detail: of a failure.
    """

    kind: OutcomeKind
    text: str = ""
    status: int = 0
    code: str = ""
    seconds: float = 0.0
    cached: float | None = None
    detail: str = ""


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    timeout: float,
    headers: dict[str, str] | None = None,
) -> Outcome:
    """Send a request to ``/v1/completions``, streamed or not, and follow it to its end.

    Args:
        session: sends it.
        url: of the server.
        body: of the request; its answer has one choice.
        timeout: seconds after which it counts as hung.
        headers: of the request.
    """
    started = time.perf_counter()
    pieces: list[str] = []
    try:
        async with (
            asyncio.timeout(timeout),
            session.post(f"{url}/v1/completions", json=body, headers=headers) as response,
        ):
            if response.status != 200:
                outcome = refusal(response.status, response.headers, await response.read())
            elif body.get("stream"):
                outcome = await _stream(response, pieces)
            else:
                outcome = whole_answer(await response.read())
    except TimeoutError:
        outcome = Outcome("hung", text="".join(pieces), detail=f"nothing within {timeout:g} s")
    except (aiohttp.ClientError, OSError) as error:
        outcome = Outcome("failed", text="".join(pieces), detail=f"{type(error).__name__}: {error}")
    seconds = time.perf_counter() - started
    return Outcome(
        outcome.kind, outcome.text, outcome.status, outcome.code, seconds, outcome.cached,
        outcome.detail,
    )  # fmt: skip


def refusal(status: int, headers: Mapping[str, str], body: bytes) -> Outcome:
    """Return what a response is that is no answer."""
    try:
        code = str(msgspec.json.decode(body)["error"]["code"])
        after = int(headers["retry-after"])
    except (msgspec.DecodeError, KeyError, TypeError, ValueError):
        return Outcome("failed", status=status, detail=body[:200].decode(errors="replace"))
    kind: OutcomeKind = "retry" if status in (429, 503) and after >= 1 else "failed"
    return Outcome(kind, status=status, code=code, detail=body[:200].decode(errors="replace"))


async def _stream(response: aiohttp.ClientResponse, pieces: list[str]) -> Outcome:
    """Collect a stream's text in ``pieces``."""
    cached: float | None = None
    async for line in response.content:
        data = line.removeprefix(b"data: ").strip()
        if not data:
            continue
        if data == b"[DONE]":
            return Outcome("complete", "".join(pieces), 200, cached=cached)
        event = msgspec.json.decode(data)
        if "error" in event:
            code = str(event["error"]["code"])
            kind: OutcomeKind = "retry" if code in _RETRYABLE else "failed"
            return Outcome(kind, "".join(pieces), 200, code, detail=data[:200].decode())
        pieces += [choice["text"] for choice in event["choices"]]
        cached = _cached(event) if event.get("usage") else cached
    return Outcome("failed", "".join(pieces), 200, detail="the stream ended without [DONE]")


def whole_answer(body: bytes) -> Outcome:
    """Return a complete answer that was not streamed."""
    answer = msgspec.json.decode(body)
    return Outcome("complete", answer["choices"][0]["text"], 200, cached=_cached(answer))


def _cached(answer: Any) -> float | None:
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    total = usage.get("prompt_tokens")
    return details.get("cached_tokens", 0) / total if total else None
