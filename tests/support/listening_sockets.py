"""Which sockets a process and all that it started listen on, as the kernel knows it."""

from __future__ import annotations

import ipaddress
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTENING = "0A"
_ACCEPTS = 0x10000


@dataclass(frozen=True)
class Listening:
    pid: int
    command: str
    address: str
    """An IP address, or the path of a Unix socket; an abstract one's begins with @."""
    port: int | None

    @property
    def is_loopback(self) -> bool:
        with suppress(ValueError):
            return ipaddress.ip_address(self.address).is_loopback
        return False


def listening_in(pid: int) -> list[Listening]:
    """Those of the process and of all below it."""
    found = []
    for each in _tree(pid):
        places = {**_internet(each), **_unix(each)}
        for inode in _inodes(each):
            if inode in places:
                command = Path(f"/proc/{each}/cmdline").read_text().replace("\0", " ")
                found.append(Listening(each, command, *places[inode]))
    return found


def _tree(pid: int) -> list[int]:
    children = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            children += [int(each) for each in (task / "children").read_text().split()]
    return [pid, *(each for child in children for each in _tree(child))]


def _inodes(pid: int) -> list[str]:
    inodes = []
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            target = os.readlink(link)
            if target.startswith("socket:["):
                inodes.append(target[8:-1])
    return inodes


def _internet(pid: int) -> dict[str, tuple[str, int | None]]:
    found: dict[str, tuple[str, int | None]] = {}
    for name in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING or name.startswith("udp"):
                host, _, port = fields[1].partition(":")
                found[fields[9]] = _address(host), int(port, 16)
    return found


def _address(host: str) -> str:
    words = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
    return str(ipaddress.ip_address(struct.pack(f"={len(words)}I", *words)))


def _unix(pid: int) -> dict[str, tuple[str, int | None]]:
    found: dict[str, tuple[str, int | None]] = {}
    for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if int(fields[3], 16) & _ACCEPTS:
            found[fields[6]] = fields[7] if len(fields) > 7 else "", None
    return found
