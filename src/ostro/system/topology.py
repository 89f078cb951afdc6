"""Which CPUs a model's threads should use. The machine is a value, read from a directory like /sys, so that tests can
make one up; the choice is a function of it.
"""

import os
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from ctypes import CDLL, byref, c_int32, c_size_t, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ostro.system import cgroups

_SYSFS = Path("/sys")
# A core with less of the fastest one's capacity is an efficiency core: all would wait for its last piece of work.
_PERFORMANCE = 2 / 3


@dataclass(frozen=True, slots=True)
class Cpu:
    """A logical CPU."""

    number: int
    core: int
    """The first CPU of its core: with SMT, a core has several."""
    socket: int = 0
    """CPUs of one socket have their memory near. One may have several NUMA nodes, which differ little."""
    capacity: float = 1
    """Its speed in relation to that of others."""


@dataclass(frozen=True, slots=True)
class ThreadChoice:
    number: int
    cpus: frozenset[int] | None
    """Where the threads run; None if that is left to the system."""
    reason: str
    """The number and how it came about, in words."""
    warning: str | None = None
    has_cpus: bool = True
    """Whether each thread has a CPU of its own within the quota, so that it may poll while it waits."""


def threads_here(asked: int | Literal["auto"] | None = "auto") -> ThreadChoice:
    """The threads that a setting means on this machine."""
    found = _apple_cpus() if sys.platform == "darwin" else read_cpus(_usable())
    return choose_threads(found, asked=asked if isinstance(asked, int) else None, quota=cgroups.cpu_quota())


def choose_threads(cpus: Collection[Cpu], *, asked: int | None = None, quota: float | None = None) -> ThreadChoice:
    """By default one thread for each performance core of one socket, within the quota.

    Threads keep to that socket's performance cores if there are as many as threads are asked for. Where the quota
    decides their number, they keep to those of all sockets.
    """
    socket = _largest_socket(cpus)
    fastest = max(each.capacity for each in socket)
    chosen = [each for each in socket if each.capacity >= fastest * _PERFORMANCE]
    cores = len({each.core for each in chosen})
    number = asked or (cores if quota is None else max(1, min(cores, int(quota))))
    reason = f"{number}, as asked" if asked else f"{number}, {_why(cpus, socket, chosen, number, quota)}"
    warning = None
    if number > cores:
        chosen = list(cpus)
        if len(sockets := {each.socket for each in cpus}) > 1:
            warning = (
                f"{number} threads are more than one socket's cores: they run on {len(sockets)} sockets, and read "
                "weights from each other's memory. Lower threads, or run a server on each socket."
            )
    elif asked is None and number < cores:
        # Containers with a quota each would all keep to the same socket.
        chosen = [each for each in cpus if each.capacity >= fastest * _PERFORMANCE]
    return ThreadChoice(
        number,
        cpus=None if len(chosen) == len(cpus) else frozenset(each.number for each in chosen),
        reason=reason,
        warning=warning,
        has_cpus=number <= (len(chosen) if quota is None else min(len(chosen), quota)),
    )


@contextmanager
def kept_to(cpus: Collection[int] | None) -> Iterator[None]:
    """Threads started here keep to these CPUs where the system allows that; the calling thread does until the end."""
    if cpus is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    # Some sandboxes forbid it.
    with suppress(OSError):
        os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)


def _largest_socket(cpus: Collection[Cpu]) -> list[Cpu]:
    sockets: defaultdict[int, list[Cpu]] = defaultdict(list)
    for each in cpus:
        sockets[each.socket].append(each)
    return max(sockets.values(), key=lambda socket: (len({each.core for each in socket}), -socket[0].socket))


def _why(cpus: Collection[Cpu], socket: list[Cpu], chosen: list[Cpu], number: int, quota: float | None) -> str:
    cores = {each.core for each in chosen}
    if number < len(cores):
        return f"as the CPU quota is {quota:g}"
    kinds = "performance core" if len(chosen) < len(socket) else "core"
    text = f"one per {kinds}"
    if len(socket) < len(cpus):
        text += f" of socket {socket[0].socket}, which is one of {len({each.socket for each in cpus})}"
    if len(chosen) > len(cores):
        text += f", each of which has {len(chosen) / len(cores):g} hardware threads"
    return text


def read_cpus(usable: Collection[int], sysfs: Path = _SYSFS) -> list[Cpu]:
    """The usable CPUs as Linux describes them. Each is a core of its own if it does not."""
    nodes = {number: node for node, numbers in _nodes(sysfs) for number in numbers}
    efficient = _list(sysfs / "devices/cpu_atom/cpus")
    several = len(set(nodes.values())) > 1
    return [_cpu(number, nodes.get(number, 0), several, number in efficient, sysfs) for number in sorted(usable)]


def _cpu(number: int, node: int, several: bool, is_efficient: bool, sysfs: Path) -> Cpu:
    directory = sysfs / f"devices/system/cpu/cpu{number}"
    siblings = _list(directory / "topology/thread_siblings_list")
    # Packages of a machine with one node may be mere clusters of cores, as on ARM.
    package = _text(directory / "topology/physical_package_id") if several else ""
    capacity = _text(directory / "cpu_capacity")
    return Cpu(
        number,
        core=min(siblings, default=number),
        socket=int(package) if package.isdecimal() else node,
        # ARM tells capacities, up to 1024, and x86 only which cores are of the smaller kind.
        capacity=int(capacity) / 1024 if capacity.isdecimal() else 0.5 if is_efficient else 1,
    )


def apple_cpus(performance: int, efficiency: int) -> list[Cpu]:
    """CPUs of a Mac, which tells their numbers only."""
    return [Cpu(at, core=at, capacity=1 if at < performance else 0.5) for at in range(performance + efficiency)]


def _apple_cpus() -> list[Cpu]:
    performance, efficiency = (_sysctl(f"hw.perflevel{level}.physicalcpu") for level in (0, 1))
    # Without performance levels, as on an Intel Mac, all cores are equal.
    return apple_cpus(performance, efficiency) if performance else apple_cpus(_sysctl("hw.physicalcpu") or 1, 0)


def _sysctl(name: str) -> int:
    """An integer of a Mac's system; 0 if there is none of this name."""
    value = c_int32(0)
    CDLL(None).sysctlbyname(name.encode(), byref(value), byref(c_size_t(sizeof(value))), None, c_size_t(0))
    return value.value


def _nodes(sysfs: Path) -> Iterator[tuple[int, set[int]]]:
    for path in sysfs.glob("devices/system/node/node*/cpulist"):
        name = path.parent.name.removeprefix("node")
        if name.isdecimal():
            yield int(name), _list(path)


def _list(path: Path) -> set[int]:
    """Numbers, which the kernel writes as 0-3,8."""
    found: set[int] = set()
    for part in _text(path).split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            found.update(range(int(first), int(last) + 1 if last.isdecimal() else int(first) + 1))
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _usable() -> Collection[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
