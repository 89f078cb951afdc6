"""Connections and files used up on purpose, with an engine that dies in the middle."""

import json
import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from live_server import LiveServer, live_server

from ostro.errors import BadRequest
from ostro.server.http.connections import Connections, most_connections

FILES, SILENT = 256, 300
ASKED = {"prompt": "Hello", "max_tokens": 4}


@contextmanager
def silent_connections(server: LiveServer, count: int, sent: bytes = b"") -> Iterator[list[socket.socket]]:
    address = urlsplit(server.url)
    with ExitStack() as held:
        opened = []
        for _ in range(count):
            connection = held.enter_context(socket.create_connection((address.hostname, address.port), timeout=30))
            connection.sendall(sent)
            opened.append(connection)
        yield opened


def engines(pid: int) -> list[int]:
    """A server's children, without the process that checks grammars, which an idle server starts."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(each) for each in children if b"check_process" not in Path(f"/proc/{each}/cmdline").read_bytes()]


def until_answered(server: LiveServer) -> None:
    """The engine is back: a completion comes."""
    deadline = time.monotonic() + 60
    with server.client() as client:
        while (answer := client.post("/v1/completions", json=ASKED)).status_code != HTTPStatus.OK:
            assert time.monotonic() < deadline, answer.text
            time.sleep(0.1)


UNFINISHED = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx: "


@pytest.mark.parametrize("sent", [b"", pytest.param(UNFINISHED, marks=pytest.mark.full)], ids=["silent", "unfinished"])
def test_silent_connections_keep_nobody_out_and_a_killed_engine_comes_back(tmp_path: Path, sent: bytes) -> None:
    """Under `ulimit -n 256`, 300 of them made /healthz fail, and a killed engine could not be started again."""
    with live_server(tmp_path, files=FILES) as server, silent_connections(server, SILENT, sent):
        with server.client() as client:
            assert client.get("/healthz").status_code == HTTPStatus.OK
        [engine] = engines(server.process.pid)
        os.kill(engine, signal.SIGKILL)
        until_answered(server)
        with server.client() as client:
            assert client.get("/healthz").status_code == HTTPStatus.OK
            assert client.get("/readyz").status_code == HTTPStatus.OK
        assert engines(server.process.pid) != [engine]


def post(size: int, *headers: str) -> bytes:
    """The head of a request for a completion."""
    own = ("content-type: application/json", f"content-length: {size}", *headers)
    return "\r\n".join(("POST /v1/completions HTTP/1.1", "host: localhost", *own, "", "")).encode()


@pytest.mark.full
def test_connections_without_a_complete_request_make_room_and_one_too_many_among_busy_ones_gets_503(
    tmp_path: Path,
) -> None:
    """40 heads without a body took all of 40 connections for a minute, and /healthz was refused."""
    # The server says itself that it waits for the body.
    head, go_on = post(9, "expect: 100-continue"), b"HTTP/1.1 100 Continue\r\n\r\n"
    endless = json.dumps({"prompt": "Hello", "max_tokens": 4000, "ignore_eos": True, "stream": True}).encode()
    with live_server(tmp_path, "--max-connections", "4", faults="fake,step_seconds=0.2") as server:
        with silent_connections(server, 4) as silent:
            with server.client() as client:
                assert client.get("/healthz").status_code == HTTPStatus.OK
            # The first of them had been silent for longest.
            assert silent[0].recv(1) == b""
        with silent_connections(server, 4, head) as unfinished:
            assert [connection.recv(len(go_on), socket.MSG_WAITALL) for connection in unfinished] == [go_on] * 4
            with server.client() as client:
                assert client.get("/healthz").status_code == HTTPStatus.OK
            assert_told_to_come_again(unfinished[0])
            for connection in unfinished[1:]:
                connection.sendall(b'{"x": 1}\n')
                assert connection.recv(12, socket.MSG_WAITALL) == b"HTTP/1.1 400"
        with silent_connections(server, 4, post(len(endless)) + endless) as busy:
            assert [connection.recv(12, socket.MSG_WAITALL) for connection in busy] == [b"HTTP/1.1 200"] * 4
            with silent_connections(server, 1) as [late]:
                assert_told_to_come_again(late)
            assert all(connection.recv(1) for connection in busy)


def assert_told_to_come_again(connection: socket.socket) -> None:
    """And nothing else before its end."""
    head, _, body = connection.recv(4096, socket.MSG_WAITALL).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: " in head
    assert json.loads(body)["error"]["code"] == "unavailable"


class FakePeer:
    def __init__(self, *, unsent: bool = False) -> None:
        self.unsent = unsent
        self.dropped = False

    def has_unsent(self) -> bool:
        return self.unsent

    def drop(self) -> None:
        self.dropped = True


def test_longest_idle_goes_first_but_not_one_whose_client_still_reads() -> None:
    connections = Connections(3)
    reading, oldest, newer = FakePeer(unsent=True), FakePeer(), FakePeer()
    for peer in (reading, newer, oldest):
        assert connections.make_room()
        connections.num_open += 1
        connections.fall_idle(peer)
    connections.begin_request(newer)
    connections.fall_idle(newer)
    assert connections.make_room()
    assert [reading.dropped, oldest.dropped, newer.dropped] == [False, True, False]
    connections.begin_answer(newer)
    assert not connections.make_room()


def test_idle_connections_are_dropped_before_unfinished_requests_oldest_first() -> None:
    connections = Connections(4)
    complete, first, second, idle = peers = [FakePeer() for _ in range(4)]
    for peer in peers:
        connections.num_open += 1
        connections.begin_request(peer)
    connections.begin_answer(complete)
    connections.fall_idle(idle)
    for expected in (idle, first, second):
        assert not expected.dropped
        assert connections.make_room()
        assert expected.dropped
    assert not connections.make_room()
    assert not complete.dropped


@pytest.mark.parametrize(("files", "most"), [(256, 192), (1024, 896), (65536, 57344), (64, 32)])
def test_files_are_left_for_engines_and_models(files: int, most: int) -> None:
    assert most_connections(None, files) == most
    assert most_connections(most, files) == most
    with pytest.raises(BadRequest, match="ulimit -n"):
        most_connections(most + 1, files)
