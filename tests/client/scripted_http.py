"""A real server on loopback that answers each request as its script says, and remembers what it was asked."""

import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

Script = Sequence[bytes]
"""The bytes of each answer in turn, the last one for all that follow; the connection is closed after each."""


@dataclass
class Scripted:
    url: str
    asked: list[bytes] = field(default_factory=list)
    """The heads of the requests."""


def reply(status: int, body: bytes = b"", **headers: str) -> bytes:
    given = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close", **headers}
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
    return f"HTTP/1.1 {status} Words\r\n{lines}\r\n".encode() + body


def stream(*events: bytes, cut: bool = False) -> bytes:
    """Chunked; one that is cut has no end."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    return head + chunks + (b"" if cut else b"0\r\n\r\n")


@contextmanager
def scripted_server(*script: bytes) -> Iterator[Scripted]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = Scripted(f"http://127.0.0.1:{listener.getsockname()[1]}")
        serving = threading.Thread(target=_serve, args=(listener, server, script))
        serving.start()
        try:
            yield server
        finally:
            # Wakes `accept`, which closing alone does not.
            listener.shutdown(socket.SHUT_RDWR)
            serving.join()


def _serve(listener: socket.socket, server: Scripted, script: Script) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            connection.settimeout(30)
            head = _read_request(connection)
            if not head:
                continue
            server.asked.append(head)
            connection.sendall(script[min(len(server.asked), len(script)) - 1])


def _read_request(connection: socket.socket) -> bytes:
    """All of it, or closing would reset the connection before the answer is read; returns its head."""
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := connection.recv(65536)):
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    size = int(lengths[0].split(b":")[1]) if lengths else 0
    while len(body) < size and (more := connection.recv(65536)):
        body += more
    return head
