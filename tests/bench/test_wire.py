"""Connections against a server whose every byte is known."""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest
from scripted_server import CLOSE, END, STREAM, WAIT, chunk, plain, scripted_server

from ostro.errors import BadRequest
from ostro.measure.bench.wire import CONNECTION, CUT_OFF, NOT_HTTP, TIMEOUT, Pool, Recording, Target


def with_pool(
    url: str, use: Callable[[Pool, Target], Awaitable[list[Recording]]], timeout: float = 30.0
) -> list[Recording]:
    async def run() -> list[Recording]:
        target = Target.of(url, {})
        pool = Pool(target, timeout)
        try:
            return await use(pool, target)
        finally:
            await pool.close()

    return asyncio.run(run())


def ask(url: str, times: int = 1, timeout: float = 30.0) -> list[Recording]:
    async def use(pool: Pool, target: Target) -> list[Recording]:
        return [await pool.ask(target.request("/x", b"{}")) for _ in range(times)]

    return with_pool(url, use, timeout)


def sends(*pieces: bytes) -> Callable[[str, Any], Iterable[bytes]]:
    return lambda path, body: pieces


def test_body_comes_whole_in_pieces_that_have_their_times() -> None:
    with scripted_server(sends(STREAM, chunk(b"one"), chunk(b"two"), chunk(b"three"), END)) as server:
        [found] = ask(server.url)
    assert (found.status, found.failure, found.body) == (200, None, b"onetwothree")
    times = [found.sent, *(at for at, _ in found.pieces), found.ended]
    assert times == sorted(times)


def test_connection_is_kept_for_the_next_request() -> None:
    with scripted_server(sends(plain("yes"))) as server:
        found = ask(server.url, times=3)
    assert [each.body for each in found] == [b'"yes"'] * 3
    assert len(server.connections) == 1
    assert found[0].connect_seconds > 0
    assert found[1].connect_seconds == found[2].connect_seconds == 0


def test_connection_that_was_closed_while_idle_is_no_failure() -> None:
    with scripted_server(sends(plain("yes"), CLOSE)) as server:
        found = ask(server.url, times=3)
    assert [(each.failure, each.body) for each in found] == [(None, b'"yes"')] * 3
    assert len(server.connections) == 3


def test_request_is_sent_again_once_and_only_where_no_answer_came() -> None:
    """Nonsense on a kept connection was asked for again, and a closed one as often as there were others."""
    replies = iter([[plain("yes")], [b"SSH-2.0-x\r\n", CLOSE], [plain("yes")], [CLOSE], [CLOSE]])
    with scripted_server(lambda path, body: next(replies)) as server:
        found = ask(server.url, times=4)
    assert [(each.failure, each.resent) for each in found] == [
        (None, False),
        (NOT_HTTP, False),
        (None, False),
        (CONNECTION, True),
    ]


def test_connections_can_be_made_ahead() -> None:
    async def use(pool: Pool, target: Target) -> list[Recording]:
        await pool.open(4)
        return list(await asyncio.gather(*(pool.ask(target.request("/x", b"{}")) for _ in range(4))))

    with scripted_server(sends(plain("yes"))) as server:
        found = with_pool(server.url, use)
    assert [each.connect_seconds for each in found] == [0.0] * 4
    assert len(server.connections) == 4


@pytest.mark.parametrize(
    ("pieces", "failure"),
    [
        ((STREAM, chunk(b"one"), b"5\r\ntw", CLOSE), CUT_OFF),
        ((CLOSE,), CONNECTION),
        ((b"SSH-2.0-x\r\n", CLOSE), NOT_HTTP),
        ((STREAM, b"no length\r\n", CLOSE), NOT_HTTP),
        ((STREAM, chunk(b"one"), WAIT), TIMEOUT),
        ((WAIT,), TIMEOUT),
    ],
)
def test_failure_is_named_by_its_kind(pieces: tuple[bytes, ...], failure: str) -> None:
    with scripted_server(sends(*pieces)) as server:
        [found] = ask(server.url, timeout=0.5 if failure == TIMEOUT else 30.0)
    assert found.failure == failure
    assert found.detail
    assert found.ended >= found.sent


def test_refused_connection_is_a_connection_failure() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        [found] = ask(f"http://127.0.0.1:{unused.getsockname()[1]}")
    assert found.failure == CONNECTION


def test_body_may_end_with_its_connection() -> None:
    with scripted_server(sends(b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nall of it", CLOSE)) as server:
        [found] = ask(server.url)
    assert (found.failure, found.body) == (None, b"all of it")


def test_request_has_the_headers_that_were_given() -> None:
    target = Target.of("http://host:8000/proxy/", {"Authorization": "Bearer k", "X-Team": "red"})
    head, _, body = target.request("/chat/completions", b"{}").partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /proxy/v1/chat/completions HTTP/1.1"
    assert {"Host: host:8000", "Authorization: Bearer k", "X-Team: red", "Content-Length: 2"} <= set(lines)
    assert body == b"{}"


@pytest.mark.parametrize(
    ("url", "host", "port", "base"),
    [
        ("http://localhost:8000", "localhost", 8000, "/v1"),
        ("localhost:8000/v1", "localhost", 8000, "/v1"),
        ("https://api.example/v1/", "api.example", 443, "/v1"),
        ("http://[::1]:9/openai", "::1", 9, "/openai/v1"),
    ],
)
def test_address_with_or_without_its_version(url: str, host: str, port: int, base: str) -> None:
    target = Target.of(url, {})
    assert (target.host, target.port, target.base) == (host, port, base)


@pytest.mark.parametrize(
    "url", ["", "ftp://x", "http://", "http://x:99999", "http://x/?a=b", "http://[::1", "http://user:secret@x"]
)
def test_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(BadRequest, match=r"(?i)address") as caught:
        Target.of(url, {})
    assert "secret" not in str(caught.value)
