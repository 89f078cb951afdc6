"""The images' health check, against real servers that listen on ports of the system's choice."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkout import ROOT

pytestmark = pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs Linux's /proc")

CHECK = ROOT / "deploy" / "docker" / "healthcheck.py"
SERVER = """
import http.server, socket, sys
class Server(http.server.HTTPServer):
    address_family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/healthz" else 503)
        self.end_headers()
    def log_message(self, *_): pass
server = Server((sys.argv[1], 0), Handler)
print("listening", flush=True)
server.serve_forever()
"""


@contextmanager
def server(*command: str) -> Iterator[int]:
    """Its number, or that of the process before it."""
    process = subprocess.Popen([*command, sys.executable, "-c", SERVER, "127.0.0.1"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process, process.stdout:
        assert process.stdout.readline() == "listening\n"
        try:
            yield process.pid
        finally:
            for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
                os.kill(int(child), signal.SIGKILL)
            process.kill()


def check(path: str, pid: int) -> int:
    return subprocess.run([sys.executable, CHECK, path, str(pid)], check=False).returncode


def test_the_port_is_found_whatever_it_is_and_the_answer_counts() -> None:
    with server() as pid:
        assert check("/healthz", pid) == 0
        assert check("/readyz", pid) == 1


def test_a_server_below_an_init_is_found() -> None:
    # Not the last command of the shell, which would become it.
    with server("sh", "-c", '"$@"; exit 0', "sh") as pid:
        assert check("/healthz", pid) == 0


def test_a_process_that_does_not_listen_is_not_healthy() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        assert check("/healthz", process.pid) == 1
        process.kill()
