"""What this machine has: memory that is free, and a GPU. Asks the system, never torch, so that any process can ask."""

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
    """Bytes that can be had without swapping, within the container's limit if there is one."""
    return min(_free_on_machine(), _free_in_container())


def cpu_limit(cgroup: Path = _CGROUP) -> int | None:
    """How many CPUs' time the container may use, rounded up; None if there is no limit. torch counts CPUs, not time."""
    words = next(iter(_lines(cgroup / "cpu.max")), "max").split()
    return None if words[0] == "max" else max(1, -(-int(words[0]) // int(words[1])))


def in_container(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this runs in a container of Docker's, Podman's, Kubernetes's or Cloud Run's, as those tell it."""
    marked = any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
    return marked or not environ.keys().isdisjoint({"KUBERNETES_SERVICE_HOST", "K_SERVICE"})


def device_here(name: str) -> str:
    """Which kind, "cpu" or "cuda", a setting means on this machine."""
    if name == "auto":
        return "cpu" if _visible_gpu() is None else "cuda"
    return name


def has_torch() -> bool:
    """Whether torch is installed, which is an extra. Does not import it."""
    try:
        return find_spec("torch") is not None
    except (ImportError, ValueError):
        return False


def has_idle_gpu() -> bool:
    """Whether there is an NVIDIA GPU that nothing here can use, as torch is not installed."""
    return Path("/proc/driver/nvidia/version").exists() and not has_torch()


def gpu_memory() -> tuple[int, int] | None:
    """Total and free bytes of the GPU here; None if there is none, or it does not tell."""
    if (gpu := _visible_gpu()) is None:
        return None
    query = ["nvidia-smi", "--query-gpu=memory.total,memory.free", "--format=csv,noheader,nounits", "-i", gpu]
    try:
        # A group of its own, as everything that the server starts: otherwise it is taken for an orphan.
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20, process_group=0).stdout
        total, free = (int(part) * _MIB for part in answer.split(","))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return total, free


def _visible_gpu() -> str | None:
    """The number of the GPU that torch would take."""
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
    # Pages of files count as used, but make way: those of a model just fetched may be all that the container has.
    idle = next((int(line.split()[1]) for line in details if line.startswith("inactive_file ")), 0)
    return min(int(limit[0]), max(0, int(limit[0]) - int(used[0]) + idle))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
