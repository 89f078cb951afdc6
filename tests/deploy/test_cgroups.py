"""The limits of control groups, as Linux tells them in files: on made-up machines."""

from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ostro.system import cgroups, machine
from ostro.system.cgroups import cpu_quota, free_memory

_V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
_V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "34 31 0:31 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


@dataclass(frozen=True)
class Machine:
    """The root of a file system, with what the kernel says there about control groups."""

    root: Path

    def process(self, mounts: str, groups: str) -> "Machine":
        self.file("proc/self/mountinfo", mounts)
        return self.file("proc/self/cgroup", groups)

    def file(self, path: str, text: str) -> "Machine":
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text if text.endswith("\n") else f"{text}\n")
        return self


@pytest.fixture
def made(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_control_groups_there_is_no_limit(tmp_path: Path) -> None:
    assert (cpu_quota(tmp_path), free_memory(tmp_path)) == (None, None)


@pytest.mark.parametrize(("text", "quota"), [("max 100000", None), ("150000 100000", 1.5), ("5000 100000", 0.05)])
def test_a_containers_quota_is_at_the_root_of_what_it_sees(made: Machine, text: str, quota: float | None) -> None:
    made.process(_V2, "0::/\n").file("sys/fs/cgroup/cpu.max", text)
    assert cpu_quota(made.root) == quota


def test_the_tightest_of_a_group_and_its_parents_counts(made: Machine) -> None:
    """Whether it is the service's own, its slice's, or one in between."""
    made.process(_V2, "0::/ai.slice/models.slice/ostro.service\n")
    made.file("sys/fs/cgroup/ai.slice/cpu.max", "400000 100000")
    made.file("sys/fs/cgroup/ai.slice/models.slice/cpu.max", "100000 50000")
    made.file("sys/fs/cgroup/ai.slice/models.slice/ostro.service/cpu.max", "max 100000")
    # A neighbour's limit is not ours.
    made.file("sys/fs/cgroup/ai.slice/other.service/cpu.max", "10000 100000")
    assert cpu_quota(made.root) == 2
    made.file("sys/fs/cgroup/ai.slice/cpu.max", "90000 100000")
    assert cpu_quota(made.root) == 0.9


def test_version_1_has_a_hierarchy_for_each_resource(made: Machine) -> None:
    made.process(_V1, "5:memory:/docker/one\n4:cpu,cpuacct:/docker/one\n3:cpuset:/\n")
    cpu, memory = (f"sys/fs/cgroup/{each}/docker" for each in ("cpu,cpuacct", "memory"))
    made.file(f"{cpu}/one/cpu.cfs_quota_us", "-1").file(f"{cpu}/one/cpu.cfs_period_us", "100000")
    assert cpu_quota(made.root) is None
    made.file(f"{cpu}/cpu.cfs_quota_us", "250000").file(f"{cpu}/cpu.cfs_period_us", "100000")
    assert cpu_quota(made.root) == 2.5
    made.file(f"{memory}/one/memory.limit_in_bytes", "4000").file(f"{memory}/one/memory.usage_in_bytes", "3600")
    made.file(f"{memory}/one/memory.stat", "cache 9\ninactive_file 7\ntotal_inactive_file 3000")
    assert free_memory(made.root) == 3400


def test_both_versions_at_once_both_count(made: Machine) -> None:
    made.process(_V1 + _V2.replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"), "4:cpu,cpuacct:/a\n0::/b\n")
    made.file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "300000")
    made.file("sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "100000")
    assert cpu_quota(made.root) == 3
    made.file("sys/fs/cgroup/unified/b/cpu.max", "200000 100000")
    assert cpu_quota(made.root) == 2


def test_a_container_that_sees_only_its_own_part_of_the_hierarchy(made: Machine) -> None:
    """Without a namespace of its own, paths are the host's while the mount begins at the container's group."""
    mounts = r"32 31 0:29 /docker/one /sys/fs/my\040groups rw - cgroup2 cgroup2 rw"
    made.process(mounts, "0::/docker/one/worker\n")
    made.file("sys/fs/my groups/cpu.max", "700000 100000")
    assert cpu_quota(made.root) == 7
    made.file("sys/fs/my groups/worker/cpu.max", "600000 100000")
    assert cpu_quota(made.root) == 6


@pytest.mark.parametrize("path", ["/../other", "/docker/two"])
def test_of_a_group_outside_the_mount_its_root_counts(made: Machine, path: str) -> None:
    made.process(r"32 31 0:29 /docker/one /sys/fs/cgroup rw - cgroup2 cgroup2 rw", f"0::{path}\n")
    made.file("sys/fs/cgroup/cpu.max", "700000 100000").file("sys/fs/other/cpu.max", "100000 100000")
    assert cpu_quota(made.root) == 7


def test_files_that_were_read_do_not_count_as_used_memory(made: Machine) -> None:
    """A model of 3 GB that had just been fetched left no room for itself."""
    made.process(_V2, "0::/pod/one\n").file("sys/fs/cgroup/pod/one/memory.max", "max")
    made.file("sys/fs/cgroup/pod/one/memory.current", "5")
    assert free_memory(made.root) is None
    made.file("sys/fs/cgroup/pod/memory.max", "4000").file("sys/fs/cgroup/pod/memory.current", "3600")
    made.file("sys/fs/cgroup/pod/memory.stat", "anon 500\nfile 3100\ninactive_file 3000\nactive_file 100")
    assert free_memory(made.root) == 3400


_WORDS = st.sampled_from(["max", "-1", "0", "100000", "1", "x", "", "٣", "\n", "inactive_file", " ", "-"])


@given(text=st.lists(_WORDS, max_size=5).map(" ".join), mounts=st.lists(_WORDS, max_size=12).map(" ".join))
def test_unexpected_contents_are_no_limit_and_no_error(
    text: str, mounts: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    made = Machine(tmp_path_factory.mktemp("machine")).process(mounts + "\n" + _V2, f"{text}\n0::/\n")
    for name in ("cpu.max", "memory.max", "memory.current", "memory.stat"):
        made.file(f"sys/fs/cgroup/{name}", text)
    assert (cpu_quota(made.root) or 1) > 0
    assert (free_memory(made.root) or 0) >= 0


@pytest.mark.parametrize(("quota", "limit"), [(None, None), (0.05, 1), (1.5, 1), (2.0, 2), (3.9, 3)])
def test_threads_are_as_many_as_whole_cpus_are_granted(
    quota: float | None, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 1.5 CPUs, two threads that wait for each other would both be throttled in every period."""
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: quota)
    assert machine.cpu_limit() == limit
    assert machine.num_cpus() <= (limit or machine.num_cpus())
