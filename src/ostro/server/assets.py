"""Static files of the server's own pages: read once, and sent with headers that restrict a page to what it needs."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from starlette.datastructures import Headers
from starlette.responses import Response

# Not the system's table: on some machines it maps scripts to text/plain, which browsers refuse.
_MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Cached but always revalidated: a new version's scripts must not run in an old version's page.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str
    etag: str

    def response(self, headers: Headers, *, policy: str) -> Response:
        """The file, or a 304 if the client has it already. `policy` is the Content-Security-Policy."""
        shared = {**_HEADERS, "content-security-policy": policy, "etag": self.etag}
        if _matches(headers.get("if-none-match", ""), self.etag):
            return Response(status_code=304, headers=shared)
        return Response(self.content, headers=shared, media_type=self.media_type)


def read_folder(directory: Path) -> dict[str, Asset]:
    """All files in the directory and below, by their relative paths."""
    files = (path for path in sorted(directory.rglob("*")) if path.suffix in _MEDIA_TYPES)
    return {path.relative_to(directory).as_posix(): _asset(path.read_bytes(), path.suffix) for path in files}


def _asset(content: bytes, suffix: str) -> Asset:
    return Asset(content, _MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def _matches(given: str, etag: str) -> bool:
    known = {each.strip().removeprefix("W/") for each in given.split(",")}
    return etag in known or known == {"*"}
