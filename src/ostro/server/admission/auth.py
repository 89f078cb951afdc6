"""API keys, and the paths that need none. Knows paths and headers; knows no routes.

Once a key is set, every path needs one, even paths that do not exist; the exceptions are the few listed here, the page
at /docs, which asks for the key itself, and the playground's own files, which are answered before this check. The check
looks at the raw path, before any routing, and at its decoded form: the stricter result counts. Keys are kept as SHA-256
digests, and all of them are compared, each in constant time.

A browser can reach servers that outsiders cannot, on behalf of any web page it shows, and names the page in Origin. So
if /admin needs no key, it is closed to pages from other origins. And requests without a key are answered only under the
server's own names (`server.admission.hosts`), except for probes: a page could use DNS rebinding to make the browser
treat the server as its own.
"""

import hashlib
import hmac
import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ostro.errors import BadRequest, NotAllowed, NotAuthorized, OstroError, TooManyAttempts
from ostro.server.admission.hosts import HostRule
from ostro.server.error_handlers import refuse
from ostro.server.telemetry.record import RequestRecord

ANONYMOUS = "anonymous"
# For probes, load balancers and, the last one, people; they reveal nothing about the model.
OPEN_PATHS = frozenset({"/healthz", "/readyz", "/health", "/"})
# The page that shows the API, and its files: they are the same everywhere. What it shows, /openapi.json, needs a key.
DOCS_PATHS = frozenset({"/docs", "/redoc"})
_DOCS_PREFIX = "/docs/"
# For operators only.
ADMIN_PREFIX = "/admin"
# Accepts any key, because scrapers are not administrators; but requires one as soon as any key is set.
METRICS_PATH = "/metrics"

_LONGEST_KEY = 4096


@dataclass(frozen=True, slots=True)
class Key:
    label: str
    """Label in logs and for fair queueing: the start of its digest, which does not reveal the key."""
    digest: bytes
    may_raise_priority: bool = False
    """Whether its requests may have a negative priority."""

    @classmethod
    def of(cls, key: str, kind: str = "key", *, may_raise_priority: bool = False) -> Self:
        digest = hashlib.sha256(key.encode()).digest()
        return cls(f"{kind}-{digest.hex()[:8]}", digest, may_raise_priority)


@dataclass(frozen=True, slots=True)
class Keyring:
    """The accepted keys. Without any, everything is open; with only an admin key, everything but /admin."""

    keys: tuple[Key, ...] = ()
    admin: tuple[Key, ...] = ()

    @classmethod
    def of(cls, keys: Iterable[str] = (), admin: Iterable[str] = (), urgent: Iterable[str] = ()) -> Self:
        """`urgent` keys are API keys whose requests may have a negative priority, like those of admin keys."""
        urgent = dict.fromkeys(urgent)
        every = {**dict.fromkeys(keys), **urgent}
        return cls(
            tuple(Key.of(each, may_raise_priority=each in urgent) for each in every),
            tuple(Key.of(each, "admin", may_raise_priority=True) for each in dict.fromkeys(admin)),
        )

    @property
    def num_callers(self) -> int:
        """How many different callers share the server, not counting the operator's admin keys."""
        return max(1, len(self.keys))

    def identify(self, paths: Sequence[str], key: str | None) -> Key | None:
        """The caller, or None. `paths` are all spellings of the path. Raises NotAuthorized if the key is wrong."""
        known = None if key is None else _find(self.keys + self.admin, key)
        for path in paths:
            needed = self._needed(path)
            if needed and known not in needed:
                raise _refusal(key, known)
        return known

    def knows(self, key: str) -> bool:
        return _find(self.keys + self.admin, key) is not None

    def is_operator(self, label: str) -> bool:
        """Whether it is an admin key's label."""
        return any(key.label == label for key in self.admin)

    def _needed(self, path: str) -> tuple[Key, ...]:
        """The keys of which one is required; empty if the path is open."""
        if path in OPEN_PATHS or _is_of_docs(path):
            return ()
        if _is_admins(path):
            return self.admin or self.keys
        return self.keys + self.admin if self.keys or path == METRICS_PATH else ()


def _is_admins(path: str) -> bool:
    return path == ADMIN_PREFIX or path.startswith(ADMIN_PREFIX + "/")


def _is_of_docs(path: str) -> bool:
    return path in DOCS_PATHS or (path.startswith(_DOCS_PREFIX) and ".." not in path and "%" not in path)


def _refusal(given: str | None, known: Key | None) -> NotAuthorized:
    if given is None:
        return NotAuthorized("The request has no API key. Send it in a header: Authorization: Bearer YOUR_KEY.")
    if known is None:
        return NotAuthorized("This API key is unknown here. Check the key.")
    return NotAuthorized("This needs the admin key, and you sent another key.")


def _find(keys: Sequence[Key], given: str) -> Key | None:
    digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
    found = None
    for key in keys:
        if hmac.compare_digest(key.digest, digest):
            found = key
    return found


