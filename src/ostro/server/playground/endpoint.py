"""The playground's files over HTTP: read once, each under one exact path. Knows files and headers; knows no keys.

The page needs no key, and holds nothing that one would guard: what it asks of the API carries the key that its user has
typed. A path is looked up as it stands, never joined to a directory.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.server.logging import RequestRecord

PAGE = "/"
FOLDER = "/ui/"

_STATIC = Path(__file__).with_name("static")
_INDEX = "index.html"
# Not the system's table: on some machines a script is plain text there, and browsers refuse that.
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_HEADERS = {
    # Nothing from elsewhere, nothing inline; and no other page may show this one, whose buttons unload models.
    "content-security-policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Kept, but asked for each time: a new version's scripts must not meet an old one's page.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str


def read_assets(directory: Path = _STATIC) -> dict[str, Asset]:
    """Path -> file, for all files that the page is made of."""
    files = (path for path in sorted(directory.rglob("*")) if path.suffix in _MEDIA_TYPES)
    names = {path: path.relative_to(directory).as_posix() for path in files}
    return {PAGE if name == _INDEX else FOLDER + name: _asset(path) for path, name in names.items()}


def _asset(path: Path) -> Asset:
    content = path.read_bytes()
    return Asset(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


class PlaygroundEndpoint:
    """ASGI middleware, outside the one that asks for keys: answers GET and HEAD of the page's files."""

    def __init__(self, app: ASGIApp, assets: Mapping[str, Asset]) -> None:
        self.app = app
        self.assets = assets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        wanted = scope["type"] == "http" and scope["method"] in ("GET", "HEAD")
        asset = self.assets.get(scope["path"]) if wanted else None
        if asset is None:
            await self.app(scope, receive, send)
            return
        record = scope.get("state", {}).get("record")
        if isinstance(record, RequestRecord):
            record.route = PAGE if scope["path"] == PAGE else FOLDER + "{file}"
        await _response(asset, Headers(scope=scope))(scope, receive, send)


def _response(asset: Asset, headers: Headers) -> Response:
    shared = {**_HEADERS, "etag": asset.etag}
    if _matches(headers.get("if-none-match", ""), asset.etag):
        return Response(status_code=304, headers=shared)
    return Response(asset.content, headers=shared, media_type=asset.media_type)


def _matches(given: str, etag: str) -> bool:
    known = {each.strip().removeprefix("W/") for each in given.split(",")}
    return etag in known or known == {"*"}
