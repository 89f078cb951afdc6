"""Peers that send or read too much, too slowly: everybody else is served meanwhile, at bounded cost."""

import asyncio
import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from http_app import live_app
from live_server import LiveServer, live_server
from live_service import set_faults

from ostro.server.api import HttpOptions
from ostro.server.http.body import BodyLimits
from ostro.server.http.protocol import BoundedHttp

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
MEGABYTE = 1 << 20
PATIENCE = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live_server(tmp_path_factory.mktemp("slow")) as live:
        yield live


class Probe(threading.Thread):
    """Asks for /healthz over and over; how long each answer took, in seconds."""

    def __init__(self, server: LiveServer) -> None:
        super().__init__()
        self._server = server
        self._over = threading.Event()
        self.seconds: list[float] = []

    def run(self) -> None:
        with self._server.client() as client:
            # At least once, however soon it is over.
            while not self.seconds or not self._over.is_set():
                began = time.monotonic()
                assert client.get("/healthz").status_code == 200
                self.seconds.append(time.monotonic() - began)
                time.sleep(0.002)

    def stop(self) -> float:
        """The longest."""
        self._over.set()
        self.join()
        return max(self.seconds)


def text_body(path: str, size: int) -> bytes:
    text = ("Once upon a time, " * (size // 18)).encode()
    if path == CHAT:
        return b'{"messages":[{"role":"user","content":"' + text + b'"}]}'
    return b'{"prompt":"' + text + b'"}'


rare = partial(pytest.param, marks=pytest.mark.full)


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, lambda: text_body(COMPLETIONS, 15 * MEGABYTE), 400),
        rare(COMPLETIONS, lambda: text_body(COMPLETIONS, 20 * MEGABYTE), 400),
        (CHAT, lambda: text_body(CHAT, 2 * MEGABYTE), 400),
        (COMPLETIONS, lambda: b'{"prompt":[' + b"1234," * 4_000_000 + b"1]}", 413),
        rare(COMPLETIONS, lambda: b'{"prompt":[' + b"1234," * 500_000 + b"1]}", 400),
        (COMPLETIONS, lambda: b'{"prompt":[' + b"[]," * 5_000_000 + b"[]]}", 413),
        (COMPLETIONS, lambda: b'{"prompt":"x"' + b"".join(b',"k%d":1' % each for each in range(10**6)) + b"}", 413),
        rare(
            COMPLETIONS, lambda: b'{"prompt":"x"' + b"".join(b',"k%d":1' % each for each in range(20_000)) + b"}", 400
        ),
    ],
    ids=["text", "longer", "chat", "ids", "fewer-ids", "lists", "fields", "fewer-fields"],
)
def test_everybody_is_served_while_a_huge_prompt_is_refused(
    server: LiveServer, path: str, body: Callable[[], bytes], status: int
) -> None:
    """A million unknown fields kept the event loop for 5 seconds once, and seven million lists for 2.6."""
    probe = Probe(server)
    content = body()
    probe.start()
    began = time.monotonic()
    response = httpx.post(server.url + path, content=content, headers=JSON, timeout=60, trust_env=False)
    took = time.monotonic() - began
    longest = probe.stop()
    assert response.status_code == status, response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    # A blocked loop answers the huge prompt first. How long others wait is a matter of bench/event_loop.py.
    assert longest < max(2.0, took / 2), f"/healthz took {longest:.3f} s of {took:.3f} s"


