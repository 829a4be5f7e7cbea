"""ApiClient: a client of the completions API that midfill serves."""

from typing import NoReturn

import httpx
import msgspec

from midfill.lsp.suggestions import (
    CompletionQuery,
    Completions,
    RequestRefusedError,
    ServerBusyError,
    ServerUnreachableError,
)
from midfill.system.machine import is_local

# A server forgets an idle connection after five seconds (uvicorn's default).
_KEEP_ALIVE_SECONDS = 4.0
_CONNECT_SECONDS = 2.0
_ANSWER_SECONDS = 120.0  # requests that nobody waits for any more are cancelled long before

# The server accepts four million characters; it shows the model a window in any case.
_MAX_PREFIX, _MAX_SUFFIX = 2_000_000, 1_000_000


class _Choice(msgspec.Struct):
    text: str


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


class ApiClient:
    """A client of one server. Cancelling a call ends its generation in the server.

    Attributes:
        url: the server's.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = url
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(_ANSWER_SECONDS, connect=_CONNECT_SECONDS),
            limits=httpx.Limits(keepalive_expiry=_KEEP_ALIVE_SECONDS),
            # A proxy for the internet does not lead to this machine.
            trust_env=not is_local(url),
        )

    async def complete(self, query: CompletionQuery) -> Completions:
        """Ask for completions.

        Raises:
            ServerUnreachableError: no server answers, or one that is none of completions.
            ServerBusyError: the server is overloaded, or its engine is being restarted.
            RequestRefusedError: the request can't be served, for example without an API key.
        """
        body = msgspec.json.encode(_body(query))
        try:
            response = await self._post(body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = str(error) or type(error).__name__
            raise ServerUnreachableError(f"no server answers at {self.url} ({reason})") from error
        if response.status_code != 200:
            self._raise_for(response)
        try:
            answer = msgspec.json.decode(response.content, type=_Answer)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ServerUnreachableError(
                f"what answers at {self.url} is no server of completions ({error})"
            ) from error
        usage = answer.usage or _Usage()
        details = usage.prompt_tokens_details or _Details()
        return Completions(
            texts=tuple(choice.text for choice in answer.choices),
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=details.cached_tokens or 0,
        )

    async def is_healthy(self) -> bool:
        """Return whether a server answers that accepts requests."""
        try:
            return (
                await self._client.get(f"{self.url}/health", timeout=_CONNECT_SECONDS)
            ).is_success
        except (httpx.HTTPError, httpx.InvalidURL):
            return False

    async def close(self) -> None:
        """Close all connections."""
        await self._client.aclose()

    async def _post(self, body: bytes) -> httpx.Response:
        url, headers = f"{self.url}/v1/completions", {"content-type": "application/json"}
        try:
            return await self._client.post(url, content=body, headers=headers)
        except httpx.RemoteProtocolError:
            # The server closed an idle connection just as it was used again.
            return await self._client.post(url, content=body, headers=headers)

    def _raise_for(self, response: httpx.Response) -> NoReturn:
        try:
            message = msgspec.json.decode(response.content, type=_ErrorBody).error.message
        except (msgspec.DecodeError, UnicodeDecodeError):
            message = response.reason_phrase
        status = response.status_code
        if status in (429, 503):
            raise ServerBusyError(f"{self.url}: {message}")
        if status in (401, 403):
            raise RequestRefusedError(f"{self.url} refuses the API key: {message}")
        raise RequestRefusedError(f"{self.url} answers {status}: {message}")


def _body(query: CompletionQuery) -> dict[str, object]:
    return {
        "prompt": _sendable(query.caret.prefix[-_MAX_PREFIX:]),
        "suffix": _sendable(query.caret.suffix[:_MAX_SUFFIX]),
        "max_tokens": query.max_tokens,
        "temperature": query.temperature,
        "n": query.count,
        "midfill": {
            "document": _sendable(query.caret.uri),
            "lines": query.lines,
            "suggestion": query.suggestion,
            "min_confidence": "editor" if query.min_confidence is None else query.min_confidence,
        },
    }


def _sendable(text: str) -> str:
    """Return a text without lone surrogates, which UTF-8 can't express."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
