"""One mesh over several processes, usually on several hosts: the first leads, and the others repeat what it does. Knows
no batch and no model.

JAX requires every process of a mesh to call the same programs in the same order. The leader runs the engine; before it
calls a program, it sends the others the program's number and those arguments that are in its own memory. Arguments on
the devices exist in every process: they are sent as numbers, in the order in which they came to be.
"""

import hashlib
import json
import os
import select
import socket
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import jax
import msgspec
import numpy as np
from jax._src.distributed import global_state
from jax.experimental.multihost_utils import broadcast_one_to_all, process_allgather

from ostro.backends.jax.handshake import Invitation, admit_followers, connect, listen, received
from ostro.backends.jax.programs import Key, Programs
from ostro.errors import BadRequest, Unavailable
from ostro.system.mesh_hosts import HOW_TO_START, mesh_hosts

_AGREEMENT_MS = 3_600_000
"""Long, because hosts may download or compile first. A host that dies ends the others long before this."""
_LONGEST_SHOWN = 60
_INVITATION_BYTES = 256
"""One byte holds the length of the rest; about 200 are left for the host's name."""


def join_hosts(environ: Mapping[str, str] = os.environ) -> None:
    """Connects this process to the others that the environment names, if any. Call it before JAX is used.

    Raises BadRequest if the environment is wrong, and Unavailable if the processes cannot connect.
    """
    hosts = mesh_hosts(environ)
    if hosts is None or jax.distributed.is_initialized():
        return
    try:
        jax.distributed.initialize(
            hosts.address, hosts.count, hosts.number, coordinator_bind_address=hosts.bind_address
        )
    except (RuntimeError, ValueError, TypeError) as error:
        # XLA's own errors, such as a timeout, are RuntimeErrors.
        kind = Unavailable if isinstance(error, RuntimeError) else BadRequest
        reason = str(error).splitlines()[0]
        raise kind(f"The processes of the mesh did not meet ({reason}). {HOW_TO_START}") from error


def agree(stage: str, facts: Mapping[str, str]) -> None:
    """Returns once every process has reached this stage with the same facts. Otherwise raises BadRequest in each of
    them, naming what differs. A model reaches a stage once. Raises Unavailable if a process is lost meanwhile.
    """
    # The coordinator's store, which needs no devices. It has no public name in JAX.
    client, count = global_state.client, global_state.num_processes
    if client is None or count is None or count == 1:
        return
    short = {name: fact if len(fact) <= _LONGEST_SHOWN else _digest(fact) for name, fact in facts.items()}
    try:
        client.key_value_set(f"ostro/{stage}/{global_state.process_id}", json.dumps(short))
    except RuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise Unavailable(_gone(error)) from error
        raise BadRequest(
            "The processes of a mesh run one model together, and have loaded one. Run another in other processes."
        ) from error
    try:
        answers = [client.blocking_key_value_get(f"ostro/{stage}/{each}", _AGREEMENT_MS) for each in range(count)]
    except RuntimeError as error:
        raise Unavailable(_gone(error)) from error
    told = [json.loads(answer) for answer in answers]
    if differences := _differences(told):
        disconnect()
        raise BadRequest(
            f"The hosts of the mesh differ: {', '.join(differences)}. Start the same command on every host, with the "
            "same versions and the same files."
        )


def disconnect() -> None:
    """Leaves the mesh together with all other processes: otherwise the first to end would abort the others before they
    can report why.
    """
    with suppress(RuntimeError):
        jax.distributed.shutdown()


def _gone(error: Exception | None = None) -> str:
    """The message for a lost process. `error` is how the loss was noticed."""
    reason = "" if error is None else f" ({(str(error) or repr(error)).splitlines()[0]})"
    return f"A process of the mesh is gone{reason}. All of them have to start again."


