"""The CPUs that threads use by default, on made-up machines."""

import os
import sys
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.system.topology import Cpu, apple_cpus, choose_threads, kept_to, read_cpus, threads_here


def _list(numbers: Iterable[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


def _sysfs(root: Path, cores: Iterable[Iterable[int]], files: Mapping[str, object] = {}) -> Path:
    """What Linux says of these cores, each of which is a list of CPUs, and in further files."""
    for core in cores:
        for cpu in core:
            path = f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list"
            files = {**files, path: _list(core)}
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{content}\n")
    return root


def test_a_virtual_machine_of_two_cores_has_two_threads(tmp_path: Path) -> None:
    choice = choose_threads(
        read_cpus(range(2), _sysfs(tmp_path, [[0], [1]], {"devices/system/node/node0/cpulist": "0-1"}))
    )
    assert (choice.number, choice.cpus, choice.warning, choice.has_cpus) == (2, None, None, True)
    assert choice.reason == "2, one per core"


def test_a_machine_that_tells_nothing_has_a_thread_for_each_cpu(tmp_path: Path) -> None:
    choice = choose_threads(read_cpus({1, 3, 4}, tmp_path))
    assert (choice.number, choice.cpus) == (3, None)


def test_virtual_cpus_that_share_cores_count_as_cores(tmp_path: Path) -> None:
    """As in most clouds: 16 of them are 8 cores."""
    choice = choose_threads(read_cpus(range(16), _sysfs(tmp_path, [[at, at + 1] for at in range(0, 16, 2)])))
    assert (choice.number, choice.cpus) == (8, None)
    assert choice.reason == "8, one per core, each of which has 2 hardware threads"


@pytest.fixture
def laptop(tmp_path: Path) -> Path:
    """Eight performance cores with two hardware threads each, sixteen efficiency cores with one."""
    cores = [[at, at + 1] for at in range(0, 16, 2)] + [[at] for at in range(16, 32)]
    return _sysfs(tmp_path, cores, {"devices/cpu_core/cpus": "0-15", "devices/cpu_atom/cpus": "16-31"})


def test_a_hybrid_laptop_uses_its_performance_cores(laptop: Path) -> None:
    choice = choose_threads(read_cpus(range(32), laptop))
    assert (choice.number, choice.cpus) == (8, frozenset(range(16)))
    assert choice.reason == "8, one per performance core, each of which has 2 hardware threads"


def test_confined_to_efficiency_cores_it_uses_those(laptop: Path) -> None:
    choice = choose_threads(read_cpus(range(16, 20), laptop))
    assert (choice.number, choice.cpus) == (4, None)


def test_as_many_threads_as_asked_for_wherever_they_fit(laptop: Path) -> None:
    cpus = read_cpus(range(32), laptop)
    eight, twelve, all_ = (choose_threads(cpus, asked=number) for number in (8, 12, 32))
    assert (eight.number, eight.cpus, eight.reason) == (8, frozenset(range(16)), "8, as asked")
    # Two threads of one core are slower than one of them on an efficiency core.
    assert (twelve.number, twelve.cpus) == (12, None)
    assert (all_.number, all_.cpus, all_.warning, all_.has_cpus) == (32, None, None, True)
    assert not choose_threads(cpus, asked=33).has_cpus


@pytest.fixture
def server(tmp_path: Path) -> Path:
    """Two sockets of 16 cores with two hardware threads each, numbered as Linux does: siblings last."""
    nodes = {
        "devices/system/node/node0/cpulist": "0-15,32-47",
        "devices/system/node/node1/cpulist": "16-31,48-63",
        # Memory without CPUs.
        "devices/system/node/node2/cpulist": "",
        "devices/system/node/online": "0-2",
    }
    return _sysfs(tmp_path, [[at, at + 32] for at in range(32)], nodes)


def test_of_two_sockets_one_is_used(server: Path) -> None:
    choice = choose_threads(read_cpus(range(64), server))
    assert (choice.number, choice.warning) == (16, None)
    assert choice.cpus == frozenset([*range(16), *range(32, 48)])
    assert choice.reason.startswith("16, one per core of socket 0, which is one of 2")


def test_the_socket_with_more_usable_cores_is_used(server: Path) -> None:
    choice = choose_threads(read_cpus([0, 1, 32, 33, 16, 17, 18], server))
    assert (choice.number, choice.cpus) == (3, frozenset([16, 17, 18]))


def test_more_threads_than_a_socket_has_are_warned_of(server: Path) -> None:
    cpus = read_cpus(range(64), server)
    assert choose_threads(cpus, asked=16).warning is None
    both = choose_threads(cpus, asked=17)
    assert (both.number, both.cpus) == (17, None)
    assert "run on 2 sockets" in (both.warning or "")


def test_containers_with_quotas_do_not_all_keep_to_one_socket(server: Path) -> None:
    choice = choose_threads(read_cpus(range(64), server), quota=4.0)
    assert (choice.number, choice.cpus, choice.reason) == (4, None, "4, as the CPU quota is 4")


def test_within_a_quota_efficiency_cores_are_left_alone(laptop: Path) -> None:
    assert choose_threads(read_cpus(range(32), laptop), quota=4.0).cpus == frozenset(range(16))


def test_a_socket_may_have_several_nodes(tmp_path: Path) -> None:
    """As servers are set up whose memory channels are divided: a node alone would have a quarter of the cores."""
    nodes = {f"devices/system/node/node{node}/cpulist": f"{4 * node}-{4 * node + 3}" for node in range(8)}
    packages = {f"devices/system/cpu/cpu{at}/topology/physical_package_id": str(at // 16) for at in range(32)}
    choice = choose_threads(read_cpus(range(32), _sysfs(tmp_path, [[at] for at in range(32)], nodes | packages)))
    assert (choice.number, choice.cpus) == (16, frozenset(range(16)))


def test_clusters_of_cores_are_no_sockets(tmp_path: Path) -> None:
    """Some ARM machines call each cluster a package."""
    files = {f"devices/system/cpu/cpu{at}/topology/physical_package_id": str(at // 2) for at in range(4)}
    files |= {"devices/system/node/node0/cpulist": "0-3"}
    assert choose_threads(read_cpus(range(4), _sysfs(tmp_path, [[at] for at in range(4)], files))).number == 4


def test_a_phone_uses_its_big_cores(tmp_path: Path) -> None:
    """One prime core, three big and four little ones."""
    capacities = [250] * 4 + [800] * 3 + [1024]
    files = {f"devices/system/cpu/cpu{at}/cpu_capacity": each for at, each in enumerate(capacities)}
    choice = choose_threads(read_cpus(range(8), _sysfs(tmp_path, [[at] for at in range(8)], files)))
    assert (choice.number, choice.cpus) == (4, frozenset([4, 5, 6, 7]))


@pytest.mark.parametrize(("quota", "number"), [(1.5, 1), (0.1, 1), (2.0, 2), (3.99, 3), (200.0, 4), (None, 4)])
def test_a_container_has_threads_for_its_whole_cpus(quota: float | None, number: int) -> None:
    choice = choose_threads([Cpu(at, core=at) for at in range(4)], quota=quota)
    assert (choice.number, choice.cpus) == (number, None)
    assert choice.has_cpus == (quota != 0.1)
    if number < 4:
        assert choice.reason == f"{number}, as the CPU quota is {quota:g}"


def test_threads_beyond_the_quota_have_no_cpu_of_their_own() -> None:
    cpus = [Cpu(at, core=at) for at in range(4)]
    assert choose_threads(cpus, asked=2, quota=2.0).has_cpus
    assert not choose_threads(cpus, asked=2, quota=1.5).has_cpus


def test_a_mac_uses_its_performance_cores() -> None:
    choice = choose_threads(apple_cpus(performance=6, efficiency=4))
    assert (choice.number, choice.reason) == (6, "6, one per performance core")
    assert choose_threads(apple_cpus(performance=4, efficiency=0)).number == 4


_CPUS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 2), st.sampled_from([0.3, 0.5, 0.8, 1.0])), min_size=1, max_size=12
).map(
    lambda rows: [
        Cpu(at, core=core + 10 * node, socket=node, capacity=each) for at, (core, node, each) in enumerate(rows)
    ]
)


@given(cpus=_CPUS, asked=st.none() | st.integers(1, 20), quota=st.none() | st.floats(0.01, 16))
def test_any_machine_has_a_thread_and_enough_cpus_for_what_was_chosen(
    cpus: list[Cpu], asked: int | None, quota: float | None
) -> None:
    choice = choose_threads(cpus, asked=asked, quota=quota)
    here = {each.number for each in cpus} if choice.cpus is None else choice.cpus
    assert 1 <= choice.number == (asked or choice.number)
    assert here <= {each.number for each in cpus}
    if asked is None:
        assert choice.number <= len(here)
        assert choice.number <= max(1, quota or 99)
        # Where the quota says how many, they may be anywhere.
        assert quota is not None or len({each.socket for each in cpus if each.number in here}) == 1
    if choice.has_cpus:
        assert choice.number <= len(here)
    assert (choice.warning is None) or len({each.socket for each in cpus}) > 1


@given(texts=st.lists(st.text("0123456789-,x \n", max_size=4), min_size=3, max_size=3))
def test_unexpected_contents_are_no_error(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    names = (
        "devices/cpu_atom/cpus",
        "devices/system/node/node0/cpulist",
        "devices/system/cpu/cpu0/topology/thread_siblings_list",
    )
    sysfs = _sysfs(tmp_path_factory.mktemp("sys"), [], dict(zip(names, texts, strict=True)))
    assert choose_threads(read_cpus([0, 1], sysfs)).number in (1, 2)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
def test_threads_keep_to_the_chosen_cpus_and_the_caller_to_its_own() -> None:
    before = os.sched_getaffinity(0)
    one, seen = {min(before)}, []
    try:
        os.sched_setaffinity(0, before)
    except OSError:
        pytest.skip("this sandbox forbids choosing CPUs")
    with kept_to(one):
        thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
    assert (seen, os.sched_getaffinity(0)) == ([one], before)
    with kept_to(None):
        assert os.sched_getaffinity(0) == before


def test_this_machine_has_a_choice() -> None:
    assert threads_here().number >= 1
    assert threads_here(3).number == 3
    assert (threads_here().cpus is None) or sys.platform == "linux"
