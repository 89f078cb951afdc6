"""Resources of this machine: free memory, CPUs, a GPU. Asks the system, never torch, so that any process can use it."""

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_MIB = 1 << 20
_CGROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes available without swapping, within the container's limit if there is one."""
    return min(_free_on_machine(), _free_in_container())


def cpu_limit(cgroup: Path = _CGROUP) -> int | None:
    """The container's CPU quota, rounded up; None if there is no limit. torch counts CPUs and ignores quotas."""
    words = next(iter(_lines(cgroup / "cpu.max")), "max").split()
    return None if words[0] == "max" else max(1, -(-int(words[0]) // int(words[1])))


def in_container(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this runs in a Docker, Podman, Kubernetes or Cloud Run container, judging by their markers."""
    marked = any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
    return marked or not environ.keys().isdisjoint({"KUBERNETES_SERVICE_HOST", "K_SERVICE"})


def device_here(name: str) -> str:
    """The device, "cpu" or "cuda", that a setting means on this machine."""
    if name == "auto":
        return "cpu" if _visible_gpu() is None else "cuda"
    return name


def has_torch() -> bool:
    """Whether torch, which is an extra, is installed. Does not import it."""
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def has_idle_gpu() -> bool:
    """Whether there is an NVIDIA GPU that cannot be used because torch is not installed."""
    return Path("/proc/driver/nvidia/version").exists() and not has_torch()


def gpu_memory() -> tuple[int, int] | None:
    """Total and free bytes of the GPU; None if there is none, or if it cannot be queried."""
    if (gpu := _visible_gpu()) is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        # In its own process group, like everything the server starts: otherwise it would be reaped as an orphan.
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20, process_group=0).stdout
        total, free = (int(part) * _MIB for part in answer.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return total, free


def _visible_gpu() -> str | None:
    """The index of the GPU that torch would use."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
    if visible in ("", "-1") or not Path("/proc/driver/nvidia/version").exists() or not has_torch():
        return None
    return None if metadata.version("torch").endswith("+cpu") else visible


def _free_on_machine() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_in_container(cgroup: Path = _CGROUP) -> int:
    limit, used, details = (_lines(cgroup / name) for name in ("memory.max", "memory.current", "memory.stat"))
    if not limit or not used or limit[0] == "max":
        return sys.maxsize
    # Page cache counts as used but can be reclaimed: after a download it may fill the container's whole limit.
    idle = next((int(line.split()[1]) for line in details if line.startswith("inactive_file ")), 0)
    return min(int(limit[0]), max(0, int(limit[0]) - int(used[0]) + idle))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
