"""GET / without --ui: says that the server is running, where its API is, and how to get the playground."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response

_HINTS = {
    "message": "Ostro is running. For a page to chat in, start it with: ostro serve --ui",
    "api": "/v1",
    "models": "/v1/models",
    "docs": "/docs",
}
_PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>Ostro</title>
<h1>Ostro is running</h1>
<p>The API is at <code>/v1</code>: <a href="/docs">its documentation</a>, <a href="/v1/models">its models</a>.</p>
<p>For a page to chat in, start the server with <code>ostro serve --ui</code>.</p>
</html>
"""
_POLICY = {"content-security-policy": "default-src 'none'; img-src data:; frame-ancestors 'none'; base-uri 'none'"}


def router() -> APIRouter:
    routes = APIRouter()

    @routes.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def root(http: Request) -> Response:
        """For people with a browser or curl. Reveals nothing about the model, because it needs no key."""
        if "text/html" in http.headers.get("accept", ""):
            return HTMLResponse(_PAGE, headers=_POLICY)
        return JSONResponse(_HINTS)

    return routes
