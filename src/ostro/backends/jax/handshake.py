"""Connections from the followers of a mesh to its leader. Whoever knows the mesh's key is a follower; any other
connection is closed, and delays nobody. Imports no JAX.
"""

import hmac
import ipaddress
import secrets
import selectors
import socket
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from ostro.errors import BadRequest, Unavailable
from ostro.system.mesh_hosts import ADDRESS, BIND_ADDRESS

_PATIENCE = 60.0
"""Seconds that the leader waits for all followers to connect, and each of them to reach it."""
_PROOF_SECONDS = 5.0
"""Seconds in which a connection has to prove that it is a follower's."""
_MOST_CANDIDATES = 64
"""Unproven connections at a time."""
_MOST_RECEIVED = 1 << 20
_KEY_BYTES = 32
_ADMITTED = b"\1"
"""Sent to the followers once all of them have connected."""


class Invitation(msgspec.Struct, array_like=True):
    """Where the leader listens, and what proves that a process belongs to the mesh."""

    host: str
    port: int
    key: bytes


def listen(host: str, bound: str | None = None) -> tuple[socket.socket, Invitation]:
    """A socket for followers, which reach this host as `host`, and the invitation to send them. It listens on `bound`
    if that is given.
    """
    bound = bound or host
    try:
        family = socket.getaddrinfo(bound, None, type=socket.SOCK_STREAM)[0][0]
        # On "::", IPv4 is accepted too, as JAX's coordinator does.
        dualstack = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        listening = socket.create_server((bound, 0), family=family, dualstack_ipv6=dualstack)
    except OSError as error:
        raise BadRequest(
            f"The first process of the mesh cannot listen on {bound} ({error}). Set {ADDRESS} to an address of its "
            f"host, or {BIND_ADDRESS} to the one to listen on."
        ) from error
    return listening, Invitation(host, listening.getsockname()[1], secrets.token_bytes(_KEY_BYTES))


def connect(invitation: Invitation) -> socket.socket:
    """For a follower: returns once the leader has admitted all of them. Raises Unavailable if it cannot be reached, or
    does not admit them.
    """
    place = f"the first process of the mesh at {invitation.host}:{invitation.port}"
    try:
        leader = socket.create_connection((invitation.host, invitation.port), timeout=_PATIENCE)
    except OSError as error:
        raise Unavailable(f"Cannot reach {place} ({error}). Open the network between the hosts.") from error
    if not _is_admitted(leader, invitation.key):
        leader.close()
        raise Unavailable(
            f"This process was not admitted by {place}, whose log says why. All of them have to start again."
        )
    leader.settimeout(None)
    return leader


def _is_admitted(leader: socket.socket, key: bytes) -> bool:
    # Longer than the leader waits for the others.
    leader.settimeout(2 * _PATIENCE)
    try:
        leader.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        challenge = received(leader, _KEY_BYTES)
        if len(challenge) < _KEY_BYTES:
            return False
        leader.sendall(_proof(key, challenge))
    except OSError:
        return False
    return received(leader, len(_ADMITTED)) == _ADMITTED


def admit_followers(
    listening: socket.socket,
    key: bytes,
    count: int,
    *,
    patience: float = _PATIENCE,
    proof_seconds: float = _PROOF_SECONDS,
) -> list[socket.socket]:
    """The connections of `count` followers, admitted once all have connected. Raises Unavailable if that takes longer
    than `patience` seconds.
    """
    with _Handshakes(listening, key, proof_seconds) as handshakes:
        until = time.monotonic() + patience
        while len(handshakes.followers) < count:
            if time.monotonic() >= until:
                missing = count - len(handshakes.followers)
                raise Unavailable(
                    f"{missing} {'process' if missing == 1 else 'processes'} of the mesh did not connect to "
                    f"{listening.getsockname()[0]}. Open the network between the hosts."
                )
            handshakes.wait(until)
        return handshakes.taken()


def received(connection: socket.socket, count: int) -> bytes:
    """`count` bytes, or fewer if the connection ends or times out first."""
    found = bytearray()
    while len(found) < count:
        try:
            more = connection.recv(min(count - len(found), _MOST_RECEIVED))
        except OSError:
            break
        if not more:
            break
        found += more
    return bytes(found)


