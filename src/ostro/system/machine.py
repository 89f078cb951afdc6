"""Resources of this machine: free memory, CPUs, GPUs, TPUs. Asks the system, never torch or JAX, so that any process
can use it.
"""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from ostro.system import cgroups

_MIB, _GIB = 1 << 20, 1 << 30
_CPUINFO = Path("/proc/cpuinfo")
# How the kernel's names of vector and matrix extensions begin, on x86 and ARM; smep is another thing.
_VECTORS = re.compile("avx|amx|fma|f16c|asimd|bf16|i8mm|sve|sme(?!p)")
_PCI = Path("/sys/bus/pci/devices")
_GOOGLE = "0x1ae0"
# PCI id of a TPU chip -> how many devices JAX sees on it, and the memory of each. v2 and v3 share an id: the memory is
# v2's, the smaller.
_TPUS = {
    "0x0027": (2, 8 * _GIB),
    "0x005e": (1, 32 * _GIB),
    "0x0062": (1, 95 * _GIB),
    "0x0063": (1, 16 * _GIB),
    "0x006f": (1, 32 * _GIB),
    "0x0076": (2, 96 * _GIB),
}


def free_memory() -> int:
    """Bytes available without swapping, within the container's limit if there is one."""
    limited = cgroups.free_memory()
    return _free_on_machine() if limited is None else min(_free_on_machine(), limited)


def cpu_limit() -> int | None:
    """Whole CPUs in this process's quota, at least 1; None if there is no limit. torch counts CPUs and ignores quotas.

    Rounded down: threads that share the last part of a CPU would be throttled in every period, and all wait for them.
    """
    quota = cgroups.cpu_quota()
    return None if quota is None else max(1, int(quota))


def num_cpus() -> int:
    """CPUs that this process may use, within its quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(usable, cpu_limit() or usable)


def in_container(root: Path = Path("/"), environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this runs in a Docker, Podman, Kubernetes or Cloud Run container, judging by their markers."""
    marked = any((root / name).exists() for name in (".dockerenv", "run/.containerenv"))
    return marked or not environ.keys().isdisjoint({"KUBERNETES_SERVICE_HOST", "K_SERVICE"})


def device_here(name: str, backend: str = "auto") -> str:
    """The device that a setting means on this machine for a backend: "cpu", "cuda", "tpu" or "mps"."""
    if name != "auto":
        return name
    if backend in ("auto", "jax") and tpu_memory() is not None:
        return "tpu"
    # Not for any backend: on these machines, the native core's CPU is the better choice for the models that it runs.
    if backend == "torch" and has_apple_gpu() and has_torch():
        return "mps"
    return "cuda" if _visible_gpus() and (_has_jax_on_gpus() if backend == "jax" else _has_torch_on_gpus()) else "cpu"


def has_apple_gpu(platform: str = sys.platform) -> bool:
    """Whether this is a Mac with Apple silicon."""
    return platform == "darwin" and os.uname().machine == "arm64"


def has_torch() -> bool:
    """Whether torch, which is an extra, is installed. Does not import it."""
    return _is_installed("torch")


def has_jax() -> bool:
    """Whether JAX, which is an extra, is installed. Does not import it."""
    return _is_installed("jax")


def tpu_memory(pci: Path = _PCI) -> int | None:
    """Memory of each TPU device in bytes; None if there is none, or none that JAX could use."""
    return min((memory for _, memory in _tpu_chips(pci)), default=None)


def count_tpus(pci: Path = _PCI) -> int:
    """TPU devices that JAX could use."""
    return sum(devices for devices, _ in _tpu_chips(pci))


def _tpu_chips(pci: Path) -> list[tuple[int, int]]:
    """The devices of each chip, and the memory of one."""
    if not (_is_installed("libtpu") and has_jax()):
        return []
    chips = (path.parent for path in pci.glob("*/vendor") if _lines(path) == [_GOOGLE])
    return [_TPUS[kind] for chip in chips for kind in _lines(chip / "device") if kind in _TPUS]


