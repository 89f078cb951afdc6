import asyncio
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from ostro.errors import BadRequest
from ostro.server.admission.auth import Authentication, Keyring, read_key_file
from ostro.server.telemetry.record import RequestRecord


async def who(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the label of the key that was found."""
    record = Request(scope).state.record
    await PlainTextResponse(record.key)(scope, receive, send)


class Recorded:
    """Gives each request its record, as the request log does."""

    def __init__(self, keyring: Keyring, origins: Sequence[str] = ()) -> None:
        self.app = Authentication(who, keyring, origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"] = {"record": RequestRecord(id="r", method="GET", path=scope["path"])}
        await self.app(scope, receive, send)


def ask(
    keyring: Keyring,
    path: str,
    authorization: str | bytes | None = None,
    *,
    origin: str | None = None,
    origins: Sequence[str] = (),
) -> httpx.Response:
    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app=Recorded(keyring, origins))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            headers = {} if authorization is None else {b"authorization": _bytes(authorization)}
            if origin is not None:
                headers[b"origin"] = origin.encode()
            return await client.get(path, headers=headers)

    return asyncio.run(get())


def _bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode()


KEYS = Keyring.of(["first", "second"], ["boss"])


@pytest.mark.parametrize("path", ["/v1/models", "/openapi.json", "/metrics", "/no/such/path", "/healthz/", "//healthz"])
def test_every_path_that_is_not_listed_needs_a_key(path: str) -> None:
    answer = ask(KEYS, f"http://test{path}")
    assert answer.status_code == 401
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.json()["error"] == {
        "message": "The request has no API key. Send it in a header: Authorization: Bearer YOUR_KEY.",
        "type": "invalid_request_error",
        "param": None,
        "code": "invalid_api_key",
    }


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/health", "/"])
def test_probes_need_none(path: str) -> None:
    assert ask(KEYS, path).text == "anonymous"


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/docs.js", "/docs/vendor/swagger-ui.css"])
def test_the_page_that_asks_for_the_key_needs_none(path: str) -> None:
    assert ask(KEYS, path).text == "anonymous"


@pytest.mark.parametrize(
    "path",
    ["/%68ealthz", "/healthz%2f..%2fv1/models", "/docs%2f..%2fv1/models", "/docs/%2e%2e/v1/models", "/docs/%76endor"],
)
def test_open_path_under_another_spelling_is_not_open(path: str) -> None:
    assert ask(KEYS, path).status_code == 401


@pytest.mark.parametrize("path", ["/admin/stats", "/admin", "/%61dmin/stats", "/admin%2Fstats"])
def test_admin_paths_need_the_admin_key_however_they_are_spelt(path: str) -> None:
    refused = ask(KEYS, path, "Bearer first")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        401,
        "This needs the admin key, and you sent another key.",
    )
    assert ask(KEYS, path, "Bearer boss").status_code == 200


def test_without_an_admin_key_any_key_opens_admin_paths() -> None:
    keys = Keyring.of(["first"])
    assert ask(keys, "/admin/stats").status_code == 401
    assert ask(keys, "/admin/stats", "Bearer first").status_code == 200


def test_each_key_has_a_label_of_its_own_that_does_not_show_it() -> None:
    labels = [ask(KEYS, "/v1/models", f"Bearer {key}").text for key in ("first", "second", "boss")]
    assert len(set(labels)) == 3
    assert [label.split("-")[0] for label in labels] == ["key", "key", "admin"]
    assert not any(key in label for key, label in zip(("first", "second", "boss"), labels, strict=True))


@pytest.mark.parametrize(
    "authorization",
    [
        "Bearer wrong",
        "Bearer firs",
        "Bearer firstt",
        "first",
        "Basic first",
        "Bearer",
        "Bearer ",
        b"Bearer \xff\xfe",
        "",
    ],
)
def test_unknown_keys_are_refused(authorization: str | bytes) -> None:
    assert ask(KEYS, "/v1/models", authorization).status_code == 401


def test_scheme_is_read_in_any_case() -> None:
    assert ask(KEYS, "/v1/models", "bearer first").status_code == 200


def test_without_keys_all_is_open_and_a_key_that_was_sent_anyway_does_no_harm() -> None:
    assert ask(Keyring(), "/v1/models").text == "anonymous"
    assert ask(Keyring(), "/v1/models", "Bearer none").text == "anonymous"


def test_admin_key_alone_closes_the_admin_part_and_metrics() -> None:
    keys = Keyring.of(admin=["boss"])
    statuses = {path: ask(keys, path).status_code for path in ("/v1/models", "/admin/stats", "/metrics")}
    assert statuses == {"/v1/models": 200, "/admin/stats": 401, "/metrics": 401}


@pytest.mark.parametrize("path", ["/admin/stats", "/admin", "/%61dmin/stats", "/admin%2Fstats"])
@pytest.mark.parametrize(
    "origin", ["http://evil.example", "http://test.evil.example", "http://test:81", "null", "test"]
)
def test_where_no_key_is_needed_pages_of_other_servers_have_no_part_in_admin_paths(path: str, origin: str) -> None:
    """Any web page that a user of this machine opened could unload models."""
    refused = ask(Keyring(), path, origin=origin, origins=["*", "http://board.example"])
    assert refused.status_code == 401
    assert "--admin-key" in refused.json()["error"]["message"]


@pytest.mark.parametrize("origin", [None, "http://test", "https://TEST", "http://board.example"])
def test_own_pages_and_those_allowed_by_name_may_call_admin_paths(origin: str | None) -> None:
    assert ask(Keyring(), "/admin/stats", origin=origin, origins=["http://board.example"]).status_code == 200


def test_origin_does_not_matter_with_a_key_or_outside_admin_paths() -> None:
    assert ask(KEYS, "/admin/stats", "Bearer boss", origin="http://evil.example").status_code == 200
    assert ask(Keyring(), "/v1/models", origin="http://evil.example").status_code == 200


def test_admin_keys_and_those_named_for_it_may_raise_their_priority() -> None:
    keyring = Keyring.of(["plain", "both"], ["boss"], ["urgent", "both"])
    callers = {key: keyring.identify(["/v1/models"], key) for key in ("plain", "both", "boss", "urgent")}
    assert {key for key, found in callers.items() if found is not None and found.may_raise_priority} == {
        "both",
        "boss",
        "urgent",
    }
    assert keyring.num_callers == 3


def test_admin_keys_take_no_share_from_the_callers() -> None:
    """One API key and one admin key were two callers, and the only user got three quarters of the server."""
    keyrings = [Keyring(), Keyring.of(admin=["boss"]), Keyring.of(["a"]), Keyring.of(["a", "a", "b"], ["boss"])]
    assert [keyring.num_callers for keyring in keyrings] == [1, 1, 1, 2]


def test_keyring_holds_no_key() -> None:
    assert "first" not in repr(KEYS)


def test_websocket_without_a_key_is_closed() -> None:
    sent: list[object] = []

    async def send(message: object) -> None:
        sent.append(message)

    scope: Scope = {"type": "websocket", "path": "/ws", "headers": []}
    asyncio.run(Authentication(_never, KEYS)(scope, _nothing, send))
    assert sent == [{"type": "websocket.close", "code": 1008, "reason": "unauthorized"}]


async def _never(scope: Scope, receive: Receive, send: Send) -> None:
    await Response("reached")(scope, receive, send)


async def _nothing() -> dict[str, object]:
    return {"type": "websocket.connect"}


def test_key_file_has_one_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfirst\n\n  second  \n")
    assert read_key_file(file) == ["first", "second"]
    file.write_text("# none\n")
    with pytest.raises(BadRequest, match="holds no keys"):
        read_key_file(file)
    with pytest.raises(BadRequest, match="Cannot read the key file"):
        read_key_file(tmp_path / "missing")


def test_key_that_no_header_can_carry_is_refused(tmp_path: Path) -> None:
    """It was taken, and never fitted."""
    file = tmp_path / "keys"
    file.write_text("plain\nclé\n")
    with pytest.raises(BadRequest, match="ASCII"):
        read_key_file(file)