def _proof(key: bytes, challenge: bytes) -> bytes:
    """Proves knowledge of the key, which itself is never sent over these connections."""
    return hmac.digest(key, challenge, "sha256")


@dataclass(slots=True)
class _Candidate:
    """A connection that has yet to prove that it is a follower's."""

    until: float
    network: str
    challenge: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES))
    answer: bytes = b""


class _Handshakes:
    """Serves all candidates concurrently, since any of them may stay silent."""

    def __init__(self, listening: socket.socket, key: bytes, proof_seconds: float) -> None:
        self.followers: list[socket.socket] = []
        self._listening, self._key, self._proof_seconds = listening, key, proof_seconds
        self._candidates: dict[socket.socket, _Candidate] = {}
        self._selector = selectors.DefaultSelector()
        listening.setblocking(False)
        self._selector.register(listening, selectors.EVENT_READ)

    def __enter__(self) -> "_Handshakes":
        return self

    def __exit__(self, *_: object) -> None:
        for candidate in list(self._candidates):
            self._reject(candidate)
        for follower in self.followers:
            follower.close()
        self._selector.close()

    def taken(self) -> list[socket.socket]:
        """The followers, which are admitted now. The caller closes their connections."""
        followers, self.followers = self.followers, []
        for follower in followers:
            # A follower that is already gone is noticed like one that leaves later.
            with suppress(OSError):
                follower.sendall(_ADMITTED)
        return followers

    def wait(self, until: float) -> None:
        """Handles the next events, waiting for them up to that time."""
        next_end = min([until, *(candidate.until for candidate in self._candidates.values())])
        for ready, _ in self._selector.select(max(0.0, next_end - time.monotonic())):
            if ready.fileobj is self._listening:
                self._accept()
            elif isinstance(ready.fileobj, socket.socket) and ready.fileobj in self._candidates:
                self._receive(ready.fileobj)
        for connection in [each for each, candidate in self._candidates.items() if candidate.until <= time.monotonic()]:
            self._reject(connection)

    def _accept(self) -> None:
        try:
            arrived, (address, *_) = self._listening.accept()
        except OSError:
            # It has already disconnected.
            return
        if len(self._candidates) == _MOST_CANDIDATES:
            self._reject(self._least_likely())
        candidate = self._candidates[arrived] = _Candidate(time.monotonic() + self._proof_seconds, _network_of(address))
        arrived.setblocking(False)
        self._selector.register(arrived, selectors.EVENT_READ)
        with suppress(OSError):
            arrived.sendall(candidate.challenge)

    def _least_likely(self) -> socket.socket:
        """The oldest candidate of the network with the most candidates. Followers answer at once, and one network alone
        never displaces a follower in another.
        """
        [(busiest, _)] = Counter(candidate.network for candidate in self._candidates.values()).most_common(1)
        return next(each for each, candidate in self._candidates.items() if candidate.network == busiest)

    def _receive(self, connection: socket.socket) -> None:
        candidate = self._candidates[connection]
        more = received(connection, _KEY_BYTES - len(candidate.answer))
        candidate.answer += more
        if len(candidate.answer) == _KEY_BYTES and hmac.compare_digest(
            candidate.answer, _proof(self._key, candidate.challenge)
        ):
            self._admit(connection)
        elif not more or len(candidate.answer) == _KEY_BYTES:
            self._reject(connection)

    def _admit(self, connection: socket.socket) -> None:
        del self._candidates[connection]
        self._selector.unregister(connection)
        connection.setblocking(True)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.followers.append(connection)

    def _reject(self, connection: socket.socket) -> None:
        del self._candidates[connection]
        self._selector.unregister(connection)
        connection.close()


def _network_of(address: str) -> str:
    """The address itself, or of an IPv6 address its first 64 bits: one host may use all others of them."""
    host = ipaddress.ip_address(address.partition("%")[0])
    if host.version == 4:
        return address
    return str(host.ipv4_mapped or ipaddress.ip_network((host, 64), strict=False))
