"""Without keys the server answers only to names that no stranger can register: DNS rebinding."""

import socket
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path

import httpx
import pytest
from live_server import LiveServer, live_server
from starlette.datastructures import Headers

from ostro.errors import BadRequest, NotAllowed
from ostro.server.admission.hosts import HostRule
from ostro.server.settings import Given, read_settings

EVIL = "evil.example"


def allows(rule: HostRule, *hosts: str) -> bool:
    try:
        rule.check(Headers(raw=[(b"host", host.encode()) for host in hosts]))
    except NotAllowed:
        return False
    return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("open"), "--allowed-hosts", "ostro,*.internal.example") as server:
        yield server


def ask(server: LiveServer, method: str, path: str, host: str, **headers: str) -> httpx.Response:
    with server.client(host=host, **headers) as client:
        return client.request(method, path, json={} if method == "POST" else None)


def test_page_that_rebinds_its_domain_to_this_machine_cannot_unload_models(server: LiveServer) -> None:
    """Host and Origin were compared with each other, and an attacker chooses both."""
    refused = ask(server, "POST", "/admin/unload/default", EVIL, origin=f"http://{EVIL}")
    assert refused.status_code == HTTPStatus.FORBIDDEN
    assert refused.json()["error"]["code"] == "not_allowed"
    assert f"--allowed-hosts {EVIL}" in refused.json()["error"]["message"]
    with server.client() as client:
        assert client.get("/readyz").status_code == HTTPStatus.OK


@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/docs", "/openapi.json", "/no/such/path"])
def test_unknown_host_name_reaches_nothing(server: LiveServer, path: str) -> None:
    assert ask(server, "GET", path, EVIL).status_code == HTTPStatus.FORBIDDEN
    assert ask(server, "GET", path, f"{EVIL}:{8000}").status_code == HTTPStatus.FORBIDDEN


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "app.localhost", "127.0.0.1", "10.1.2.3:8000", "[::1]:1"]
)
def test_addresses_and_localhost_need_no_setting(server: LiveServer, host: str) -> None:
    assert ask(server, "GET", "/v1/models", host).status_code == HTTPStatus.OK


@pytest.mark.parametrize("host", ["ostro", "ostro:8000", "a.internal.example", "a.b.internal.example.", "OSTRO"])
def test_listed_names_are_answered(server: LiveServer, host: str) -> None:
    assert ask(server, "GET", "/v1/models", host).status_code == HTTPStatus.OK


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/health"])
def test_probes_are_answered_under_any_name(server: LiveServer, path: str) -> None:
    assert ask(server, "GET", path, EVIL).status_code == HTTPStatus.OK


@pytest.mark.full
def test_client_with_a_key_may_use_any_host_name(tmp_path: Path) -> None:
    with live_server(tmp_path, env={"OSTRO_ADMIN_KEY": "boss"}) as server:
        assert ask(server, "GET", "/v1/models", EVIL).status_code == HTTPStatus.FORBIDDEN
        assert ask(server, "GET", "/v1/models", EVIL, authorization="Bearer wrong").status_code == HTTPStatus.FORBIDDEN
        assert ask(server, "GET", "/v1/models", EVIL, authorization="Bearer boss").status_code == HTTPStatus.OK


@pytest.mark.parametrize(
    "host", ["localhost.evil.example", "127.0.0.1.evil.example", "evilocalhost", "[evil]", "internal"]
)
def test_names_that_only_look_alike_are_refused(host: str) -> None:
    assert not allows(HostRule.of(["*.internal"], "127.0.0.1"), host)


def test_every_host_header_counts() -> None:
    assert not allows(HostRule(), "localhost", EVIL)
    assert not allows(HostRule(), EVIL, "localhost")


def test_request_without_a_host_comes_from_no_browser() -> None:
    assert allows(HostRule())


def test_bound_name_is_known_and_the_machines_own_where_all_addresses_are_bound() -> None:
    assert allows(HostRule.of([], "gpu-box.example"), "gpu-box.example:8000")
    assert allows(HostRule.of([], "0.0.0.0"), socket.gethostname())
    assert not allows(HostRule.of([], "127.0.0.1"), EVIL)


def test_star_allows_all() -> None:
    assert allows(HostRule.of(["*"]), EVIL)


@pytest.mark.parametrize("wrong", ["http://ostro.example", "ostro:8000", "a*b", "*."])
def test_setting_takes_names_without_ports(wrong: str) -> None:
    with pytest.raises(BadRequest, match=r"allowed_hosts.*a host is a name without a port"):
        read_settings({"allowed_hosts": Given(wrong, "--allowed-hosts")})
