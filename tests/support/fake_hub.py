"""A small Hub of our own on the loopback. The Hub's client reads its settings on import: use it in another process."""

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", "v1", COMMIT)


@dataclass
class Hub:
    server: ThreadingHTTPServer
    repos: Mapping[str, Mapping[str, bytes]]
    """The files of each repository."""
    refusal: tuple[int, dict[str, str]] | None = None
    breaks_off: bool = False
    """Whether downloads are cut off in the middle."""
    served: list[str] = field(default_factory=list)
    num_bytes: int = 0
    """Bytes of files that were sent."""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    hub: Hub

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        repo = next((repo for repo in self.hub.repos if f"/{repo}/" in path), "")
        files = self.hub.repos.get(repo, {})
        if self.hub.refusal is not None:
            status, headers = self.hub.refusal
            self.reply(status, b"{}", headers)
        elif path in (f"/api/models/{repo}/revision/{revision}" for revision in REVISIONS):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self.reply_json({"id": repo, "modelId": repo, "sha": COMMIT, "siblings": siblings, "tags": []})
        elif repo and path.startswith(f"/api/models/{repo}/revision/"):
            self.reply(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        elif path == f"/api/models/{repo}/tree/{COMMIT}":
            self.reply_json([entry(name, data) for name, data in files.items()])
        elif path.startswith(prefix := f"/{repo}/resolve/{COMMIT}/") and (name := path[len(prefix) :]) in files:
            self.reply_file(name, files[name])
        else:
            self.reply(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def reply_file(self, name: str, data: bytes) -> None:
        status, headers = 200, {"ETag": f'"{digest(data)}"', "X-Repo-Commit": COMMIT}
        if self.command == "GET":
            if asked := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or ""):
                status, data = 206, data[int(asked[1]) : int(asked[2]) + 1]
            self.hub.served.append(name)
            self.hub.num_bytes += len(data)
        self.reply(status, data, headers)

    def reply_json(self, value: object) -> None:
        self.reply(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body)), "Accept-Ranges": "bytes"}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET" and self.hub.breaks_off and "/resolve/" in self.path:
            self.wfile.write(body[: len(body) // 2])
            self.connection.shutdown(socket.SHUT_RDWR)
        elif self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence."""


def digest(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()


def entry(name: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": name, "size": len(data), "oid": digest(data)}


@contextmanager
def running_hub(repos: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    class Bound(Answer):
        pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Bound)
    Bound.hub = Hub(server, repos)
    thread = Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield Bound.hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def silent_hub() -> Iterator[tuple[str, list[socket.socket]]]:
    """An address that takes connections and never answers, and those that it took."""
    taken: list[socket.socket] = []

    def take(server: socket.socket) -> None:
        while True:
            try:
                taken.append(server.accept()[0])
            except OSError:
                return

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = Thread(target=take, args=(server,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", taken
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    for connection in taken:
        connection.close()


def hub_environment(address: str, home: Path) -> dict[str, str]:
    """Environment of a process whose Hub is at that address, with a cache of its own."""
    cleared = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    return cleared | {"HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1"}
