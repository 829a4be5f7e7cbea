"""Dialect: what the module of one client API brings to the server."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from fastapi import APIRouter, Request

from midfill.serving.server.responses import ErrorBody, openai_error_body
from midfill.serving.server.service import ModelService

TenantOf = Callable[[Request], Awaitable[str]]
"""A FastAPI dependency that gives the caller's tenant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One client API; ``serving/server/app.py`` lists them all.

    Attributes:
        routes: returns the router of its endpoints.
        bodies: its request bodies, described in the OpenAPI document.
        error_body: returns the JSON body of an error at one of its paths.
        prefix: where a path that nobody has is this API's as well, so that its client can read the
            error; None has no such place.
        queued: its paths where requests are queued for the engine.
    """

    routes: Callable[[ModelService, TenantOf], APIRouter]
    bodies: tuple[type[msgspec.Struct], ...] = ()
    error_body: ErrorBody = openai_error_body
    prefix: str | None = None
    queued: tuple[str, ...] = ()
