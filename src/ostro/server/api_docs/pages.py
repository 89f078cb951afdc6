"""/docs: Swagger UI, without requests to third parties. Knows files; knows no endpoint.

The page and its files need no key. /openapi.json, which the page loads, may need one, which the page then asks for.
"""

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from ostro.server.assets import Asset, read_folder

_STATIC = Path(__file__).with_name("static")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def router() -> APIRouter:
    routes = APIRouter(include_in_schema=False)

    @routes.api_route("/docs", methods=["GET", "HEAD"])
    async def docs(http: Request) -> Response:
        return _response(http, "docs.html")

    @routes.api_route("/redoc", methods=["GET", "HEAD"])
    async def redoc() -> Response:
        # The path of the second page in FastAPI's own servers.
        return RedirectResponse("docs", 308)

    @routes.api_route("/docs/{file:path}", methods=["GET", "HEAD"])
    async def docs_file(http: Request, file: str) -> Response:
        return _response(http, file)

    return routes


def _response(http: Request, name: str) -> Response:
    asset = assets().get(name)
    if asset is None:
        raise HTTPException(404)
    return asset.response(http.headers, policy=_POLICY)


@cache
def assets() -> dict[str, Asset]:
    """All files by name: two megabytes, read on first use."""
    return read_folder(_STATIC)
