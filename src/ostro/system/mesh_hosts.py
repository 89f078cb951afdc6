"""Which processes, usually on several hosts, share one JAX mesh, according to the environment. Imports no JAX."""

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ostro.errors import BadRequest

ADDRESS, COUNT, NUMBER = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"
HOW_TO_START = (
    f"Start the same command on every host, with {ADDRESS} (HOST:PORT of the first), {COUNT}, and in {NUMBER} the "
    "number of the host, from 0."
)
_TPU_HOSTS = ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshHosts:
    """The processes of a mesh, including this one. JAX finds out by itself what is None."""

    address: str | None
    """HOST:PORT of the first process's coordinator."""
    bind_address: str | None
    """HOST:PORT on which the coordinator listens."""
    count: int | None
    number: int | None
    """Number of this process, from 0."""
    tpu_hosts: tuple[str, ...] = ()

    @property
    def first(self) -> str:
        """The name or IP address of the first process's host."""
        if self.address is not None:
            return _host(self.address)
        if self.tpu_hosts:
            first = self.tpu_hosts[0]
            return first.rpartition(":")[0] or first
        return socket.gethostname()

    @property
    def bound(self) -> str:
        """The name or IP address on which the first process listens."""
        return self.first if self.bind_address is None else _host(self.bind_address)


def mesh_hosts(environ: Mapping[str, str] = os.environ) -> MeshHosts | None:
    """The mesh; None if this process is alone. Raises BadRequest for variables that contradict each other."""
    address = environ.get(ADDRESS) or None
    count, number = _number(environ, COUNT), _number(environ, NUMBER)
    tpu_hosts = _tpu_hosts(environ)
    if count == 0:
        raise BadRequest(f"{COUNT} is 0. {HOW_TO_START} For one host, unset {COUNT}.")
    if count is not None and number is not None and number >= count:
        raise BadRequest(f"{NUMBER} is {number}, and {COUNT} is {count}. {HOW_TO_START}")
    if count == 1:
        return None
    if address is None and len(tpu_hosts) < 2:
        if count is not None or number:
            given = COUNT if count is not None else NUMBER
            raise BadRequest(f"{given} is set, but {ADDRESS} is not. {HOW_TO_START} For one host, unset {given}.")
        return None
    # Otherwise the coordinator, which checks nothing, would listen on all interfaces.
    bind_address = environ.get(BIND_ADDRESS) or address
    for name, text in ((ADDRESS, address), (BIND_ADDRESS, bind_address)):
        if text is not None and not _is_address(text):
            raise BadRequest(f"{name} is {text!r}. Set it to HOST:PORT of the first host, such as 10.0.0.1:8476.")
    return MeshHosts(
        address=address,
        bind_address=bind_address,
        count=count,
        number=number,
        tpu_hosts=tpu_hosts,
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name) or None
    if text is not None and not text.isdecimal():
        raise BadRequest(f"{name} is {text!r}. Set it to a whole number.")
    return None if text is None else int(text)


def _is_address(text: str) -> bool:
    return bool(_host(text)) and text.rpartition(":")[2].isdecimal()


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _tpu_hosts(environ: Mapping[str, str]) -> tuple[str, ...]:
    listed = next((environ[name] for name in _TPU_HOSTS if environ.get(name)), "")
    return tuple(host for host in listed.split(",") if host)
