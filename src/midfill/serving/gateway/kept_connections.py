"""post: send a request to a server that may have closed the connections that are kept for it.

Servers close connections that were idle for some seconds, llama.cpp's after five. A request that is
being sent just then gets no answer, and its server has done nothing for it. An HTTP client sends
only those again that change nothing, which a POST does not say of itself. Completions do not.
"""

from typing import Any

import aiohttp


class _Attempt:
    """Whether a request was sent over a connection that an earlier one had used."""

    reused = False


def trace_connections() -> aiohttp.TraceConfig:
    """Return what a session needs for ``post``."""

    async def reuse(session: aiohttp.ClientSession, context: Any, params: Any) -> None:
        if isinstance(context.trace_request_ctx, _Attempt):
            context.trace_request_ctx.reused = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(reuse)
    return config


async def post(session: aiohttp.ClientSession, url: str, **options: Any) -> aiohttp.ClientResponse:
    """Send a POST, and again as long as kept connections turn out to be closed.

    Args:
        session: made with ``trace_connections``.
        url: where to.
        options: those of ``session.post``.

    Raises:
        aiohttp.ClientError: there is no answer.
    """
    while True:
        attempt = _Attempt()
        try:
            return await session.post(url, trace_request_ctx=attempt, **options)
        except aiohttp.ClientConnectionError as error:
            if not attempt.reused or isinstance(error, TimeoutError):
                raise
