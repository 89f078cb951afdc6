"""Connections: what a client may send and leave unread, and what becomes of one that does neither."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
from live_service import until
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS

from ostro.server.http.connections import Connections
from ostro.server.http.protocol import BoundedHttp, bound_uvicorn

MEGABYTE = 1 << 20


class Impatient(BoundedHttp):
    head_seconds = 0.5
    read_seconds = 0.5


@asynccontextmanager
async def served(app: ASGIApp, *, keep_alive: int = 5) -> AsyncIterator[tuple[uvicorn.Server, socket.socket]]:
    """The server, and a client's socket that takes little in before somebody reads it."""
    with socket.create_server(("127.0.0.1", 0)) as sock, socket.socket() as client:
        config = uvicorn.Config(
            app, http=Impatient, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=keep_alive
        )
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(sockets=[sock]))
        await until(lambda: server.started)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, sock.getsockname())
        try:
            yield server, client
        finally:
            client.close()
            server.should_exit = True
            await serving


async def receive_some(client: socket.socket, size: int = 65536) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, size), 5)


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    body = await Request(scope, receive).body()
    await PlainTextResponse(b"you sent: " + body)(scope, receive, send)


async def deny(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("no", 401)(scope, receive, send)


OFFER = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"


@pytest.mark.parametrize("at", [0, 3], ids=["apart", "together"])
def test_client_that_offers_another_protocol_is_served_in_this_one(at: int) -> None:
    """Java's HttpClient offers HTTP/2 with every request: its bodies were lost, and each answer was a 400."""
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n" + OFFER + b"\r\n"

    async def run() -> None:
        async with served(echo) as (_, client):
            loop = asyncio.get_running_loop()
            for _ in range(2):
                await loop.sock_sendall(client, head + b"hello"[:at])
                await asyncio.sleep(0.05)
                await loop.sock_sendall(client, b"hello"[at:])
                answer = b""
                while not answer.endswith(b"you sent: hello"):
                    part = await receive_some(client)
                    assert part, answer
                    answer += part
                assert answer.startswith(b"HTTP/1.1 200 ")

    asyncio.run(run())


def test_connect_is_a_400() -> None:
    async def run() -> bytes:
        async with served(echo) as (_, client):
            await asyncio.get_running_loop().sock_sendall(client, b"CONNECT a:1 HTTP/1.1\r\nhost: x\r\n\r\n")
            return await receive_some(client)

    assert asyncio.run(run()).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize("connection", ["keep-alive", "close"])
@pytest.mark.parametrize("size", [200_000, 8 * MEGABYTE], ids=["short", "long"])
def test_answer_that_nobody_reads_does_not_keep_its_connection(connection: str, size: int) -> None:
    """Closing waits for what is unread, so such connections were kept for good."""
    request = f"GET / HTTP/1.1\r\nhost: x\r\nconnection: {connection}\r\n\r\n".encode()

    async def run() -> None:
        # What the kernel takes of an answer is the kernel's affair.
        async with served(Response(b"x" * (size + 4 * MEGABYTE)), keep_alive=1) as (server, client):
            await asyncio.get_running_loop().sock_sendall(client, request)
            await until(lambda: len(server.server_state.connections) == 1)
            await until(lambda: not server.server_state.connections)

    asyncio.run(run())


def test_reader_that_trickles_is_dropped_and_the_work_for_it_ends() -> None:
    """A few bytes now and then are progress, but none that an answer would ever end by."""
    heard: list[str] = []

    async def endless(scope: Scope, receive: Receive, send: Send) -> None:
        async def write() -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            while True:
                await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})

        await Request(scope, receive).body()
        writing = asyncio.create_task(write())
        heard.append((await receive())["type"])
        writing.cancel()

    async def run() -> None:
        async with served(endless) as (server, client):
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            for _ in range(50):
                await receive_some(client, 10)
                await asyncio.sleep(0.1)
                if heard:
                    break
            assert heard == ["http.disconnect"]
            assert not server.server_state.connections

    asyncio.run(run())