def _differences(told: Sequence[Mapping[str, str]]) -> list[str]:
    """What differs between hosts, in words: `jax (0.10.2 on host 0, 0.10.1 on host 2)`."""
    found = []
    for name in dict.fromkeys(name for each in told for name in each):
        facts = [each.get(name, "none") for each in told]
        other = next((number for number, fact in enumerate(facts) if fact != facts[0]), None)
        if other is not None:
            found.append(f"{name} ({facts[0] or 'none'} on host 0, {facts[other] or 'none'} on host {other})")
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def least(number: int) -> int:
    """The minimum over all processes, returned in each of them."""
    if jax.process_count() == 1:
        return number
    return int(np.min(process_allgather(np.array([number], np.int32))))


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
    """Programs that all processes call; replaces `Programs` in the leader. A call raises Unavailable if a process is
    lost.
    """

    programs: Programs
    _followers: list[socket.socket]
    _keys: dict[Key, int]
    _numbers: dict[int, int] = field(default_factory=dict)
    """The numbers of arrays on the devices, by id."""
    _dropped: deque[int] = field(default_factory=deque)
    _count: int = 0

    def __len__(self) -> int:
        return len(self.programs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.programs, name)

    @property
    def failure(self) -> str | None:
        """Why no further step can run. Followers send nothing, so one whose socket is readable is gone."""
        watched = select.poll()
        for follower in self._followers:
            watched.register(follower, select.POLLIN)
        return _gone() if watched.poll(0) else None

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
        # Another array may have this id by now.
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
                raise Unavailable(_gone(error)) from error


def lead(programs: Programs, arrays: Any) -> LeadingPrograms:
    """For the first process. `arrays` is a tree of the arrays that every process has before the first call."""
    _agree_on(programs)
    leading = LeadingPrograms(programs, _gather_followers(), _numbered(programs))
    leading.add(arrays)
    return leading


def follow(programs: Programs, arrays: Any, connected: Callable[[], None]) -> None:
    """For the other processes: repeats the leader's calls until it closes the connection. Calls `connected` once the
    leader has admitted all of them.
    """
    _agree_on(programs)
    known: dict[int, Any] = dict(enumerate(jax.tree.leaves(arrays)))
    keys = {number: key for key, number in _numbered(programs).items()}
    count = len(known)
    with connect(_broadcast(None)) as leader:
        connected()
        for call in _calls(leader):
            leaves = [known[each] if isinstance(each, int) else each.array() for each in call.arguments]
            results = jax.tree.leaves(_called(programs[keys[call.program]], leaves))
            known |= enumerate(results, count)
            count += len(results)
            for number in call.dropped:
                del known[number]
            del leaves, results


def _agree_on(programs: Programs) -> None:
    device = programs.mesh.devices.flat[0]
    agree(
        "programs",
        {
            "devices": f"{programs.mesh.size} {device.device_kind}",
            "JAX's platform": str(device.client.platform_version),
            "programs": repr(sorted(map(repr, programs))),
        },
    )


def _numbered(programs: Programs) -> dict[Key, int]:
    # Sorted, because processes may have compiled them in different orders.
    return {key: number for number, key in enumerate(sorted(programs, key=repr))}


def _called(program: Any, leaves: Sequence[Any]) -> Any:
    """Calls a program with the leaves of its arguments."""
    shardings = program.in_tree.flatten_up_to(program.input_shardings)
    arguments, _ = jax.tree.unflatten(program.in_tree, map(_divided, leaves, shardings))
    return program(*arguments)


def _divided(argument: Any, sharding: Any) -> Any:
    """Each process has to pass its own part of a host array that is divided over the mesh."""
    if not isinstance(argument, np.ndarray) or sharding is None or sharding.is_fully_replicated:
        return argument
    return jax.make_array_from_callback(argument.shape, sharding, lambda index: argument[index])


def _calls(leader: socket.socket) -> Iterator[_Call]:
    decoder = msgspec.msgpack.Decoder(_Call)
    while len(size := received(leader, 8)) == 8:
        length = int.from_bytes(size, "little")
        message = received(leader, length)
        if len(message) < length:
            return
        yield decoder.decode(message)


def _gather_followers() -> list[socket.socket]:
    hosts = mesh_hosts()
    first, bound = (socket.gethostname(), None) if hosts is None else (hosts.first, hosts.bound)
    listening, invitation = listen(first, bound)
    with listening:
        _broadcast(invitation)
        return admit_followers(listening, invitation.key, jax.process_count() - 1)


def _broadcast(invitation: Invitation | None) -> Invitation:
    """The leader's invitation, in every process."""
    sent = np.zeros(_INVITATION_BYTES, np.uint8)
    if invitation is not None:
        encoded = msgspec.msgpack.encode(invitation)
        sent[0] = len(encoded)
        sent[1 : 1 + len(encoded)] = np.frombuffer(encoded, np.uint8)
    received = np.asarray(broadcast_one_to_all(sent)).astype(np.uint8)
    return msgspec.msgpack.decode(received[1 : 1 + received[0]].tobytes(), type=Invitation)
