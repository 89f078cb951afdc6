"""The playground's files over HTTP. What they do in a browser is tried in tests/browser."""

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI
from live_server import LiveServer, live_server

from ostro.server.admission.auth import Keyring
from ostro.server.admission.ledger import Ledger
from ostro.server.admission.limits import Gate, GateLimits
from ostro.server.app import build_app
from ostro.server.lifecycle import middlewares
from ostro.server.models.build import build_models
from ostro.server.playground import endpoint
from ostro.server.playground.browser import is_at_hand, page_url
from ostro.server.playground.endpoint import read_assets
from ostro.server.settings import Given, read_settings
from ostro.server.telemetry.metrics import Metrics

ASSETS = read_assets()
_NAMESPACES = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("playground"), "--ui", "--api-key", "secret", ready=False) as live:
        yield live


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


def test_page_needs_no_key_and_the_api_still_does(client: httpx.Client) -> None:
    page = client.get("/")
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert "<title>Ostro playground</title>" in page.text
    for path in ("/v1/models", "/metrics", "/admin/stats", "/openapi.json", "/ui", "/ui/", "/ui/nothing.js"):
        assert client.get(path).status_code == 401, path
    assert client.post("/").status_code == 405
    assert client.get("/ui/nothing.js", headers={"authorization": "Bearer secret"}).status_code == 404


@pytest.mark.cases(33)
@pytest.mark.parametrize("path", sorted(ASSETS))
def test_every_file_comes_with_the_headers_that_keep_it_to_itself(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 200
    assert answer.content == ASSETS[path].content
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["cache-control"] == "no-cache"


def test_file_that_the_browser_has_is_not_sent_again(client: httpx.Client) -> None:
    first = client.get("/ui/main.js")
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = client.get("/ui/main.js", headers={"if-none-match": known})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", etag)
        assert "content-security-policy" in again.headers
    assert client.get("/ui/main.js", headers={"if-none-match": '"other"'}).status_code == 200
    assert client.get("/ui/style.css").headers["etag"] != etag


def test_head_answers_as_get_would(client: httpx.Client) -> None:
    head, get = client.head("/"), client.get("/")
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-type", "content-length"):
        assert head.headers[name] == get.headers[name]


@pytest.mark.parametrize(
    "path",
    [
        "/ui/../endpoint.py",
        "/ui/%2e%2e/endpoint.py",
        "/ui/..%2fendpoint.py",
        "/ui//etc/passwd",
        "/ui/%2fetc%2fpasswd",
        "/ui/index.html/../../__init__.py",
        "/ui/main.js%00",
        "/ui/MAIN.JS",
    ],
)
def test_no_path_leads_out_of_the_page(server: LiveServer, path: str) -> None:
    # As it is written: httpx would tidy the path.
    url = urlsplit(server.url)
    assert url.hostname is not None
    assert url.port is not None
    status = asyncio.run(raw_status(url.hostname, url.port, path))
    assert status in (400, 401)


async def raw_status(host: str, port: int, path: str) -> int:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return int((await reader.readline()).split()[1])
    finally:
        writer.close()
        await writer.wait_closed()


def test_page_is_offered_in_the_log_and_its_files_are_not_counted_one_by_one(
    server: LiveServer, client: httpx.Client
) -> None:
    client.get("/ui/main.js")
    metrics = client.get("/metrics", headers={"authorization": "Bearer secret"}).text
    assert 'path="/ui/{file}"' in metrics
    assert "main.js" not in metrics
    assert f"open {server.url}/ in a browser" in server.log_text
    assert '"path": "/ui/main.js"' not in server.log_text


def asked(tmp_path: Path, path: str, *, ui: bool, keys: tuple[str, ...] = ()) -> httpx.Response:
    """The response of an app over a model that is never loaded."""
    given = {"model": Given("./tiny", "--model"), "ui": Given(ui, "--ui")}
    settings = read_settings(given, directory=tmp_path).settings

    async def build() -> FastAPI:
        models = build_models(settings)
        metrics = Metrics(models, Gate(GateLimits()), Ledger(0))
        return build_app(models, middlewares=middlewares(settings, Keyring.of(keys), metrics))

    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(app=await build())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_without_the_switch_there_is_no_page(tmp_path: Path) -> None:
    assert "ostro serve --ui" in asked(tmp_path, "/", ui=False).json()["message"]
    assert asked(tmp_path, "/ui/main.js", ui=False).status_code == 404
    assert asked(tmp_path, "/", ui=False, keys=("secret",)).status_code == 200
    assert asked(tmp_path, "/", ui=True).status_code == 200
    assert asked(tmp_path, "/", ui=True, keys=("secret",)).status_code == 200


def test_page_names_only_files_that_are_there_and_nothing_from_elsewhere() -> None:
    texts = {path: asset.content.decode() for path, asset in ASSETS.items() if not path.endswith(".woff2")}
    page = texts["/"]
    assert set(re.findall(r'(?:src|href)="(ui/[^"]+)"', page)) == {
        "ui/icon.svg",
        "ui/style.css",
        "ui/main.js",
        "ui/theme.js",
    }
    own = {path: text for path, text in texts.items() if not path.startswith("/ui/vendor/")}
    imported = {name for text in texts.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    # With the first formula.
    assert {"temml.min.js", "temml.css"} == set(re.findall(r'urlOf\("([^"]+)"\)', texts["/ui/formula.js"]))
    imported.add("vendor/temml.min.js")
    scripts = {path.removeprefix("/ui/") for path in texts if path.endswith(".js")}
    assert imported | {"main.js"} == scripts
    for path, text in own.items():
        elsewhere = set(re.findall(r"https?://[^\s\"'`)]+", text)) - _NAMESPACES
        assert elsewhere == set(), path
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text), path
    assert not re.search(r"<style|\sstyle=|\son\w+=|<script(?! type=\"module\" src=)", page)


def test_every_file_in_the_folder_is_served() -> None:
    folder = Path(endpoint.__file__).with_name("static")
    assert len(ASSETS) == sum(path.is_file() for path in folder.rglob("*"))


@pytest.mark.parametrize(
    ("terminal", "environ", "platform", "expected"),
    [
        (True, {"DISPLAY": ":0"}, "linux", True),
        (True, {"WAYLAND_DISPLAY": "wayland-0"}, "linux", True),
        (True, {}, "linux", False),
        (True, {}, "darwin", True),
        (False, {"DISPLAY": ":0"}, "linux", False),
        (True, {"DISPLAY": ":0", "SSH_CONNECTION": "1.2.3.4 5 6.7.8.9 22"}, "linux", False),
        (True, {"DISPLAY": ":0", "CI": "1"}, "linux", False),
    ],
)
def test_browser_opens_only_where_somebody_sees_it(
    terminal: bool, environ: dict[str, str], platform: str, expected: bool
) -> None:
    assert is_at_hand(terminal=terminal, environ=environ, platform=platform) is expected


def test_page_of_a_server_on_all_addresses_is_offered_on_one() -> None:
    assert page_url("0.0.0.0", 8000) == "http://127.0.0.1:8000/"
    assert page_url("::", 8000) == "http://[::1]:8000/"
    assert page_url("192.0.2.1", 80) == "http://192.0.2.1:80/"
