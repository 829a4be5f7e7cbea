"""Gateways in this process, in front of servers with real sockets."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn

from midfill.serving.gateway.gateway import Gateway, open_gateway
from midfill.serving.gateway.options import GatewayOptions
from midfill.serving.server.auth import KeyRing
from midfill.serving.server.limits import RateLimits
from midfill.serving.server.listening import bind


@dataclass
class Served:
    """A gateway that listens, and a client of it."""

    gateway: Gateway
    client: httpx.AsyncClient

    async def complete(self, **body: object) -> dict[str, Any]:
        """Return the response of a completion that must succeed."""
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    async def refused(self, **body: object) -> tuple[int, str]:
        """Return status and message of a completion that must fail."""
        response = await self.client.post("/v1/completions", json=body)
        assert response.status_code >= 400, response.text
        return response.status_code, response.json()["error"]["message"]

    async def stream(self, **body: object) -> list[dict[str, Any]]:
        """Return the events of a streamed completion."""
        async with self.client.stream(
            "POST", "/v1/completions", json={**body, "stream": True}
        ) as response:
            lines = [line async for line in response.aiter_lines()]
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@contextlib.asynccontextmanager
async def serve(
    *upstreams: str,
    keys: tuple[str, ...] = (),
    limits: RateLimits | None = None,
    **options: Any,
) -> AsyncIterator[Served]:
    """Serve a gateway on a free port of the loopback interface."""
    ring = KeyRing(keys)
    given = GatewayOptions(upstreams=upstreams, **{"wait": 0.0, "upstream_timeout": 60, **options})
    async with open_gateway(given, ring.tenants, limits) as gateway:
        config = uvicorn.Config(gateway.app(ring), log_config=None, lifespan="off")
        server = uvicorn.Server(config)
        with bind("127.0.0.1", 0) as listener:
            listener.listen()
            port = listener.getsockname()[1]
            task = asyncio.create_task(server.serve(sockets=[listener]))
            async with httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False
            ) as client:
                try:
                    yield Served(gateway, client)
                finally:
                    server.should_exit = True
                    await task


def run(work: Coroutine[Any, Any, None]) -> None:
    """Run a test's coroutine to its end."""

    async def limited() -> None:
        await asyncio.wait_for(work, 120)

    asyncio.run(limited())