def has_idle_gpu() -> bool:
    """Whether there is an NVIDIA GPU that cannot be used because torch is not installed."""
    return _has_driver() and not has_torch()


def gpu_memory(devices: int = 1) -> tuple[int, int] | None:
    """Total and free bytes of the GPU, or the least of the first `devices` GPUs; None if there are fewer GPUs, or if
    they cannot be queried.
    """
    gpus = _visible_gpus(devices)
    if len(gpus) < devices or not (_has_torch_on_gpus() or _has_jax_on_gpus()):
        return None
    try:
        found = [
            [int(part) * _MIB for part in row] for row in _of_gpus("memory.total,memory.free", "-i", ",".join(gpus))
        ]
        total, free = map(min, zip(*found, strict=True))
    except ValueError:
        return None
    return total, free


def gpu_name() -> str | None:
    """The name of the first GPU, as its driver and torch know it; None if it cannot be queried."""
    gpus = _visible_gpus()
    found = _of_gpus("name", "-i", gpus[0]) if gpus else []
    return found[0][0] if found else None


def describe_gpus() -> list[str]:
    """Name, memory and driver of each NVIDIA GPU, whether or not this process may use it."""
    found = _of_gpus("name,memory.total,driver_version") if _has_driver() else []
    return [f"{name}, {memory} MiB, driver {driver}" for name, memory, driver in found]


def cpu_model(cpuinfo: Path = _CPUINFO) -> str | None:
    """The CPU's name; None if the system does not tell, as on ARM."""
    return next(iter(_cpu_values("model name", cpuinfo)), None)


def vector_extensions(cpuinfo: Path = _CPUINFO) -> list[str]:
    """Instruction set extensions of the CPU that matter for matmuls, under the kernel's names."""
    lines = _cpu_values("flags", cpuinfo) or _cpu_values("Features", cpuinfo)
    return sorted(each for each in (lines[0].split() if lines else []) if _VECTORS.match(each))


def _cpu_values(name: str, cpuinfo: Path) -> list[str]:
    """The value of this field for each CPU."""
    pairs = (line.partition(":") for line in _lines(cpuinfo))
    return [value.strip() for field, _, value in pairs if field.strip() == name]


def count_gpus() -> int:
    """GPUs that a process may use and torch or JAX can; 0 if they cannot be queried."""
    if not _visible_gpus() or not (_has_torch_on_gpus() or _has_jax_on_gpus()):
        return 0
    there = _of_gpus("index,uuid")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(there)
    # As for CUDA itself, a UUID may be cut short, and whatever follows an unknown device does not count.
    names = [each.strip() for each in visible.split(",")]
    known = (any(name == index or uuid.startswith(name or " ") for index, uuid in there) for name in names)
    return sum(1 for _ in takewhile(bool, known))


def _of_gpus(asked: str, *options: str) -> list[list[str]]:
    """A row for each GPU; none if they cannot be queried."""
    query = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits", *options]
    try:
        # In its own process group, like everything the server starts: otherwise it would be reaped as an orphan.
        answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=20, process_group=0).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[part.strip() for part in line.split(",")] for line in answer.splitlines()]


def _visible_gpus(most: int = 1) -> list[str]:
    """The indices of the first GPUs that a process may use."""
    if not _has_driver():
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    indices = [str(number) for number in range(most)] if visible is None else visible.split(",")[:most]
    return [index.strip() for index in indices if index.strip() not in ("", "-1")]


def _has_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _has_torch_on_gpus() -> bool:
    return has_torch() and not metadata.version("torch").endswith("+cpu")


def _has_jax_on_gpus() -> bool:
    return has_jax() and (_is_installed("jax_cuda12_plugin") or _is_installed("jax_cuda13_plugin"))


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _free_on_machine() -> int:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="ascii").splitlines()
    except OSError:
        return []
