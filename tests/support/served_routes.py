"""Every path that a server answers, enumerated from the application, and requests to them byte by byte."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import urlsplit

from live_server import LiveServer
from starlette.routing import BaseRoute, Mount, Route

from ostro.server.admission.auth import METRICS_PATH
from ostro.server.app import build_app
from ostro.server.playground.endpoint import read_assets

# What stands for a path's parameters: something that exists, where there is anything.
_VALUES = {"model": "default", "id": "default", "file": "docs.html"}


@dataclass(frozen=True)
class ServedRoute:
    method: str
    path: str
    """With values in place of its parameters."""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


def routes_of_the_app() -> list[ServedRoute]:
    """Those of the application, and the one that a middleware answers; not the files of the playground."""
    app = build_app(cast(Any, None))
    found = [*_walk(app.routes), ServedRoute("GET", METRICS_PATH)]
    assert len(found) > 30
    return found


def files_of_the_page() -> list[ServedRoute]:
    return [ServedRoute("GET", path) for path in read_assets()]


def _walk(routes: Iterable[BaseRoute], prefix: str = "") -> Iterator[ServedRoute]:
    """Fails for a kind of route that it does not know: nothing may be left out."""
    for route in routes:
        if isinstance(route, Mount):
            yield from _walk(route.routes, prefix + route.path)
            continue
        if (included := getattr(route, "original_router", None)) is not None:
            # FastAPI keeps the routers that it was given, rather than their routes.
            yield from _walk(included.routes, prefix + route.include_context.prefix)  # type: ignore[attr-defined]
            continue
        assert isinstance(route, Route), route
        for method in sorted(route.methods or ()):
            yield ServedRoute(method, _filled(prefix + route.path))


def _filled(path: str) -> str:
    for name, value in _VALUES.items():
        path = path.replace(f"{{{name}:path}}", value).replace(f"{{{name}}}", value)
    assert "{" not in path, f"give {path} a value"
    return path


@dataclass(frozen=True)
class Answered:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def everything(self) -> str:
        """Headers and body, as one text to search."""
        return "\n".join([*(f"{name}: {value}" for name, value in self.headers.items()), self.body.decode()])


@contextmanager
def wire(server: LiveServer, seconds: float = 30.0) -> Iterator[http.client.HTTPConnection]:
    """A connection on which targets and headers are sent as they are given."""
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=seconds)
    try:
        yield connection
    finally:
        connection.close()


def send(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Sequence[tuple[str, str]] = (("host", "localhost"),),
    body: bytes | object | None = None,
) -> Answered:
    """One request, with no header but these and those of its body. Sent again if the connection was
    closed after the answer before it.
    """
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        return _exchange(connection, method, target, headers, data)
    except (ConnectionError, http.client.BadStatusLine):
        connection.close()
        return _exchange(connection, method, target, headers, data)


def _exchange(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    headers: Sequence[tuple[str, str]],
    data: bytes | None,
) -> Answered:
    connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
    for name, value in headers:
        connection.putheader(name, value)
    if data is not None:
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(len(data)))
    # A server that refuses a body may hang up before all of it was sent; its answer is there all the same.
    with suppress(BrokenPipeError, ConnectionResetError):
        connection.endheaders(data)
    response = connection.getresponse()
    return Answered(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())
