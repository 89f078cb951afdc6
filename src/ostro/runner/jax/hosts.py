"""One mesh over several processes, usually on several hosts: the first leads, and the others repeat what it does. Knows
no batch and no model.

JAX requires every process of a mesh to call the same programs in the same order. The leader runs the engine; before it
calls a program, it sends the others the program's number and those arguments that are in its own memory. Arguments on
the devices exist in every process: they are sent as numbers, in the order in which they came to be.
"""

import hmac
import os
import secrets
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from ostro.errors import BadRequest, ModelError
from ostro.runner.jax.programs import Key, Programs

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")
_PATIENCE = 60.0
"""Seconds that the leader waits for the others to connect, and they for it."""
_WAKING = 0.1
"""Seconds after which a process that waits for a call wakes up. To its server it is still loading, and whoever loads is
expected to do something now and then.
"""
_MOST_RECEIVED = 1 << 20
_KEY_BYTES = 32
_INVITATION_BYTES = 256
"""One of them holds the length of what follows; 200 are left for the host's name."""


def join_hosts(environ: Mapping[str, str] = os.environ) -> None:
    """Connects this process to those that the environment names, if it names any. Call it before JAX is used.

    Raises BadRequest if they do not meet.
    """
    if jax.distributed.is_initialized() or (ADDRESS not in environ and len(_tpu_hosts(environ)) < 2):
        return
    given = {"num_processes": _number(environ, COUNT), "process_id": _number(environ, NUMBER)}
    try:
        # Otherwise the coordinator, which checks nothing, would listen on all interfaces.
        bound = environ.get(BIND_ADDRESS, environ.get(ADDRESS))
        jax.distributed.initialize(environ.get(ADDRESS), **given, coordinator_bind_address=bound)
    except (RuntimeError, ValueError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise BadRequest(
            f"The processes of the mesh did not meet ({reason}). Start the same command on every host, with {ADDRESS} "
            f"(HOST:PORT of the first), {COUNT}, and in {NUMBER} the number of the host, from 0."
        ) from error


def num_processes(environ: Mapping[str, str] = os.environ) -> int:
    """As the environment gives it, before JAX has looked for devices; 1 if it does not."""
    return _number(environ, COUNT) or 1


def least(number: int) -> int:
    """The least of all processes' numbers, in each of them."""
    if jax.process_count() == 1:
        return number
    return int(np.min(process_allgather(np.array([number], np.int32))))


def _number(environ: Mapping[str, str], name: str) -> int | None:
    """None leaves it to JAX, which finds out by itself on a TPU."""
    text = environ.get(name)
    if text is not None and not text.isdecimal():
        raise BadRequest(f"{name} is {text!r}. Set it to a whole number.")
    return None if text is None else int(text)


def _tpu_hosts(environ: Mapping[str, str]) -> list[str]:
    listed = next((environ[name] for name in _TPU_HOSTS if environ.get(name)), "")
    return [host for host in listed.split(",") if host]


def _leader_host(environ: Mapping[str, str] = os.environ) -> str:
    if ADDRESS in environ:
        return environ[ADDRESS].rpartition(":")[0].strip("[]")
    hosts = _tpu_hosts(environ)
    return hosts[0].rpartition(":")[0] or hosts[0] if hosts else socket.gethostname()


def leads_others() -> bool:
    """Whether this is the first of several processes."""
    return jax.process_count() > 1 and jax.process_index() == 0


# Calls


class _HostArray(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, array: Any) -> "_HostArray":
        values = np.ascontiguousarray(array)
        return cls(values.dtype.str, values.shape, values.tobytes())

    def array(self) -> Any:
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class _Call(msgspec.Struct, array_like=True):
    program: int
    arguments: list[int | _HostArray]
    """The number of an array on the devices, or an array of the leader's host."""
    dropped: list[int]
    """Arrays that the leader no longer has."""


@dataclass(slots=True)
class LeadingPrograms:
    """Programs that all processes call. Stands in for `Programs` in the leader."""

    programs: Programs
    _followers: list[socket.socket]
    _keys: dict[Key, int]
    _numbers: dict[int, int] = field(default_factory=dict)
    """Of arrays on the devices, by id."""
    _dropped: deque[int] = field(default_factory=deque)
    _count: int = 0

    def __len__(self) -> int:
        return len(self.programs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.programs, name)

    @property
    def failure(self) -> str | None:
        """Why no step can be run any more. Followers send nothing, so one whose socket can be read is gone."""
        watched = select.poll()
        for follower in self._followers:
            watched.register(follower, select.POLLIN)
        return "A process of the mesh is gone. All of them are started again." if watched.poll(0) else None

    def __getitem__(self, key: Key) -> Callable[..., Any]:
        program = self.programs[key]

        def call(*arguments: Any) -> Any:
            leaves = jax.tree.leaves(arguments)
            self._send(self._keys[key], leaves)
            results = _called(program, leaves)
            self.add(results)
            return results

        return call

    def add(self, arrays: Any) -> None:
        """Numbers the arrays of a tree, which every process has."""
        for array in jax.tree.leaves(arrays):
            self._numbers[id(array)] = self._count
            weakref.finalize(array, self._drop, id(array), self._count).atexit = False
            self._count += 1

    def _drop(self, address: int, number: int) -> None:
        # Another array may have the address by now.
        if self._numbers.get(address) == number:
            del self._numbers[address]
        self._dropped.append(number)

    def _send(self, program: int, arguments: Sequence[Any]) -> None:
        sent = [self._numbers[id(each)] if id(each) in self._numbers else _HostArray.of(each) for each in arguments]
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        message = msgspec.msgpack.encode(_Call(program, sent, dropped))
        framed = len(message).to_bytes(8, "little") + message
        for follower in self._followers:
            try:
                follower.sendall(framed)
            except OSError as error:
                raise ModelError(
                    f"A process of the mesh is gone ({error}). All of them have to be started again."
                ) from error


def lead(programs: Programs, arrays: Any) -> LeadingPrograms:
    """For the first process. `arrays` is a tree of those that every process has before the first call."""
    leading = LeadingPrograms(programs, _gather_followers(), _numbered(programs))
    leading.add(arrays)
    return leading


def follow(programs: Programs, arrays: Any, done: Callable[[], None]) -> None:
    """For the other processes: repeats the leader's calls until it closes the connection. Calls `done` after each."""
    known: dict[int, Any] = dict(enumerate(jax.tree.leaves(arrays)))
    keys = {number: key for key, number in _numbered(programs).items()}
    count = len(known)
    with _connection() as leader:
        for call in _calls(leader):
            leaves = [known[each] if isinstance(each, int) else each.array() for each in call.arguments]
            results = jax.tree.leaves(_called(programs[keys[call.program]], leaves))
            known |= enumerate(results, count)
            count += len(results)
            for number in call.dropped:
                del known[number]
            del leaves, results
            done()


def _numbered(programs: Programs) -> dict[Key, int]:
    # Sorted: processes may have compiled them in another order.
    return {key: number for number, key in enumerate(sorted(programs, key=repr))}


def _called(program: Any, leaves: Sequence[Any]) -> Any:
    """Calls a program with the leaves of its arguments."""
    shardings = program.in_tree.flatten_up_to(program.input_shardings)
    arguments, _ = jax.tree.unflatten(program.in_tree, map(_divided, leaves, shardings))
    return program(*arguments)


def _divided(argument: Any, sharding: Any) -> Any:
    """Each process has to pass its own part of what is divided over the mesh and comes from the host."""
    if not isinstance(argument, np.ndarray) or sharding is None or sharding.is_fully_replicated:
        return argument
    return jax.make_array_from_callback(argument.shape, sharding, lambda index: argument[index])


def _calls(leader: socket.socket) -> Iterator[_Call]:
    decoder = msgspec.msgpack.Decoder(_Call)
    while len(size := _received(leader, 8, waits=True)) == 8:
        length = int.from_bytes(size, "little")
        message = _received(leader, length, waits=True)
        if len(message) < length:
            return
        yield decoder.decode(message)


# Connections


class _Invitation(msgspec.Struct, array_like=True):
    """Where the leader listens, and what proves that a process belongs to the mesh."""

    host: str
    port: int
    key: bytes


def _gather_followers() -> list[socket.socket]:
    host, key = _leader_host(), secrets.token_bytes(_KEY_BYTES)
    try:
        listening = socket.create_server((host, 0), family=_family(host))
    except OSError as error:
        raise BadRequest(
            f"The first process of the mesh cannot listen on {host} ({error}). Set {ADDRESS} to an address of its host."
        ) from error
    with listening:
        listening.settimeout(_PATIENCE)
        _broadcast(_Invitation(host, listening.getsockname()[1], key))
        followers: list[socket.socket] = []
        while len(followers) < jax.process_count() - 1:
            try:
                arrived, _ = listening.accept()
            except TimeoutError as error:
                raise BadRequest(
                    f"{jax.process_count() - 1 - len(followers)} processes of the mesh cannot reach {host}. Open the "
                    "network between the hosts."
                ) from error
            if _is_follower(arrived, key):
                followers.append(arrived)
            else:
                arrived.close()
    return followers


def _connection() -> socket.socket:
    invitation = _broadcast(None)
    try:
        leader = socket.create_connection((invitation.host, invitation.port), timeout=_PATIENCE)
        leader.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        leader.sendall(hmac.digest(invitation.key, _received(leader, _KEY_BYTES, waits=False), "sha256"))
    except OSError as error:
        raise BadRequest(
            f"Cannot reach the first process of the mesh at {invitation.host}:{invitation.port} ({error}). Open the "
            "network between the hosts."
        ) from error
    leader.settimeout(_WAKING)
    return leader


def _is_follower(arrived: socket.socket, key: bytes) -> bool:
    """Whether it knows the key, which is never sent over this connection."""
    challenge = secrets.token_bytes(_KEY_BYTES)
    arrived.settimeout(_PATIENCE)
    try:
        arrived.sendall(challenge)
        answer = _received(arrived, _KEY_BYTES, waits=False)
        arrived.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        arrived.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    except OSError:
        return False
    return hmac.compare_digest(answer, hmac.digest(key, challenge, "sha256"))


def _received(connection: socket.socket, count: int, *, waits: bool) -> bytes:
    """So many bytes, or fewer if the connection ends before, or times out and this function `waits` no longer."""
    found = bytearray()
    while len(found) < count:
        try:
            more = connection.recv(min(count - len(found), _MOST_RECEIVED))
        except TimeoutError:
            if waits:
                continue
            break
        except OSError:
            break
        if not more:
            break
        found += more
    return bytes(found)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]


def _broadcast(invitation: _Invitation | None) -> _Invitation:
    """The leader's, in every process."""
    sent = np.zeros(_INVITATION_BYTES, np.uint8)
    if invitation is not None:
        encoded = msgspec.msgpack.encode(invitation)
        sent[0] = len(encoded)
        sent[1 : 1 + len(encoded)] = np.frombuffer(encoded, np.uint8)
    received = np.asarray(broadcast_one_to_all(sent)).astype(np.uint8)
    return msgspec.msgpack.decode(received[1 : 1 + received[0]].tobytes(), type=_Invitation)
