"""The images' health check: `healthcheck.py PATH [PID]` succeeds if the server answers 200 on the path.

Process PID (1, unless told otherwise) or a child of it is the server. It is asked where it listens, as the kernel knows
it, so the check follows the port wherever that was set: a flag, a variable, a file.
"""

import http.client
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_LISTENING = "0A"
_SECONDS = 4


def main() -> int:
    path, pid = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1
    addresses = [address for each in (pid, *_children(pid)) for address in listening(each)]
    return int(not any(_is_healthy(address, path) for address in addresses))


def listening(pid: int) -> Iterator[tuple[str, int]]:
    """The addresses that a process listens on, as one within the container reaches them."""
    sockets = set(_sockets(pid))
    for table, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        with suppress(OSError):
            for line in Path(f"/proc/{pid}/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                if state == _LISTENING and inode in sockets:
                    address, _, port = local.partition(":")
                    yield _reachable(family, address), int(port, 16)


def _sockets(pid: int) -> Iterator[str]:
    """The inodes of a process's sockets."""
    with suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                if (target := os.readlink(entry)).startswith("socket:["):
                    yield target[len("socket:[") : -1]


def _children(pid: int) -> list[int]:
    with suppress(OSError):
        files = Path(f"/proc/{pid}/task").glob("*/children")
        return [int(child) for file in files for child in file.read_text(encoding="ascii").split()]
    return []


def _reachable(family: int, address: str) -> str:
    """The kernel writes words of four bytes in the machine's own order. All addresses are reached by the loopback's."""
    words = struct.pack(f"={len(address) // 8}I", *(int(address[at : at + 8], 16) for at in range(0, len(address), 8)))
    if any(words):
        return socket.inet_ntop(family, words)
    return "127.0.0.1" if family == socket.AF_INET else "::1"


def _is_healthy(address: tuple[str, int], path: str) -> bool:
    connection = http.client.HTTPConnection(*address, timeout=_SECONDS)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except OSError:
        return False
    finally:
        connection.close()


if __name__ == "__main__":
    sys.exit(main())
