"""A real server on loopback whose every byte is the test's: for what well-behaved servers never do."""

import json
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CLOSE = b"close the connection"
WAIT = b"be silent until the test ends"

Script = Callable[[str, Any], Iterable[bytes]]
"""Maps a path and a parsed body to the pieces of the response."""


@dataclass
class Scripted:
    url: str = ""
    connections: list[object] = field(default_factory=list)
    bodies: list[Any] = field(default_factory=list)
    heads: list[bytes] = field(default_factory=list)


@contextmanager
def scripted_server(script: Script) -> Iterator[Scripted]:
    scripted = Scripted()
    over = threading.Event()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            scripted.connections.append(self.client_address)
            try:
                while self._exchange():
                    pass
            except ConnectionError:
                pass

        def _exchange(self) -> bool:
            """Handles one request; returns whether the connection stays open."""
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                line = self.rfile.readline()
                if not line:
                    return False
                head += line
            lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
            data = self.rfile.read(int(lengths[0].partition(b":")[2])) if lengths else b""
            body = json.loads(data) if data else None
            scripted.heads.append(head)
            scripted.bodies.append(body)
            for piece in script(head.split()[1].decode(), body):
                if piece is CLOSE:
                    return False
                if piece is WAIT:
                    over.wait()
                    return False
                self.wfile.write(piece)
            return True

    class Server(socketserver.ThreadingTCPServer):
        request_queue_size = 128

    with Server(("127.0.0.1", 0), Handler) as server:
        scripted.url = f"http://127.0.0.1:{server.server_address[1]}"
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        try:
            yield scripted
        finally:
            over.set()
            server.shutdown()
            serving.join()


def plain(value: object, status: int = 200) -> bytes:
    data = json.dumps(value).encode()
    head = b"HTTP/1.1 %d X\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(data)) + data


STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def delta(content: str | None, finish: str | None = None, **more: object) -> bytes:
    """An event of a chat."""
    told = {**more} if content is None else {"content": content, **more}
    return event({"choices": [{"index": 0, "delta": told, "finish_reason": finish}]})


def usage(prompt: int, completion: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": completion}})


def answer(words: list[str], prompt_tokens: int = 5) -> list[bytes]:
    """A whole, proper answer."""
    events = [delta("", role="assistant"), *map(delta, words), delta(None, "stop"), usage(prompt_tokens, len(words))]
    return [STREAM, *map(chunk, events), chunk(DONE), END]
