"""Which names the server answers to. Knows Host headers; knows no keys and no paths.

Without API keys anybody who reaches the address may use the server, and that includes any web page open in a browser on
the same machine. A page cannot read another server's responses unless the browser treats both as one site, which an
attacker arranges by pointing a domain of theirs at 127.0.0.1 (DNS rebinding). The Host header still carries that
domain, so requests without a key are answered only under names that no stranger can register.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from starlette.datastructures import Headers

from ostro.errors import NotAllowed

_LOCAL = "localhost"
_ANY = "*"
_ALL_ADDRESSES = frozenset({"0.0.0.0", "::", ""})
_LONGEST_SHOWN = 100
# A Host header: a name or an IPv4 address, or an IPv6 address in brackets; then a port.
_HOST = re.compile(r"(?:\[(?P<address>[^\[\]]*)\]|(?P<name>[^\[\]:/@?#\s]*))(?::[0-9]*)?")


@dataclass(frozen=True, slots=True)
class HostRule:
    names: frozenset[str] = frozenset()
    suffixes: tuple[str, ...] = ()
    """Endings of names, each with its dot, from patterns such as *.example.com."""
    allows_all: bool = False

    @classmethod
    def of(cls, allowed: Iterable[str], bound: str | None = None) -> Self:
        """`allowed` are names or patterns; `bound` is the address or name that the server listens on, if known."""
        given = [_normalized(each) for each in allowed]
        own = [] if bound is None else [socket.gethostname() if bound in _ALL_ADDRESSES else bound]
        return cls(
            names=frozenset(map(_normalized, own)) | {each for each in given if not each.startswith(_ANY)},
            suffixes=tuple(each[1:] for each in given if each.startswith("*.")),
            allows_all=_ANY in given,
        )

    def check(self, headers: Headers) -> None:
        """Raises NotAllowed for a request that was sent to another name. Browsers always send a Host."""
        for host in headers.getlist("host"):
            if not self._allows(_without_port(host)):
                raise NotAllowed(
                    f"This server has no API key, so it answers only to names that it knows, and "
                    f"{_short(host)} is not one of them. Start it with --allowed-hosts "
                    f"{_short(_without_port(host)) or 'NAME'} (OSTRO_ALLOWED_HOSTS), set an API key, or call it by its "
                    "IP address."
                )

    def _allows(self, host: str) -> bool:
        return (
            self.allows_all
            or host == _LOCAL
            or host in self.names
            or host.endswith(("." + _LOCAL, *self.suffixes))
            or _is_address(host)
        )


def check_pattern(pattern: str) -> str:
    """Raises ValueError if it is neither a host name nor a pattern."""
    name = pattern.removeprefix("*.")
    is_name = bool(name) and not any(each in name for each in "*/ :")
    if pattern != _ANY and not is_name and not _is_address(pattern.strip("[]")):
        raise ValueError("a host is a name without a port, such as ostro.example.com or *.example.com; * is any")
    return pattern


def _normalized(host: str) -> str:
    return host.strip().lower().removesuffix(".")


def _without_port(host: str) -> str:
    """The name or address in a Host header: `name:8000`, `[::1]:8000`. Empty for what is not of this form, such as
    `[::1].evil.example`: other programs may read another name in it.
    """
    match = _HOST.fullmatch(host.strip())
    return "" if match is None else _normalized(match["address"] or match["name"] or "")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _short(host: str) -> str:
    return host if len(host) <= _LONGEST_SHOWN else host[:_LONGEST_SHOWN] + "…"
