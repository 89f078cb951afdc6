"""/docs (Swagger UI) and /redoc (Redoc), without requests to third parties. Knows files; knows no endpoint.

The pages load /openapi.json, and need a key if that does.
"""

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from ostro.server.assets import Asset, make_asset, read_folder

_STATIC = Path(__file__).with_name("static")
_REDOC = "vendor/redoc.standalone.js"
# Redoc loads its logo from this URL, which is replaced by an empty picture on reading. The vendored file is unmodified.
FOREIGN_LOGO = b"https://cdn.redoc.ly/redoc/logo-mini.svg"
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
# Redoc injects styles at run time, and searches in a worker created from a blob.
_REDOC_POLICY = _POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'; worker-src blob:")


def router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/docs", methods=["GET", "HEAD"])
    async def docs(http: Request) -> Response:
        return _response(http, "docs.html")

    @routes.api_route("/redoc", methods=["GET", "HEAD"])
    async def redoc(http: Request) -> Response:
        return _response(http, "redoc.html", _REDOC_POLICY)

    @routes.api_route("/docs/{file:path}", methods=["GET", "HEAD"])
    async def docs_file(http: Request, file: str) -> Response:
        return _response(http, file)

    return routes


def _response(http: Request, name: str, policy: str = _POLICY) -> Response:
    asset = assets().get(name)
    if asset is None:
        raise HTTPException(404)
    return asset.response(http.headers, policy=policy)


@cache
def assets() -> dict[str, Asset]:
    """All files by name: three megabytes, read on first use."""
    files = read_folder(_STATIC)
    script = files[_REDOC].content
    return {**files, _REDOC: make_asset(script.replace(FOREIGN_LOGO, b"data:,"), ".js")}
