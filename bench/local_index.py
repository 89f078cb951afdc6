"""A package index on loopback with the files of one directory: what pip and uv read of it, and nothing else.

/simple/                the names of its projects
/simple/ostro/          a link to each of a project's files, with its SHA-256
/files/NAME             a file
"""

import hashlib
import html
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

SUFFIXES = (".whl", ".tar.gz")


@dataclass(frozen=True)
class LocalIndex:
    url: str
    """What pip takes as --extra-index-url, and uv as --index."""
    fetched: list[str] = field(default_factory=list)
    """The files that were given out."""


def project_of(file: Path) -> str:
    """The project's normalised name: `ostro` of ostro-1.0-py3-none-any.whl."""
    return re.sub(r"[-_.]+", "-", file.name.partition("-")[0]).lower()


@contextmanager
def local_index(directory: Path) -> Iterator[LocalIndex]:
    """Serves the wheels and source distributions that lie in the directory now."""
    files = {path.name: path for path in sorted(directory.iterdir()) if path.name.endswith(SUFFIXES)}
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
    fetched: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            kind, _, name = self.path.strip("/").partition("/")
            if kind == "files" and name in files:
                if self.command == "GET":
                    fetched.append(name)
                self._answer(files[name].read_bytes(), "application/octet-stream")
            elif kind == "simple" and (links := self._links(name)):
                lines = "".join(f'<a href="{href}">{html.escape(text)}</a><br>\n' for text, href in links)
                self._answer(f"<!DOCTYPE html>\n<html><body>\n{lines}</body></html>\n".encode(), "text/html")
            else:
                self.send_error(404)

        def _links(self, project: str) -> list[tuple[str, str]]:
            if not project:
                return [(name, f"/simple/{name}/") for name in sorted({project_of(path) for path in files.values()})]
            own = [name for name, path in files.items() if project_of(path) == project]
            return [(name, f"/files/{name}#sha256={digests[name]}") for name in own]

        def _answer(self, body: bytes, content_type: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_HEAD(self) -> None:
            # uv asks for a wheel's size first.
            self.do_GET()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield LocalIndex(f"http://127.0.0.1:{server.server_port}/simple/", fetched)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
