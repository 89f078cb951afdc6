"""The playground's files over HTTP: read once, each under one exact path. Knows files and headers; knows no keys.

The page needs no key and contains nothing secret: its API calls carry the key that the user typed. A path is looked up
as it is, never joined to a directory.
"""

from collections.abc import Mapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.server.assets import Asset, read_folder
from ostro.server.telemetry.record import RequestRecord

PAGE = "/"
FOLDER = "/ui/"

_STATIC = Path(__file__).with_name("static")
_INDEX = "index.html"
# Nothing from elsewhere, nothing inline; and no other page may show this one, whose buttons unload models.
_POLICY = "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"


def read_assets(directory: Path = _STATIC) -> dict[str, Asset]:
    """All files of the page, by path."""
    return {PAGE if name == _INDEX else FOLDER + name: asset for name, asset in read_folder(directory).items()}


class PlaygroundEndpoint:
    """ASGI middleware, outside authentication: answers GET and HEAD requests for the page's files."""

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
        await asset.response(Headers(scope=scope), policy=_POLICY)(scope, receive, send)
