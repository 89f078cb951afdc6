"""Which of this user's servers a command means. Reads their records; asks no server."""

from collections.abc import Sequence
from urllib.parse import urlsplit

from ostro.errors import BadRequest, ModelNotFound
from ostro.system.server_records import ServerRecord, recorded_servers, records_directory

DEFAULT_URL = "http://127.0.0.1:8000"
_SAME_HOSTS = ("localhost", "0.0.0.0", "127.0.0.1")
_HTTP = "http://"


def running_servers() -> list[ServerRecord]:
    """Those that `ostro ps` shows, the oldest first."""
    try:
        directory = records_directory()
    except RuntimeError:
        # This user has no home, so that no server of theirs is listed.
        return []
    return recorded_servers(directory)


def models_of(record: ServerRecord) -> str:
    return ", ".join(model.name for model in record.models) or "none loaded"


def shown(record: ServerRecord) -> str:
    """In a message."""
    return f"{record.url} (pid {record.pid}, {models_of(record)})"


def named(target: str, servers: Sequence[ServerRecord]) -> ServerRecord:
    """The server with this process id, port, address or model."""
    found = [record for record in servers if _is_meant(target, record)]
    if len(found) == 1:
        return found[0]
    if found:
        raise BadRequest(f"Several servers serve {target}: {_listed(found)}. Give a process id or an address.")
    others = f"Running: {_listed(servers)}." if servers else "None of yours runs here."
    raise ModelNotFound(f"No server of yours is {target}. {others} `ostro ps` lists them.")


def only(servers: Sequence[ServerRecord], cure: str) -> ServerRecord:
    """The one that runs. Raises BadRequest with the cure if there are several."""
    if len(servers) > 1:
        raise BadRequest(f"Several servers run here: {_listed(servers)}. {cure}")
    return servers[0]


def _is_meant(target: str, record: ServerRecord) -> bool:
    if target.isdecimal():
        place = _place(record.url)
        return int(target) == record.pid or (place is not None and int(target) == place[1])
    return target in [model.name for model in record.models] or _place(target) == _place(record.url)


def _place(address: str) -> tuple[str, int] | None:
    try:
        parts = urlsplit(address if "://" in address else _HTTP + address)
        host, port = parts.hostname, parts.port
    except ValueError:
        return None
    if host is None or port is None:
        return None
    return ("127.0.0.1" if host in _SAME_HOSTS else host), port


def _listed(servers: Sequence[ServerRecord]) -> str:
    return "; ".join(map(shown, servers))