def resident_bytes(pid: int) -> int:
    """Memory of its own, without the files that it maps."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


@pytest.mark.full
def test_reader_of_a_byte_a_second_costs_bounded_memory(server: LiveServer) -> None:
    body = {"prompt": "x", "max_tokens": 4000, "n": 4, "logprobs": 5, "ignore_eos": True, "stream": True}
    data = json.dumps(body).encode()
    address = urlsplit(server.url)
    head = (
        f"POST {COMPLETIONS} HTTP/1.1\r\nhost: localhost\r\n"
        f"content-type: application/json\r\ncontent-length: {len(data)}\r\n"
    )
    peers = []
    before = resident_bytes(server.process.pid)
    with server.client() as client:
        for _ in range(4):
            peer = socket.socket()
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            peer.connect((address.hostname, address.port))
            peer.sendall(f"{head}\r\n".encode() + data)
            peers.append(peer)
        for _ in range(4):
            assert [len(peer.recv(1)) for peer in peers] == [1] * 4
            time.sleep(1)
        grown = resident_bytes(server.process.pid) - before
        for peer in peers:
            peer.close()
        deadline = time.monotonic() + PATIENCE
        while client.get("/health").json()["requests"]:
            assert time.monotonic() < deadline, "the engine still works for peers that have gone"
            time.sleep(0.05)
    # 9 MiB when it was written. It is a ceiling: that deltas merge is for test_http_patience to show.
    assert grown < 32 * MEGABYTE, f"{grown / MEGABYTE:.0f} MiB"


def trickle(host: str, port: int, head: bytes, drop: bytes) -> tuple[bytes, float]:
    """Sends the head, then a little now and then; what came back until the server hung up, and after how long."""
    began = time.monotonic()
    answer = b""
    with socket.create_connection((host, port), timeout=0.1) as connection:
        connection.sendall(head)
        while time.monotonic() - began < PATIENCE:
            try:
                connection.sendall(drop)
                part = connection.recv(65536)
                if not part:
                    break
                answer += part
            except TimeoutError:
                continue
            except (BrokenPipeError, ConnectionResetError):
                break
    return answer, time.monotonic() - began


@pytest.mark.full
def test_body_that_trickles_in_is_a_408(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
        b"content-type: application/json\r\ncontent-length: 9999\r\n\r\n"
    )

    async def run() -> tuple[bytes, float]:
        async with live_app(HttpOptions(body=BodyLimits(seconds=0.5))) as (host, port, _):
            return await asyncio.to_thread(trickle, host, port, head, b" ")

    answer, seconds = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert set(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]) == {"message", "type", "param", "code"}
    assert seconds < PATIENCE


class Impatient(BoundedHttp):
    head_seconds = 0.5


@pytest.mark.parametrize("head", [b"", b"GET / HTTP/1.1\r\nx: "], ids=["silent", "header"])
def test_head_that_trickles_in_is_dropped(head: bytes) -> None:
    """Connections that never ended their first request were kept for good once."""

    async def run() -> tuple[bytes, float]:
        with socket.create_server(("127.0.0.1", 0)) as sock:
            config = uvicorn.Config(_no_app, http=Impatient, lifespan="off", log_config=None, access_log=False)
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[sock]))
            host, port = sock.getsockname()
            outcome = await asyncio.to_thread(trickle, host, port, head, b"y" if head else b"")
            server.should_exit = True
            await serving
            return outcome

    answer, seconds = asyncio.run(run())
    assert answer == b""
    assert seconds < PATIENCE


async def _no_app(scope: object, receive: object, send: object) -> None:
    raise AssertionError("nothing asks for it")


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="makes a pipe small")
def test_log_that_nobody_reads_holds_up_no_request_and_not_the_end(tmp_path: Path) -> None:
    """A pipe takes 64 KB; the line after that stopped the event loop for good."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    command = [sys.executable, "-m", "ostro", "serve", "--port", str(port), "--log-format", "json"]
    process = subprocess.Popen(command, stderr=writing, env={**os.environ, "OSTRO_FAULTS": "fake"}, cwd=tmp_path)
    os.close(writing)
    try:
        deadline = time.monotonic() + PATIENCE
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10, trust_env=False) as client:
            while True:
                assert time.monotonic() < deadline
                with suppress(httpx.ConnectError):
                    client.get("/healthz")
                    break
                time.sleep(0.05)
            for _ in range(200):
                assert client.get("/nowhere").status_code == 404
        process.terminate()
        assert process.wait(PATIENCE) == 0
        assert b'"starting"' in os.read(reading, 4096)
    finally:
        os.close(reading)
        process.kill()
        process.wait()
