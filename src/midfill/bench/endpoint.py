"""An OpenAI-style completions endpoint as a load generator sees it."""

import json
import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import msgspec

from midfill.errors import MidfillError


class Measurement(msgspec.Struct, frozen=True):
    """One request, measured from outside.

    Attributes:
        ttft_seconds: from sending to the first token.
        total_seconds: from sending to the end.
        prompt_tokens, cached_tokens, completion_tokens: as the server's usage says.
        text: the completion.
        arrivals: when each message with text came, in seconds of ``time.perf_counter``.
    """

    ttft_seconds: float
    total_seconds: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    text: str
    arrivals: tuple[float, ...] = ()

    @property
    def computed_tokens(self) -> int:
        """Prompt tokens that were not in the cache."""
        return self.prompt_tokens - self.cached_tokens


class Endpoint:
    """Sends streaming completion requests to ``base_url`` (which ends in ``/v1``).

    Attributes:
        sentinels: texts of the model's PRE, SUF and MID tokens, where the user named them.
    """

    def __init__(self, base_url: str, api_key: str | None = None, timeout: float = 600.0) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url.rstrip("/")
        self.sentinels: tuple[str, str, str] | None = None
        self._client = httpx.AsyncClient(
            base_url=self.base_url,
            headers=headers,
            timeout=timeout,
            # A connection each: a server may close an idle one just as it is used again.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def __aenter__(self) -> "Endpoint":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def model(self) -> str:
        """Name of the first model served.

        Raises:
            MidfillError: nobody answers there.
        """
        try:
            response = await self._client.get("/models")
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, KeyError, IndexError, ValueError) as error:
            raise MidfillError(f"no OpenAI-style server at {self.base_url}: {error}") from error

    async def complete(self, payload: dict[str, Any]) -> Measurement:
        """POST /completions as a stream and time it.

        Raises:
            MidfillError: the server refused the request or broke off.
        """
        body = {**payload, "stream": True, "stream_options": {"include_usage": True}}
        started = time.perf_counter()
        parts: list[tuple[float, bytes]] = []
        try:
            async with self._client.stream("POST", "/completions", json=body) as response:
                if response.status_code != 200:
                    detail = (await response.aread()).decode(errors="replace")
                    raise MidfillError(f"{self.base_url} answered {response.status_code}: {detail}")
                # Read later: what is measured shares its cores with whoever measures.
                async for part in response.aiter_bytes():
                    parts.append((time.perf_counter(), part))
        except httpx.HTTPError as error:
            raise MidfillError(f"{self.base_url} broke off: {error!r}") from error
        ended = time.perf_counter()
        arrivals: list[float] = []
        pieces: list[str] = []
        usage: dict[str, Any] = {}
        for arrived, event in _events(parts):
            if event.get("choices"):
                arrivals.append(arrived)
                pieces.append(event["choices"][0].get("text") or "")
            usage = event.get("usage") or usage
        details = usage.get("prompt_tokens_details") or {}
        return Measurement(
            ttft_seconds=(arrivals[0] if arrivals else ended) - started,
            total_seconds=ended - started,
            prompt_tokens=int(usage.get("prompt_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens") or 0),
            completion_tokens=int(usage.get("completion_tokens", 0)),
            text="".join(pieces),
            arrivals=tuple(arrivals),
        )


def _events(parts: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, dict[str, Any]]]:
    """Server-sent events, with the time at which the end of each had come."""
    rest = b""
    for arrived, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield arrived, json.loads(data)
