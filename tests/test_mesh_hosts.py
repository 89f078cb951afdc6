"""Which hosts share a mesh, by the environment: told in full, or refused."""

import pytest

from ostro.errors import BadRequest
from ostro.system.mesh_hosts import ADDRESS, BIND_ADDRESS, COUNT, NUMBER, mesh_hosts


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"TPU_WORKER_HOSTNAMES": "localhost"},
        {ADDRESS: "", COUNT: "", NUMBER: ""},
        {COUNT: "1"},
        {NUMBER: "0"},
        {ADDRESS: "10.0.0.1:8476", COUNT: "1", NUMBER: "0"},
    ],
)
def test_a_process_without_others_is_alone(environ: dict[str, str]) -> None:
    assert mesh_hosts(environ) is None


def test_the_coordinator_listens_where_it_is_found_unless_told_otherwise() -> None:
    given = {ADDRESS: "10.0.0.1:8476", COUNT: "2", NUMBER: "1"}
    hosts = mesh_hosts(given)
    assert hosts is not None
    assert (hosts.first, hosts.bind_address, hosts.count, hosts.number) == ("10.0.0.1", "10.0.0.1:8476", 2, 1)
    hosts = mesh_hosts({**given, BIND_ADDRESS: "10.0.0.7:1"})
    assert hosts is not None
    assert (hosts.first, hosts.bind_address, hosts.bound) == ("10.0.0.1", "10.0.0.7:1", "10.0.0.7")


@pytest.mark.parametrize(
    ("environ", "first"),
    [
        ({ADDRESS: "[fd00::1]:8476", COUNT: "2", NUMBER: "0"}, "fd00::1"),
        ({"TPU_WORKER_HOSTNAMES": "worker-0,worker-1"}, "worker-0"),
        ({"TPU_PROCESS_ADDRESSES": "worker-0:8471,worker-1:8471"}, "worker-0"),
    ],
)
def test_the_first_host_is_known_by_name_or_address(environ: dict[str, str], first: str) -> None:
    hosts = mesh_hosts(environ)
    assert hosts is not None
    assert (hosts.first, hosts.bound) == (first, first)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({COUNT: "2", NUMBER: "0"}, "JAX_NUM_PROCESSES is set, but JAX_COORDINATOR_ADDRESS is not"),
        ({NUMBER: "1"}, "JAX_PROCESS_ID is set, but JAX_COORDINATOR_ADDRESS is not"),
        ({COUNT: "two", ADDRESS: "a:1"}, "JAX_NUM_PROCESSES is 'two'"),
        ({COUNT: "0"}, r"^JAX_NUM_PROCESSES is 0\."),
        ({COUNT: "2", NUMBER: "2", ADDRESS: "a:1"}, "JAX_PROCESS_ID is 2, and JAX_NUM_PROCESSES is 2"),
        ({COUNT: "2", NUMBER: "1", ADDRESS: "10.0.0.1"}, "HOST:PORT"),
        ({COUNT: "2", NUMBER: "1", ADDRESS: ":8476"}, "HOST:PORT"),
        (
            {COUNT: "2", NUMBER: "1", ADDRESS: "a:1", BIND_ADDRESS: "0.0.0.0"},
            "JAX_COORDINATOR_BIND_ADDRESS is '0.0.0.0'",
        ),
    ],
)
def test_half_of_it_is_refused_with_what_to_do(environ: dict[str, str], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        mesh_hosts(environ)
