"""Which servers of this user run on this machine: each has a file that says where it listens and what it serves.

~/.local/state/ostro/servers/HOST-PID.json      (XDG_STATE_HOME) readable only by its user

A server that was killed leaves its file behind. Its process is recognised by more than its id, and whoever reads the
files deletes those of processes that have ended. Without a directory that can be written, a server just has none.
"""

import glob
import json
import os
import socket
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from ostro.system.file_trust import why_untrusted
from ostro.system.processes import identity

_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class ServedModel:
    name: str
    """Its name for clients."""
    state: str
    device_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    pid: int
    identity: str
    """Identity of its process, from `system.processes`."""
    url: str
    """Its address for programs on this machine."""
    version: str
    started: float
    """Seconds since the epoch."""
    state: str
    """loading, ready, failed or draining."""
    has_keys: bool
    drain_seconds: float
    """How long its requests may take once it is told to stop."""
    models: tuple[ServedModel, ...] = ()
    """Those that are loaded or about to be."""
    requests_left: int | None = None
    """While it drains: requests that are still being answered."""


def records_directory() -> Path:
    """In the user's state directory (XDG)."""
    return Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state").expanduser() / "ostro" / "servers"


class OwnRecord:
    """The file of this process's server. Does nothing where it cannot be written."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._path = directory / f"{_host()}-{os.getpid()}.json"
        self._written: ServerRecord | None = None

    def write(self, record: ServerRecord) -> None:
        if record == self._written:
            return
        self._written = record
        with suppress(OSError):
            self._replace(json.dumps(asdict(record)))

    def remove(self) -> None:
        with suppress(OSError):
            self._path.unlink(missing_ok=True)

    def _replace(self, text: str) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if stat.S_IMODE(self._directory.stat().st_mode) != 0o700:
            self._directory.chmod(0o700)
        new = self._path.with_suffix(".new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="utf-8") as file:
            file.write(text)
        new.replace(self._path)


def recorded_servers(directory: Path) -> list[ServerRecord]:
    """Servers that run here, the oldest first."""
    return sorted(_running(directory), key=lambda record: (record.started, record.pid))


def is_running(record: ServerRecord) -> bool:
    """Whether this very server runs, and not another program that got its process id."""
    return identity(record.pid) == record.identity


def _running(directory: Path) -> Iterator[ServerRecord]:
    # Home directories may be shared between machines.
    for path in directory.glob(f"{glob.escape(_host())}-*.json"):
        given = _read(path)
        if given is None:
            continue
        try:
            record = _record(given)
        except (KeyError, TypeError, ValueError):
            # Another version wrote it, and knows what to do with it.
            continue
        if is_running(record):
            yield record
        else:
            with suppress(OSError):
                path.unlink()


def _read(path: Path) -> Mapping[str, object] | None:
    """What the file says, if we or root have written it."""
    try:
        with path.open("rb") as file:
            if why_untrusted(file.fileno(), group_may_write=False) is not None:
                return None
            given = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return None
    return given if isinstance(given, dict) else None


def _record(given: Mapping[str, object]) -> ServerRecord:
    fields = {name: given[name] for name in ServerRecord.__slots__}
    models = fields.pop("models")
    if not isinstance(models, list) or not isinstance(given["pid"], int) or given["pid"] <= 0:
        raise TypeError
    return ServerRecord(**fields, models=tuple(ServedModel(**each) for each in models))  # type: ignore[arg-type]


def _host() -> str:
    return socket.gethostname().replace("/", "_")