def test_slow_reader_that_goes_on_reading_gets_everything() -> None:
    size, pause = 6 * MEGABYTE, 0.06

    async def run() -> int:
        async with served(Response(b"x" * size), keep_alive=1) as (_, client):
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            got, rested = 0, 0
            # Some three seconds: several times what one that reads nothing would get.
            while got < size and (part := await receive_some(client)):
                got += len(part)
                if got - rested > 2 * 65536:
                    rested = got
                    await asyncio.sleep(pause)
            return got

    assert asyncio.run(run()) >= size


def test_client_that_sent_requests_ahead_and_left_is_noticed() -> None:
    """uvicorn told only the last of them, which had not even begun; the first one's work went on."""
    heard: list[str] = []

    async def listen(scope: Scope, receive: Receive, send: Send) -> None:
        await Request(scope, receive).body()
        heard.append("begun")
        heard.append((await receive())["type"])

    async def run() -> None:
        async with served(listen) as (_, client):
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
            await until(lambda: heard == ["begun"])
            client.close()
            await until(lambda: heard == ["begun", "http.disconnect"])

    asyncio.run(run())


@pytest.mark.parametrize("rest", [b"", b" " * 10, b"y" * 90], ids=["nothing", "a-little", "all"])
def test_body_that_comes_after_its_answer_does_not_keep_its_connection(rest: bytes) -> None:
    """A refusal is sent before the body is read. What came of it later took the connection's last timer away."""

    async def run() -> None:
        async with served(deny, keep_alive=1) as (server, client):
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n" + b"y" * 10)
            assert (await receive_some(client)).startswith(b"HTTP/1.1 401 ")
            await loop.sock_sendall(client, rest)
            await until(lambda: not server.server_state.connections)

    asyncio.run(run())


def test_connection_is_of_use_after_an_answer_that_came_before_its_body() -> None:
    async def run() -> None:
        async with served(deny) as (_, client):
            loop = asyncio.get_running_loop()
            for _ in range(2):
                await loop.sock_sendall(client, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\n")
                assert (await receive_some(client)).startswith(b"HTTP/1.1 401 ")
                await loop.sock_sendall(client, b"yes")

    asyncio.run(run())


def test_a_timer_that_goes_off_after_its_connection_is_lost_does_nothing() -> None:
    """A process that was stopped for a while may see both at once."""

    async def run() -> None:
        async with served(deny) as (server, client):
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert (await receive_some(client)).startswith(b"HTTP/1.1 401 ")
            [connection] = server.server_state.connections
            client.close()
            await until(lambda: not server.server_state.connections)
            assert isinstance(connection, BoundedHttp)
            connection.timeout_keep_alive_handler()

    asyncio.run(run())


def test_request_sent_ahead_gives_its_connection_up_only_once_the_one_before_is_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connections, answered = Connections(1), asyncio.Event()
    monkeypatch.setattr(Impatient, "peers", connections)
    ahead = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhell"

    async def echo_later(scope: Scope, receive: Receive, send: Send) -> None:
        await answered.wait()
        await echo(scope, receive, send)

    async def run() -> None:
        async with served(echo_later) as (server, client):
            connections.num_open += 1
            await until(lambda: len(server.server_state.connections) == 1)
            await asyncio.get_running_loop().sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" + ahead)
            [protocol] = server.server_state.connections
            assert isinstance(protocol, BoundedHttp)
            await until(lambda: bool(protocol.pipeline))
            assert not connections.make_room()
            answered.set()
            assert b"you sent: " in await receive_some(client)
            assert connections.make_room()
            assert (await receive_some(client)).startswith(b"HTTP/1.1 503 ")

    asyncio.run(run())


def test_servers_that_others_start_in_this_process_can_be_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(HTTP_PROTOCOLS, "auto", HTTP_PROTOCOLS["auto"])
    bound_uvicorn()
    config = uvicorn.Config(PlainTextResponse("fine"), log_config=None)
    config.load()
    assert config.http_protocol_class is BoundedHttp
