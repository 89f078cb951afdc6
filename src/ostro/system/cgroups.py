"""Limits of the Linux control groups that this process runs in, of version 1 and 2: CPU quota and memory.

A limit on a group holds for all groups below it: a container's, a Kubernetes pod's, a systemd slice's. So the tightest
of a group and its parents counts, as far up as this process can see. Each function takes the root of a file system, so
that tests can make one up.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

_ROOT = Path("/")
# How the kernel writes a space and its like in mountinfo.
_ESCAPED = re.compile(r"\\([0-7]{3})")


def cpu_quota(root: Path = _ROOT) -> float | None:
    """CPUs' worth of time that this process may use; None if there is no limit."""
    return min((quota for each in _groups("cpu", root) if (quota := _quota(each)) is not None), default=None)


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that this process may still take; None if there is no limit."""
    return min((free for each in _groups("memory", root) if (free := _free(each)) is not None), default=None)


class _Group(NamedTuple):
    version: Literal[1, 2]
    directory: Path

    def words(self, name: str) -> list[str]:
        return " ".join(_lines(self.directory / name)).split()

    def limit(self, name: str) -> int | None:
        """The number in a file; None if there is no limit ("max", or -1 in version 1) or no file."""
        return _number("".join(self.words(name)))


def _quota(group: _Group) -> float | None:
    if group.version == 1:
        quota, period = group.limit("cpu.cfs_quota_us"), group.limit("cpu.cfs_period_us")
    else:
        words = group.words("cpu.max")
        quota, period = map(_number, words if len(words) == 2 else ("", ""))
    return quota / period if quota and period else None


def _free(group: _Group) -> int | None:
    names = {
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        2: ("memory.max", "memory.current", "inactive_file"),
    }
    limits, usage, idle = names[group.version]
    limit, used = group.limit(limits), group.limit(usage)
    if limit is None or used is None:
        return None
    # Page cache counts as used but can be reclaimed: after a download it may fill the container's whole limit.
    details = group.words("memory.stat")
    cached = next((_number(value) for name, value in pairwise(details) if name == idle), None)
    return min(limit, max(0, limit - used + (cached or 0)))


def _groups(controller: str, root: Path) -> Iterator[_Group]:
    """The group of this process and its parents, in the hierarchies that have this controller."""
    paths = dict(_memberships(root))
    for version, top, mounted in _mounts(controller, root):
        path = paths.get("" if version == 2 else controller)
        if path is not None:
            directory = top / _below(mounted, path)
            yield from (_Group(version, each) for each in (directory, *directory.parents) if each.is_relative_to(top))


def _memberships(root: Path) -> Iterator[tuple[str, str]]:
    """Each controller with the path of this process's group; version 2's hierarchy names no controllers."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        yield from ((each, path) for each in controllers.split(","))


def _mounts(controller: str, root: Path) -> Iterator[tuple[Literal[1, 2], Path, str]]:
    """Version, directory and mounted group: a container may see only its own group's part of a hierarchy."""
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, kind = line.partition(" - ")
        match (place.split(), kind.split()):
            case ([_, _, _, mounted, at, *_], ["cgroup2", *_]):
                yield 2, _within(root, at), _unescaped(mounted)
            case ([_, _, _, mounted, at, *_], ["cgroup", *_, options]) if controller in options.split(","):
                yield 1, _within(root, at), _unescaped(mounted)


def _below(mounted: str, path: str) -> str:
    """The group's path below what is mounted; the mounted group itself if it lies outside."""
    inside = Path(path)
    if inside.is_relative_to(mounted) and ".." not in inside.parts:
        return str(inside.relative_to(mounted))
    return "."


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _within(root: Path, path: str) -> Path:
    return root / _unescaped(path).lstrip("/")


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