def read_key_file(path: Path) -> list[str]:
    """One key per line; empty lines and lines starting with # are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise BadRequest(f"Cannot read the key file {path}: {error.strerror}. Check the path.") from error
    except UnicodeDecodeError as error:
        raise BadRequest(f"The key file {path} is not UTF-8 text. Write one key per line.") from error
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise BadRequest(f"The key file {path} holds no keys. Write one per line.")
    if not all(map(str.isascii, keys)):
        raise BadRequest(f"The key file {path} holds a key that is not plain ASCII, as a header's text must be.")
    return keys


class Authentication:
    """ASGI middleware: rejects requests without the key that the path requires."""

    def __init__(
        self, app: ASGIApp, keyring: Keyring, origins: Iterable[str] = (), hosts: HostRule | None = None
    ) -> None:
        """Pages from `origins` may call /admin without a key, if none is set. `hosts` are the host names that requests
        without a key may use; None allows any.
        """
        self.app = app
        self.keyring = keyring
        self.origins = frozenset(origins)
        self.hosts = hosts
        self._throttle = Throttle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        paths, headers = _paths(scope), Headers(scope=scope)
        try:
            key = self._caller(scope, paths, headers)
            if key is None and any(map(_is_admins, paths)):
                self._check_origin(headers)
        except (NotAuthorized, NotAllowed, TooManyAttempts) as error:
            await _refuse(error, scope, receive, send)
            return
        record = scope.get("state", {}).get("record")
        if isinstance(record, RequestRecord):
            record.key = ANONYMOUS if key is None else key.label
            record.is_operator = self.keyring.is_operator(record.key)
            record.may_raise_priority = key is None or key.may_raise_priority
        await self.app(scope, receive, send)

    def _caller(self, scope: Scope, paths: Sequence[str], headers: Headers) -> Key | None:
        """The caller. Raises TooManyAttempts for an address that keeps guessing keys."""
        client = scope.get("client")
        address = network_of(client[0] if client else None)
        try:
            return check_caller(self.keyring, self.hosts, paths, headers)
        except NotAuthorized:
            given = given_key(headers)
            if given is not None and not self.keyring.knows(given):
                self._throttle.fail(address)
            raise

    def _check_origin(self, headers: Headers) -> None:
        origin = headers.get("origin")
        if origin is None or origin in self.origins:
            return
        # Without the scheme: a proxy in front may terminate TLS.
        if origin.partition("://")[2].lower() != headers.get("host", "").lower():
            raise NotAuthorized(
                "A page from another server may not call /admin without a key. Start the server with --admin-key, and "
                "send the key in a header: Authorization: Bearer YOUR_KEY."
            )


def check_caller(keyring: Keyring, hosts: HostRule | None, paths: Sequence[str], headers: Headers) -> Key | None:
    """The caller; None is anonymous. Raises NotAuthorized for a key that does not fit the path, and NotAllowed for a
    request without a key to a host name that is not the server's.
    """
    key = keyring.identify(paths, given_key(headers))
    if key is None and hosts is not None and not OPEN_PATHS.issuperset(paths):
        hosts.check(headers)
    return key


def _paths(scope: Scope) -> list[str]:
    """The path in decoded and in raw form, as the router sees it: without the prefix that the app is mounted under."""
    raw, root = scope.get("raw_path"), scope.get("root_path", "")
    spelt = [scope["path"]] if raw is None else [scope["path"], bytes(raw).decode("latin-1")]
    return [path.removeprefix(root) if path.startswith(root + "/") else path for path in spelt]


def given_key(headers: Headers) -> str | None:
    """The key that a request came with: as a bearer token, or as Anthropic's clients send theirs."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        key = headers.get("x-api-key", "")
    key = key.strip()
    return key if key and len(key) <= _LONGEST_KEY else None


async def _refuse(error: OstroError, scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008, "reason": "unauthorized"})
        return
    await refuse(error, scope, receive, send)


_ATTEMPTS: Final = 20
_SECONDS_EACH: Final = 3.0
_MOST_ADDRESSES: Final = 4096
# An IPv6 user has any number of addresses, but one network.
_NETWORK_BITS: Final = 64


@dataclass(slots=True)
class _Visitor:
    attempts: float
    at: float


class Throttle:
    """Limits how many wrong keys an address may send.

    Every address has a few attempts, and gets a new one every few seconds. Once they are used up, a wrong key gets 429
    and Retry-After. A valid key is never delayed: many clients may share an address, for example behind a proxy, and
    one that guesses must not lock out the others. So guessing is made infeasible by the length of keys, not by this
    limit.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # Least recently seen first.
        self._visitors: OrderedDict[str, _Visitor] = OrderedDict()

    def fail(self, address: str) -> None:
        """Counts a wrong key from this address. Raises TooManyAttempts if no attempts are left."""
        visitor = self._visitor(address)
        self._check(visitor)
        visitor.attempts -= 1

    def _visitor(self, address: str) -> _Visitor:
        now = self._clock()
        visitor = self._visitors.setdefault(address, _Visitor(_ATTEMPTS, now))
        self._visitors.move_to_end(address)
        if len(self._visitors) > _MOST_ADDRESSES:
            self._visitors.popitem(last=False)
        visitor.attempts = min(_ATTEMPTS, visitor.attempts + (now - visitor.at) / _SECONDS_EACH)
        visitor.at = now
        return visitor

    def _check(self, visitor: _Visitor) -> None:
        if visitor.attempts < 1:
            raise TooManyAttempts(
                "Too many wrong API keys have come from your address. Check the key, and try again in a few seconds.",
                retry_after=math.ceil((1 - visitor.attempts) * _SECONDS_EACH),
            )


def network_of(host: str | None) -> str:
    """The network that attempts are counted by: an IPv4 address or an IPv6 prefix."""
    if host is None or ":" not in host:
        return host or ""
    try:
        return str(ipaddress.ip_network((host.partition("%")[0], _NETWORK_BITS), strict=False))
    except ValueError:
        return host
