"""A temporary server for a command: `ostro serve` as a subprocess on a free port.

It ends with the command, however that ends: it stops when its standard input, a pipe from the command, is closed.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ostro.client.client import Client
from ostro.errors import DiskFull, ModelError

_POLL_SECONDS = 0.1
_END_SECONDS = 15.0
# Loggers that report startup progress.
_AT_WORK = ("ostro.sources.", "ostro.weights.", "ostro.backends.")


@contextmanager
def own_server(model: str | None, waiting: Callable[[float, str], None], *, key: str | None = None) -> Iterator[Client]:
    """A client of a server that is ready. `waiting` is called periodically with the seconds since the start and the
    server's current activity. `key` is the server's API key, for callers that also send requests of their own.
    """
    key = key or secrets.token_urlsafe(24)
    command = [sys.executable, "-m", "ostro.cli.own_server", *([] if model is None else [model])]
    options = ["--host", "127.0.0.1", "--port", "0", "--log-format", "json", "--no-access-log", "--no-listed"]
    with _scratch() as directory:
        log = Path(directory) / "server.log"
        with log.open("wb") as sink:
            child = subprocess.Popen(
                [*command, *options],
                stdin=subprocess.PIPE,
                stdout=sink,
                stderr=sink,
                env={**os.environ, "OSTRO_API_KEY": key},
                # Interrupts are for the command, not for its server.
                start_new_session=True,
            )
        try:
            with _client_when_ready(child, log, key, waiting) as client:
                yield client
        finally:
            _end(child)


def _scratch() -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix="ostro-")
    except OSError as error:
        raise DiskFull(
            f"The server's log cannot be written ({error.strerror or error}). Set TMPDIR to a directory that can."
        ) from error


def _client_when_ready(
    child: subprocess.Popen[bytes], log: Path, key: str, waiting: Callable[[float, str], None]
) -> Client:
    began = time.monotonic()
    client: Client | None = None
    try:
        while child.poll() is None:
            lines = _lines(log)
            waiting(time.monotonic() - began, _doing(lines))
            if client is None and (url := _address(lines)) is not None:
                client = Client(url, key)
            if client is not None and client.ready():
                return client
            time.sleep(_POLL_SECONDS)
    except BaseException:
        if client is not None:
            client.close()
        raise
    if client is not None:
        client.close()
    raise ModelError(_reason(log))


def _lines(log: Path) -> list[dict[str, object]]:
    """Complete JSON log lines: the last one may still be in the middle of being written."""
    lines = log.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def _address(lines: Iterable[dict[str, object]]) -> str | None:
    return next((str(line["url"]) for line in lines if line["message"] == "listening"), None)


def _doing(lines: Iterable[dict[str, object]]) -> str:
    """The current slow activity: a download, packing weights."""
    told = [str(line["message"]) for line in lines if str(line["logger"]).startswith(_AT_WORK)]
    return told[-1] if told else ""


def _reason(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    told = [line.removeprefix("ostro: ") for line in lines if line.startswith("ostro: ")]
    return (told or lines or ["The server ended before it was ready. Run `ostro serve` to see why."])[-1]


def _end(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    child.stdin.close()
    try:
        child.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _stop_when_input_ends() -> None:
    """Runs in the child."""
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    from ostro.cli import main

    threading.Thread(target=_stop_when_input_ends, daemon=True, name="input").start()
    sys.exit(main(["serve", *sys.argv[1:]]))
