"""GET /, /planner, /dashboard and their files. Only the dashboard, with its metrics, needs a key.

Pages may load what this server sends and nothing else. Styles that scripts insert carry a nonce,
which is new for each response.
"""

import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter, HTTPException, Request
from fastapi.responses import Response

_BUILT = Path(__file__).parent / "built"
_NONCE = "{{nonce}}"  # in the pages, where the response's nonce goes
_MEDIA_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
_HEADERS = {
    "cache-control": "no-cache",  # ask whether it has changed, since names stay
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class BuiltFile:
    """A file of the built pages.

    Attributes:
        data: its content.
        media_type: of the response.
        etag: changes with the content.
    """

    data: bytes
    media_type: str
    etag: str


def routes() -> APIRouter:
    """Return the router of the playground, of what explains it, and of the pages' files."""
    router = APIRouter(include_in_schema=False)
    files = {path.name: _read(path) for path in _BUILT.iterdir() if path.suffix in _MEDIA_TYPES}

    @router.get("/")
    async def playground() -> Response:
        return _page(files["playground.html"])

    @router.get("/planner")
    async def planner() -> Response:
        return _page(files["planner.html"])

    @router.get("/pages/{name}")
    async def file(name: str, request: Request) -> Response:
        found = files.get(name)
        if found is None or found.media_type == "text/html":
            raise HTTPException(404)
        headers = {**_HEADERS, "etag": found.etag}
        if request.headers.get("if-none-match") == found.etag:
            return Response(status_code=304, headers=headers)
        return Response(found.data, headers=headers, media_type=found.media_type)

    return router


def dashboard_routes() -> APIRouter:
    """Return the router of the dashboard."""
    router = APIRouter(include_in_schema=False)
    page = _read(_BUILT / "dashboard.html")

    @router.get("/dashboard")
    async def dashboard() -> Response:
        return _page(page)

    return router


def _read(path: Path) -> BuiltFile:
    data = path.read_bytes()
    etag = f'"{hashlib.sha256(data).hexdigest()[:24]}"'
    return BuiltFile(data, _MEDIA_TYPES[path.suffix], etag)


def _page(page: BuiltFile) -> Response:
    nonce = secrets.token_urlsafe(16)
    policy = (
        "default-src 'none'; script-src 'self'; connect-src 'self'; img-src 'self' data:;"
        f" style-src 'self' 'nonce-{nonce}'; base-uri 'none'; form-action 'none';"
        " frame-ancestors 'none'"
    )
    return Response(
        page.data.replace(_NONCE.encode(), nonce.encode()),
        headers={**_HEADERS, "content-security-policy": policy},
        media_type=page.media_type,
    )
