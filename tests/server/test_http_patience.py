"""Silence, slow clients and stuck ones: who is waited for, and for how long."""

import asyncio
import json
import socket
import threading
import time

import pytest
import uvicorn
from http_app import live_app
from live_service import live_models, set_faults, until, until_idle

from ostro.schemas.completions import CompletionResponse
from ostro.server.admission.limits import GateLimits
from ostro.server.api import HttpOptions
from ostro.server.app import build_app
from ostro.server.dialects.completions.writer import CompletionWriter
from ostro.server.http.body import BodyLimits
from ostro.server.http.protocol import BoundedHttp


def request(body: dict[str, object], *, length: int | None = None) -> bytes:
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(data) if length is None else length}\r\n\r\n".encode() + data


def narrow_socket(host: str, port: int) -> socket.socket:
    """Takes little in before somebody reads it."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect((host, port))
    sock.setblocking(False)
    return sock


def test_silent_stream_says_that_it_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.3")

    async def run() -> bytes:
        async with live_app(HttpOptions(ping_seconds=0.1)) as (host, port, _):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request({"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": True}))
            answer = await reader.read()
            writer.close()
            return answer

    _, _, body = asyncio.run(run()).partition(b"\r\n\r\n")
    assert body.count(b": ping\n\n") >= 2
    assert body.index(b"data: ") < body.index(b": ping")
    assert body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.mark.full
def test_body_that_trickles_in_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def run() -> bytes:
        async with live_app(HttpOptions(body=BodyLimits(seconds=0.5))) as (host, port, _):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request({"prompt": "x"}, length=1000))
            for _ in range(3):
                await asyncio.sleep(0.1)
                writer.write(b" ")
            answer = await asyncio.wait_for(reader.read(), 30)
            writer.close()
            return answer

    answer = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in answer
    assert b'"code":"body_timeout"' in answer


class Impatient(BoundedHttp):
    read_seconds = 0.6


@pytest.mark.full
def test_client_that_stops_reading_is_dropped_and_its_pages_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def run() -> None:
        async with live_models() as (models, service):
            app = build_app(models, options=HttpOptions(ping_seconds=0.2))
            config = uvicorn.Config(app, http=Impatient, lifespan="off", log_config=None, access_log=False)
            with socket.create_server(("127.0.0.1", 0)) as sock:
                server = uvicorn.Server(config)
                serving = asyncio.create_task(server.serve(sockets=[sock]))
                _, writer = await asyncio.open_connection(sock=narrow_socket(*sock.getsockname()), limit=1024)
                body = {"prompt": "x", "max_tokens": 8000, "n": 8, "logprobs": 5, "ignore_eos": True, "stream": True}
                writer.write(request(body))
                await until(lambda: service.num_requests == 1)
                await until(lambda: service.num_requests == 0, seconds=15)
                await until_idle(service)
                # It is still there, and so were its connection and what it had not read, for good.
                await until(lambda: not server.server_state.connections)
                writer.transport.abort()
                server.should_exit = True
                await serving

    asyncio.run(run())


@pytest.mark.full
def test_slow_reader_gets_all_of_its_text_in_fewer_events(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch)

    async def run() -> bytes:
        async with live_app(HttpOptions()) as (host, port, service):
            reader, writer = await asyncio.open_connection(sock=narrow_socket(host, port), limit=1024)
            body = {"prompt": "x", "max_tokens": 4000, "n": 16, "temperature": 0, "ignore_eos": True, "stream": True}
            writer.write(request(body))
            await until(lambda: service.heartbeat.running > 0)
            await until(lambda: service.heartbeat.running == 0, seconds=15)
            answer = await reader.read()
            writer.close()
            return answer

    answer = asyncio.run(run())
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert answer.count(b'"finish_reason":"length"') == 16
    # The kernel holds some megabytes; what comes after that is merged.
    assert answer.count(b"data: ") < 16 * 4000 / 2


@pytest.mark.full
def test_request_that_takes_too_long_gets_an_error_in_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    set_faults(monkeypatch, "step_seconds=0.05")

    async def run() -> tuple[bytes, float]:
        async with live_app(HttpOptions(), GateLimits(seconds=2.0)) as (host, port, service):
            began = time.monotonic()
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request({"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}))
            answer = await reader.read()
            took = time.monotonic() - began
            await until_idle(service)
            writer.close()
            return answer, took

    answer, took = asyncio.run(run())
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b'"code":"timeout"' in answer
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    # All of it would take 50 s.
    assert took < 30


@pytest.mark.full
@pytest.mark.parametrize(("tokens", "elsewhere"), [(10, False), (1000, True)])
def test_answer_with_many_logprobs_is_written_off_the_event_loop(
    tokens: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation's answer of 16 prompts kept everybody waiting for 0.6 s."""
    set_faults(monkeypatch)
    threads: list[bool] = []

    whole = CompletionWriter.whole

    def watched(writer: CompletionWriter) -> CompletionResponse:
        threads.append(threading.current_thread() is not threading.main_thread())
        return whole(writer)

    monkeypatch.setattr(CompletionWriter, "whole", watched)

    async def run() -> bytes:
        async with live_app(HttpOptions()) as (host, port, _):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request({"prompt": "x", "max_tokens": tokens, "logprobs": 1, "ignore_eos": True}))
            answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(run()).startswith(b"HTTP/1.1 200 ")
    assert threads == [elsewhere]
